"""What is learned from a sample: the served response and nothing else; and what is left out, counted or refused."""

from __future__ import annotations

import json
import os
import resource
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from drafter_train.blocks import cut_blocks
from drafter_train.chat import ChatTokenizer
from drafter_train.corpus import BatchOrder, Corpus, NothingToLearn, load_corpus, make_batch
from drafter_train.generate import open_store
from drafter_train.hub import Hub, Patience
from drafter_train.recipe import PassConfig, load_recipe
from drafter_train.target import Target
from drafter_train.tokens import Response, TokenStore, _aside, write_atomically
from drafter_train.train import main
from serve.api.chat import load_chat_renderer
from serve.tokenizer import load_tokenizer
from tests.drafter_train.tiny_runs import metrics, write_run
from tests.tiny_models import write_model

ONE = [{"role": "user", "content": "Who?"}]
THREE = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Not this."},
    {"role": "user", "content": "And now?"},
]
ANSWER = "It was me."


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data-target")
    write_model(folder, "llama", hidden_size=32, intermediate_size=48)
    return folder


def store_of(target: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[TokenStore, str]:
    """One turn, three turns, and a prompt over the limit of 100 tokens; each answered with ANSWER and an end token."""
    prompts = [{"messages": ONE}, {"messages": THREE}, {"prompt": "too long " * 30}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    recipe = {"name": "d", "target": str(target), "data": {"max_prompt_tokens": 100}, "train": {"max_steps": 1}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(folder / "recipe.yaml")
    store = open_store(loaded, str(folder / "prompts.jsonl"), str(folder / "tokens"), (PassConfig(),), 0)
    said = capsys.readouterr().err
    answer = ChatTokenizer(target).encode_text(f"{ANSWER}<|im_end|>")
    store.append([Response(i, 0, np.array(answer), 0, True) for i in range(store.num_prompts)], "t")
    return store, said


def supervised(corpus: Corpus, index: int) -> list[int]:
    """Every token that is a label of some block, in order of position."""
    sample = np.array([index])
    batch = make_batch(corpus, sample, anchors=256, seed=0, step=0)
    blocks = cut_blocks(batch, 4, 3)
    places = blocks.positions[..., 1:][blocks.valid].tolist()
    tokens = dict(zip(places, blocks.labels[blocks.valid].tolist(), strict=True))
    return [tokens[place] for place in sorted(tokens)]


def test_labels_are_the_answer_with_its_end_token_and_no_header(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, said = store_of(target, tmp_path, capsys)
    assert "1 of 3 prompts are longer than 100 tokens: left out" in said
    corpus = load_corpus(store, max_length=512)
    assert (len(corpus), corpus.dropped) == (2, 0)
    chat = ChatTokenizer(target)
    renderer = load_chat_renderer(target, load_tokenizer(target))
    for index, messages in enumerate((ONE, THREE)):
        # The first token of an answer comes from the prefill: it is an anchor, never drafted.
        assert chat.decode(supervised(corpus, index)) == f"{ANSWER}<|im_end|>"[1:]
        prompt = corpus.row(index)[: corpus.prompt_lengths[index]].tolist()
        assert chat.decode(prompt) == renderer.render(messages)


def test_samples_with_nothing_to_learn_are_dropped_and_counted(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = store_of(target, tmp_path, capsys)
    store.append([Response(0, 1, np.array([2]), 0, True), Response(1, 1, np.array([], dtype=np.int64), 0, False)], "t")
    corpus = load_corpus(store, max_length=512)
    assert (len(corpus), corpus.dropped) == (2, 2)
    longest = max(len(store.prompt(i)) for i in range(2))
    assert len(load_corpus(store, max_length=longest + 1)) == 1
    with pytest.raises(NothingToLearn, match="none of 4 responses has a token to predict"):
        load_corpus(store, max_length=5)


def test_sampled_tokens_can_be_left_out_of_the_labels(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = store_of(target, tmp_path, capsys)
    store.append([Response(0, 1, np.arange(20, 30), 6, False)], "t")
    corpus = load_corpus(store, max_length=512, anchors_in_sampled=False)
    assert supervised(corpus, 2) == list(range(26, 30))


def test_every_epoch_reads_every_sample_once_in_an_order_of_its_own() -> None:
    lengths = np.arange(10, 33)
    order = BatchOrder(lengths, 4, seed=1)
    assert order.steps_per_epoch == 6
    epochs = [np.concatenate([order(step) for step in range(e * 6, e * 6 + 6)]).tolist() for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(23))
    assert epochs[0] != epochs[1]
    again = BatchOrder(lengths, 4, seed=1)
    assert [again(step).tolist() for step in (11, 2, 7)] == [order(step).tolist() for step in (11, 2, 7)]


def test_shares_of_the_ranks_make_up_the_global_batch() -> None:
    ids = np.arange(4, 64, dtype=np.uint32)
    corpus = Corpus(ids, np.array([0, 20, 40]), np.full(3, 20), np.full(3, 4), np.full(3, 4), ("a",) * 3, 0)
    samples = np.array([2, 0, 1])
    whole = make_batch(corpus, samples, 4, seed=0, step=5)
    parts = [make_batch(corpus, samples, 4, 0, 5, rank, 2) for rank in range(2)]
    assert torch.equal(whole.ids[0::2], parts[0].ids)
    assert torch.equal(whole.anchors[1::2], parts[1].anchors)


def test_features_that_are_not_numbers_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path, max_steps=6, save_every_seconds=1000.0)
    path = tmp_path / "target" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    assert main(["--config", str(recipe), "--device", "cpu"]) == 1
    assert "is not finite" in (said := capsys.readouterr().err) or "loss is nan" in said
    assert not (tmp_path / "run" / "final").exists()
    assert not (tmp_path / "run" / "latest").exists()


def test_responses_of_another_chat_setup_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path)
    config = tmp_path / "target" / "tokenizer_config.json"
    data = json.loads(config.read_text())
    config.write_text(json.dumps({**data, "chat_template": data["chat_template"] + " "}))
    assert main(["--config", str(recipe), "--device", "cpu"]) == 1
    assert "was written with another chat setup" in (said := capsys.readouterr().err)
    assert "template_sha256" in said
    config.write_text(json.dumps(data))
    held_out = tmp_path / "eval" / "meta.json"
    meta = json.loads(held_out.read_text())
    held_out.write_text(json.dumps({**meta, "fingerprint": {**meta["fingerprint"], "thinking": "on"}}))
    assert main(["--config", str(recipe), "--device", "cpu"]) == 1
    assert "eval was written with another chat setup" in capsys.readouterr().err


def test_a_part_of_an_epoch_ends_the_run_too(tmp_path: Path) -> None:
    recipe = write_run(tmp_path, max_steps=0, epochs=0.05)
    assert main(["--config", str(recipe), "--device", "cpu", "--stop-after", "3"]) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "final" / "config.json").exists()


def test_a_full_disk_ends_in_one_sentence_and_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of files stands for the disk: the system refuses the rest of a write in the same way."""
    recipe = str(write_run(tmp_path, max_steps=2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = TokenStore(tmp_path / "eval")
    files = sorted(path.name for path in store.folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert main(["--config", recipe, "--device", "cpu"]) == 1
        with pytest.raises(OSError, match="large"):
            store.append([Response(0, 0, np.random.default_rng(0).integers(0, 300, 9000), 0, False)], "t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "training stopped: " in (said := capsys.readouterr().err)
    assert "cannot be written" in said
    assert sorted(path.name for path in store.folder.iterdir()) == files
    assert main(["--config", recipe, "--device", "cpu"]) == 0


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize(
    "name", ["tokens-23/responses-000of001-00000.npz", "tokens-23/prompts.npz", "target/model.safetensors"]
)
def test_a_file_that_is_not_whole_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, share: float
) -> None:
    recipe, path = str(write_run(tmp_path, max_steps=1)), tmp_path / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert main(["--config", recipe, "--device", "cpu"]) == 1
    assert f"training stopped: {path} is not a whole " in capsys.readouterr().err


def test_a_prompt_answered_by_two_jobs_is_one_sample(tmp_path: Path) -> None:
    """Shards of eight and of four at the same time: neither sees what the other has not yet written."""
    write_run(tmp_path)
    store = TokenStore(tmp_path / "tokens-23")
    before = load_corpus(store, 64)
    twice = [item for item in store.responses() if item.prompt in (2, 3, 9)]
    store.append(twice, "001of004")
    after = load_corpus(store, 64)
    assert (len(after), after.keys, after.dropped) == (len(before), before.keys, before.dropped + 3)


@pytest.mark.parametrize("name", ["model.layers.2.input_layernorm.weight", "lm_head.weight"])
def test_a_target_that_lacks_a_tensor_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """An embedding in place of a head that was lost is another model."""
    recipe, path = str(write_run(tmp_path, max_steps=1)), tmp_path / "target" / "model.safetensors"
    weights = load_file(path)
    del weights[name]
    save_file(weights, path)
    assert main(["--config", recipe, "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert f"training stopped: the target's weights lack {name.removeprefix('model.')}" in said


def test_the_target_is_read_from_the_files_that_the_server_reads(tmp_path: Path) -> None:
    """A folder that was filled twice keeps shards of the first time."""
    write_model(tmp_path, "llama")
    single = tmp_path / "model.safetensors"
    weights = load_file(single)
    ids = torch.arange(4, 12)[None]
    expected = Target.load(tmp_path, "cpu", torch.float32).hidden_states(ids, (0,))
    save_file({name: torch.ones_like(t) for name, t in weights.items()}, tmp_path / "model-00002-of-00003.safetensors")
    assert torch.equal(Target.load(tmp_path, "cpu", torch.float32).hidden_states(ids, (0,))[1], expected[1])
    names = sorted(weights)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({name: weights[name] for name in names if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    single.unlink()
    assert torch.equal(Target.load(tmp_path, "cpu", torch.float32).hidden_states(ids, (0,))[1], expected[1])
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002"):
        Target.load(tmp_path, "cpu", torch.float32)


@pytest.mark.parametrize("token", [-1, 320, 65_536 + 5])
def test_a_token_that_the_target_has_no_row_for_is_not_stored(tmp_path: Path, token: int) -> None:
    """Added to the tokenizer and not to the model, or from a server of another one: two bytes would make it another."""
    write_run(tmp_path)
    store = TokenStore(tmp_path / "tokens-23")
    said = f"token {token} is outside the target's vocabulary of 320"
    with pytest.raises(ValueError, match=said):
        store.append([Response(0, 1, np.array([7, token, 8]), 0, False)], "t")
    with pytest.raises(ValueError, match=said):
        TokenStore.create(tmp_path / "new", [[7, token]], store.meta)


def test_writers_of_one_number_on_two_nodes_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a container is number 1, on every node."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    path = tmp_path / "prompts.npz"
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    with _aside(path) as file:
        file.write(b"ours")
        monkeypatch.setattr(socket, "gethostname", lambda: "n2")
        write_atomically(path, b"theirs")
        assert path.read_bytes() == b"theirs"
    assert path.read_bytes() == b"ours"
    assert [item.name for item in tmp_path.iterdir()] == ["prompts.npz"]


def test_a_first_position_under_the_floor_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path, max_steps=6, eval_every=2, first_position_floor=0.99)
    assert main(["--config", str(recipe), "--device", "cpu"]) == 1
    assert "below train.first_position_floor 0.99" in capsys.readouterr().err
    assert [line["step"] for line in metrics(tmp_path / "run") if "eval" in line] == [2, 4]


def test_a_node_without_network_trains_where_a_hub_that_cannot_be_reached_would_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = str(write_run(tmp_path, max_steps=1))
    arguments = ["--config", recipe, "--device", "cpu", "--set", "publish.repo=someone/drafter"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    monkeypatch.setattr("drafter_train.train.Hub", lambda: Hub(patience=Patience(attempts=1)))
    assert main(arguments) == 1
    assert "training not started: " in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(arguments) == 0
    assert "whether the token may write to someone/drafter was not checked" in capsys.readouterr().err
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "unknown setting train.lrr"),
        ("train.lr=fast", "train.lr must be a number, got 'fast'"),
        ("train.batch_sequences=1.5", "train.batch_sequences must be int, got 1.5"),
        ("train.loss=l2", "train.loss must be one of dpace, decay, got 'l2'"),
        ("train.micro_sequences=9", "train.micro_sequences must be between 1 and train.batch_sequences 4, got 9"),
        ("train.max_steps=0", "one of train.max_steps, train.epochs and train.max_seconds"),
        ("draft.block_size=1", "draft.block_size must be between 2 and 64, got 1"),
        ("draft.target_layer_ids=[a]", "draft.target_layer_ids[0] must be int, got 'a'"),
        ("data.passes=[{sampled_tokens: [5, 2]}]", "data.passes[0].sampled_tokens must be [low, high], got [5, 2]"),
        ("init.source=checkpoint", "init.checkpoint must name a folder"),
        ("nonsense", "--set wants section.key=value, got 'nonsense'"),
        ("train.lr.x=1", "--set train.lr.x: lr is not a section"),
        (
            "data.thinking=off",
            "data.thinking must be str, got False (YAML reads on, off, yes and no as that: quote them)",
        ),
        ("train.log_every=0", "train.log_every must be at least 1, got 0"),
        ("train.max_steps=-5", "train.max_steps must be at least 0, got -5"),
        ("train.anchors=0", "train.anchors must be at least 1, got 0"),
        ("train.warmup=2", "train.warmup must be between 0 and 1, got 2.0"),
        ("train.decay_gamma=0", "train.decay_gamma must be above 0, got 0.0"),
        ("train.betas=[0.9]", "train.betas must be two numbers"),
        ("draft.layers=0", "draft.layers must be between 1 and 64, got 0"),
    ],
)
def test_recipe_errors_name_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: r\ntarget: t\ntrain: {max_steps: 1, batch_sequences: 4, micro_sequences: 2, lr: 1.0e-3}\n")
    with pytest.raises(SystemExit) as stop:
        main(["--config", str(path), "--set", override])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.target_layer_ids=[0, 3]", "target_layer_ids [0, 3] must be different layers of 0..2"),
        ("draft.mask_token_id=320", "mask_token_id 320 is outside the vocabulary of 320"),
        ("init.layers=[0, 1]", "init.layers names 2 target layers for 1 draft layers"),
        ("draft.head_dim=16", "the drafter's head_dim is 16, the target's 8"),
    ],
)
def test_a_recipe_that_does_not_fit_its_target_names_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    recipe = write_run(tmp_path)
    assert main(["--config", str(recipe), "--device", "cpu", "--set", override]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "drafter_train" / "configs").glob("*.yaml")))
def test_shipped_recipes_are_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.data.max_length > recipe.data.max_prompt_tokens
    assert recipe.publish.base_model or recipe.name == "smoke"
