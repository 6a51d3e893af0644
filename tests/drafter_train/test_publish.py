"""Publishing through the real huggingface_hub against a local stand-in: what is pinned is what was sent and loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import save_file

from drafter_train.card import main as card_main
from drafter_train.checkpoints import export_drafter
from drafter_train.publish import main
from drafter_train.recipe import load_recipe
from eval.servers import free_port
from scripts.hub_stand_in import TOKEN, HubStandIn
from tests.serve.drafter.random_drafters import TARGET_LAYERS, drafter_config, random_drafter
from tests.tiny_models import write_model

ROOT = Path(__file__).resolve().parents[2]
REPO = "student/tiny-drafter"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with HubStandIn() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("publish-target")
    write_model(folder, "llama", num_hidden_layers=TARGET_LAYERS)
    return folder


@pytest.fixture
def work(tmp_path: Path, target: Path) -> Path:
    """A folder with recipe.yaml and a trained, evaluated drafter in final/."""
    recipe = {
        "name": "tiny",
        "target": str(target),
        "train": {"max_steps": 1, "output": str(tmp_path)},
        "publish": {"base_model": "lab/tiny", "base_revision": "abc", "data": "Made up (CC0)."},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    rates = [0.5, 0.4, 0.3, 0.2, 0.1]
    entry = {"tokens": 10, "acceptance_length": 2.0, "survival": rates, "conditional_acceptance": rates}
    report = {**entry, "responses": 3, "method": "m", "recall": {"16": rates}, "categories": {"chat": entry}}
    training = {
        "recipe": load_recipe(tmp_path / "recipe.yaml").to_json(),
        "steps": 1,
        "seconds": 1.0,
        "sequences": 4,
        "tokens": 50,
    }
    model = random_drafter(drafter_config())
    export_drafter(tmp_path / "final", model, {"drafter_eval.json": report, "training.json": training})
    (tmp_path / "final" / "optimizer.bin").write_bytes(b"stays here")
    return tmp_path


def arguments(work: Path) -> list[str]:
    where = ["--config", str(work / "recipe.yaml"), "--drafter", str(work / "final"), "--repo", REPO]
    return [*where, "--manifest", str(work / "manifest.json"), "--attempts", "3", "--pause", "0.02"]


@pytest.fixture
def run(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command in this process: (hub URL, options, token) -> exit status and what it said."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def call(url: str, *options: str, token: str | None = TOKEN) -> tuple[int, str]:
        monkeypatch.setenv("HF_ENDPOINT", url)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        else:
            monkeypatch.delenv("HF_TOKEN", raising=False)
        status = main([*arguments(work), *options])
        return status, capsys.readouterr().err

    return call


def test_what_is_pinned_is_what_was_sent(work: Path, hub: HubStandIn, run: Run) -> None:
    hub.store.faults.busy = 1
    status, said = run(hub.url)
    assert status == 0, said
    pinned = json.loads((work / "manifest.json").read_text())
    sha, files = hub.store.commits[REPO][-1]
    assert pinned == {"drafter_hf_repo": REPO, "revision": sha}
    names = {"config.json", "model.safetensors", "drafter_eval.json", "training.json", "README.md", ".gitattributes"}
    assert set(files) == names
    assert files["model.safetensors"] == (work / "final" / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    for part in (
        "base_model: lab/tiny",
        "abc",
        "Made up (CC0).",
        "| chat |",
        "vllm serve",
        "sglang",
        "start_server.sh",
    ):
        assert part in card
    fetched = [line for line in hub.store.requests if line.startswith("GET") and "/resolve/" in line]
    assert {line.rsplit("/", 1)[1] for line in fetched} == names - {"README.md", ".gitattributes"}
    assert all(f"/resolve/{sha}/" in line for line in fetched)
    assert hub.store.requests[0] == "GET /api/whoami-v2"

    status, said = run(hub.url)
    assert status == 0, said
    assert json.loads((work / "manifest.json").read_text())["revision"] == hub.store.commits[REPO][-1][0]


@pytest.mark.parametrize(
    ("token", "role", "repo", "message"),
    [
        ("hf_badtoken", "write", REPO, "refused the token (HTTP 401)"),
        (None, "write", REPO, "no token; set HF_TOKEN"),
        (TOKEN, "read", REPO, "may only read"),
        (TOKEN, "write", "stranger/x", "cannot write to stranger (may: student, lab)"),
        (TOKEN, "write", "nameonly", "must be OWNER/NAME, got 'nameonly'"),
    ],
)
def test_the_token_is_checked_before_anything_else(
    work: Path, hub: HubStandIn, run: Run, token: str | None, role: str, repo: str, message: str
) -> None:
    hub.store.role = role
    status, said = run(hub.url, "--repo", repo, token=token)
    assert status == 1
    assert message in said
    assert "hf_badtoken" not in said
    assert set(hub.store.requests) <= {"GET /api/whoami-v2"}
    assert not (work / "manifest.json").exists()
    assert not (work / "final" / "README.md").exists()


def test_an_unreachable_hub_is_tried_a_few_times_and_named(work: Path, run: Run) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    status, said = run(url)
    assert status == 1
    assert said.count("trying again") == 2
    assert f"checking the token: {url} failed 3 times" in said
    assert str(work / "final") in said


def test_a_failed_upload_leaves_the_folder_and_no_manifest_and_can_be_repeated(
    work: Path, hub: HubStandIn, run: Run
) -> None:
    before = {path.name: path.read_bytes() for path in (work / "final").iterdir()}
    (work / "manifest.json").write_text("old")
    hub.store.faults.lose_upload = True
    status, said = run(hub.url)
    assert status == 1
    assert f"uploading to {REPO}" in said
    assert f"the drafter is untouched in {work / 'final'}" in said
    assert (work / "manifest.json").read_text() == "old"
    for name, data in before.items():
        assert (work / "final" / name).read_bytes() == data
    hub.store.faults.lose_upload = False
    status, said = run(hub.url)
    assert status == 0, said
    assert json.loads((work / "manifest.json").read_text())["revision"] == hub.store.commits[REPO][-1][0]


def test_bytes_that_come_back_changed_are_not_pinned(work: Path, hub: HubStandIn, run: Run) -> None:
    hub.store.faults.spoil = "drafter_eval.json"
    status, said = run(hub.url)
    assert status == 1
    assert "drafter_eval.json came back with other bytes than were sent" in said
    assert not (work / "manifest.json").exists()


def test_a_drafter_that_does_not_load_is_not_uploaded(work: Path, hub: HubStandIn, run: Run) -> None:
    config = json.loads((work / "final" / "config.json").read_text())
    (work / "final" / "config.json").write_text(json.dumps({**config, "vocab_size": 321}))
    status, said = run(hub.url)
    assert status == 1
    assert "vocab_size is 321, the target has 320" in said
    assert hub.store.private == {}


def test_check_token_alone_publishes_nothing(work: Path, hub: HubStandIn, run: Run) -> None:
    status, said = run(hub.url, "--check-token")
    assert status == 0
    assert "student's and may write to student/tiny-drafter" in said
    assert hub.store.requests == ["GET /api/whoami-v2"]


def test_what_was_published_is_there_for_the_next_stand_in(work: Path, run: Run, tmp_path: Path) -> None:
    with HubStandIn(tmp_path / "hub") as hub:
        assert run(hub.url)[0] == 0
    with HubStandIn(tmp_path / "hub") as hub:
        files = hub.store.tree(REPO, json.loads((work / "manifest.json").read_text())["revision"])
        assert files is not None
        assert files[1]["model.safetensors"] == (work / "final" / "model.safetensors").read_bytes()
        status, said = run(hub.url)
        assert status == 0, said


def test_the_stand_in_gives_a_command_its_address_and_token(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.hub_stand_in", str(tmp_path), "sh", "-c", 'echo "$HF_ENDPOINT"; exit 7']
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 7
    assert result.stdout.startswith("http://127.0.0.1:")


def test_the_command_line_reads_the_endpoint_from_the_environment(work: Path, hub: HubStandIn) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "drafter_train.publish", *arguments(work), "--check-token"]
    result = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert f"{hub.url}: the token is student's" in result.stderr


def list_tokens(work: Path, count: int) -> Path:
    path = work / "final" / "extras" / "head_tokens.safetensors"
    path.parent.mkdir()
    save_file({"token_ids": torch.arange(count)}, path)
    return path


def test_a_list_of_tokens_is_published_compared_and_told_of(work: Path, hub: HubStandIn, run: Run) -> None:
    path = list_tokens(work, 234)
    assert card_main(["--config", str(work / "recipe.yaml"), "--drafter", str(work / "final")]) == 0
    assert "the 234 tokens most frequent" in (work / "final" / "README.md").read_text()
    status, said = run(hub.url)
    assert status == 0, said
    _, files = hub.store.commits[REPO][-1]
    assert files["extras/head_tokens.safetensors"] == path.read_bytes()
    assert "the 234 tokens most frequent" in files["README.md"].decode()
    hub.store.faults.spoil = "extras/head_tokens.safetensors"
    (work / "manifest.json").unlink()
    status, said = run(hub.url)
    assert status == 1
    assert "extras/head_tokens.safetensors came back with other bytes than were sent" in said
    assert not (work / "manifest.json").exists()


def test_a_file_of_an_earlier_drafter_is_named_until_it_is_gone(work: Path, hub: HubStandIn, run: Run) -> None:
    """A grader fetches it too, and guesses among tokens of another drafter."""
    path = list_tokens(work, 234)
    assert run(hub.url)[0] == 0
    pinned = (work / "manifest.json").read_text()
    path.unlink()
    status, said = run(hub.url)
    assert status == 1
    assert "extras/head_tokens.safetensors is only in the published revision, of an earlier drafter: delete it" in said
    assert (work / "manifest.json").read_text() == pinned


@pytest.mark.parametrize("closed", ["private", "gated"])
def test_a_repository_that_a_grader_cannot_read_is_not_pinned_unasked(
    work: Path, hub: HubStandIn, run: Run, closed: str
) -> None:
    if closed == "private":
        hub.store.private[REPO] = True
    else:
        hub.store.private[REPO], hub.store.gated = False, {REPO}
    hub.store.commit(REPO, {".gitattributes": b""})
    status, said = run(hub.url)
    assert status == 1
    assert f"{REPO} is {closed}, and a grader cannot read it" in said
    assert len(hub.store.commits[REPO]) == 1
    assert not (work / "manifest.json").exists()
    status, said = run(hub.url, "--private")
    assert status == 0, said


@pytest.mark.parametrize(("measured", "said"), [(320, "the whole vocabulary"), (234, "the listed tokens")])
def test_a_card_says_which_tokens_the_rates_are_of_and_what_the_list_costs(
    work: Path, measured: int, said: str
) -> None:
    list_tokens(work, 234)
    path = work / "final" / "drafter_eval.json"
    cost = {"tokens": 234, "responses": 40, "acceptance_length": 3.44, "acceptance_length_of_all_tokens": 3.56}
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_tokens": measured, "frequent_tokens": cost}))
    assert card_main(["--config", str(work / "recipe.yaml"), "--drafter", str(work / "final")]) == 0
    card = " ".join((work / "final" / "README.md").read_text().split())
    assert f"They were taken over {said}; over 40 of the answers" in card
    assert "234 listed tokens gives 3.44 where all give 3.56 (-3.4%)" in card


def test_a_list_of_tokens_that_the_target_lacks_is_not_uploaded(work: Path, hub: HubStandIn, run: Run) -> None:
    list_tokens(work, 1234)
    status, said = run(hub.url)
    assert status == 1
    assert "outside the target's vocabulary of 320" in said
    assert hub.store.private == {}


def test_the_shipped_drafters_card_is_what_its_recipe_says(tmp_path: Path) -> None:
    shipped = ROOT / "drafter_train" / "releases" / "smollm2-135m-instruct"
    copy = tmp_path / shipped.name
    copy.mkdir()
    for path in shipped.iterdir():
        if path.name != "README.md":
            (copy / path.name).symlink_to(path)
    recipe = ROOT / "drafter_train" / "configs" / "smollm2-135m-more.yaml"
    assert card_main(["--config", str(recipe), "--drafter", str(copy)]) == 0
    card = (copy / "README.md").read_text(encoding="utf-8")
    assert card == (shipped / "README.md").read_text(encoding="utf-8")
    assert "cross-entropy with D-PACE weights, 30% of the label replaced by the target's distribution;" in card
