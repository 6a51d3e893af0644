"""Prompts from files and from the target itself: filtered, once each, held out by their text, and resumed."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drafter_train.generate import read_prompts
from drafter_train.prompts import main, messages_of, normalised, place_of
from drafter_train.vary import LANGUAGES, WISHES, vary
from scripts.hub_stand_in import TOKEN, HubStandIn
from tests.tiny_models import write_model


def write_recipe(folder: Path, target: str = "nowhere") -> Path:
    data = {"prompts": str(folder / "train.jsonl"), "eval_prompts": str(folder / "eval.jsonl"), "max_prompt_tokens": 24}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "p", "target": target, "data": data, "train": {"max_steps": 1}}))
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_files_are_filtered_deduplicated_and_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    records: list[dict[str, Any]] = [{"prompt": f"Tell me about the number {i}."} for i in range(60)]
    records += [{"prompt": "tell me,  about THE number 7"}, {"prompt": "short"}, {"prompt": "x" * 300}, {"other": 1}]
    source = write_jsonl(tmp_path / "mine.jsonl", records)
    assert main(["--config", str(recipe), f"file:{source}", "--hold-out", "0.3", "--max-chars", "200"]) == 0
    train, held_out = ids(tmp_path / "train.jsonl"), ids(tmp_path / "eval.jsonl")
    assert len(train) + len(held_out) == 60
    assert 5 < len(held_out) < 35
    assert not set(train) & set(held_out)
    said = capsys.readouterr().err
    assert "64 read" in said
    assert "1 duplicate, 1 no text, 1 too long, 1 too short" in said
    rows = read_prompts(tmp_path / "train.jsonl")
    assert rows[0]["category"] == "mine"
    assert rows[0]["messages"][0]["role"] == "user"


def test_an_empty_system_turn_costs_no_prompt_and_half_a_character_only_its_own(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "What is in this picture?"}
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "system", "content": ""}, asked]},
        {"prompt": "A broken emoji \ud83d is in here."},
        {"prompt": "This one is whole."},
    ]
    assert messages_of(records[0]) == [asked]
    source = write_jsonl(tmp_path / "mine.jsonl", records)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    recipe = str(write_recipe(tmp_path))
    assert main(["--config", recipe, f"file:{source}", f"vary:1:{source}", "--hold-out", "0"]) == 0
    kept = [record["messages"][0]["content"] for record in read_prompts(tmp_path / "train.jsonl")]
    assert kept[:2] == ["What is in this picture?", "This one is whole."]
    assert len(kept) == 3


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "latin.jsonl"
    source.write_bytes(b'{"prompt": "all is well here"}\n{"prompt": "a caf\xe9 in Lyon"}\n')
    with pytest.raises(SystemExit):
        main(["--config", str(write_recipe(tmp_path)), f"file:{source}"])
    assert "latin.jsonl line 2 is not JSON in UTF-8" in capsys.readouterr().err


def test_a_second_run_adds_only_what_is_new_also_after_a_cut(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    first = write_jsonl(tmp_path / "a.jsonl", [{"question": f"What is the square of {i}?"} for i in range(10)])
    options = ["--config", str(recipe), f"file:{first}", "--hold-out", "0"]
    assert main(options) == 0
    whole = (tmp_path / "train.jsonl").read_bytes()
    assert main(options) == 0
    assert (tmp_path / "train.jsonl").read_bytes() == whole
    (tmp_path / "train.jsonl").write_bytes(whole[:-25])
    assert main(options) == 0
    assert (tmp_path / "train.jsonl").read_bytes() == whole


def test_parquet_and_gzip_hold_the_same_prompts(tmp_path: Path) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    records = [{"instruction": f"Write a line about topic {i}.", "category": "writing"} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "p.parquet")
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    found = []
    for name in ("p.parquet", "p.jsonl.gz"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        assert main(["--config", str(write_recipe(folder)), f"file:{tmp_path / name}", "--hold-out", "0"]) == 0
        found.append((folder / "train.jsonl").read_text())
    assert found[0] == found[1]
    assert json.loads(found[0].splitlines()[0])["category"] == "writing"


def test_a_hub_data_set_is_streamed_from_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    for split in ("train", "test"):
        write_jsonl(folder / f"{split}.jsonl", [{"question": f"What is the {split} number {i}?"} for i in range(30)])
    recipe = write_recipe(tmp_path)
    assert main(["--config", str(recipe), "--hold-out", "0", "--limit", "20", f"hub:{folder}:test"]) == 0
    found = read_prompts(tmp_path / "train.jsonl")
    assert [r["messages"][0]["content"] for r in found] == [f"What is the test number {i}?" for i in range(20)]
    assert {r["category"] for r in found} == {"mine"}


def test_a_hub_data_set_is_streamed_over_http(tmp_path: Path) -> None:
    """Through the real ``datasets`` against a local hub: a Parquet configuration that the card names, read by ranges,
    then a data set that is not there."""
    import pyarrow
    from pyarrow import parquet

    rows = [{"messages": [{"role": "user", "content": f"Chat with me about topic {i}."}]} for i in range(40)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=8)
    card = "---\nconfigs:\n- config_name: chat\n  data_files:\n  - {split: talk, path: data/chat-*.parquet}\n---\n"
    recipe = str(write_recipe(tmp_path))
    program = (
        "import sys; from drafter_train.prompts import main; common = ['--config', sys.argv[1], '--hold-out', '0']; "
        "main([*common, '--limit', '20', 'hub:lab/chats:talk:chat']); main([*common, 'hub:lab/nothing'])"
    )
    with HubStandIn() as hub:
        hub.store.put_dataset(
            "lab/chats",
            {"README.md": card.encode(), "data/chat-00000.parquet": (tmp_path / "rows.parquet").read_bytes()},
        )
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", program, recipe],
            env={**os.environ, **environment},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=120,
        )
        asked = hub.store.requests
    found = read_prompts(tmp_path / "train.jsonl")
    assert [r["messages"][0]["content"] for r in found] == [f"Chat with me about topic {i}." for i in range(20)]
    assert {r["category"] for r in found} == {"chats"}
    assert done.returncode == 2
    assert "error: hub data set lab/nothing: " in done.stderr.splitlines()[-1]
    assert any(line.endswith("/data/chat-00000.parquet") for line in asked)
    assert any(line.startswith("GET /api/datasets/lab/chats/") for line in asked)


def test_conversations_end_with_the_last_user_turn() -> None:
    turns = [
        {"from": "human", "value": "Hello there"},
        {"from": "gpt", "value": "Hi"},
        {"from": "human", "value": "Who are you?"},
        {"from": "gpt", "value": "A model"},
    ]
    messages = messages_of({"conversations": turns})
    assert messages is not None
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages_of({"messages": [{"role": "tool", "content": "x"}]}) is None
    assert messages_of({"messages": [{"role": "assistant", "content": "x"}]}) is None
    assert messages_of({"prompt": " "}) is None
    assert messages_of({"prompt": "a", "body": "b"}, "body") == [{"role": "user", "content": "b"}]


@given(st.text(min_size=1), st.sampled_from([" ", "  ", "!", "\n"]))
def test_the_side_of_a_prompt_does_not_depend_on_case_or_spacing(text: str, around: str) -> None:
    one, other = ([{"role": "user", "content": t}] for t in (text, around + text + around))
    assert place_of(normalised(one)) == place_of(normalised(other))
    assert 0 <= place_of(normalised(one))[1] < 1


def test_the_target_writes_prompts_itself(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_model(target, "llama", hidden_size=32, scale=1.5)
    recipe = write_recipe(tmp_path, str(target))
    options = ["--config", str(recipe), "self:40", "--min-chars", "1", "--hold-out", "0", "--slots", "40"]
    assert main(options) == 0
    rows = read_prompts(tmp_path / "train.jsonl")
    assert rows
    for row in rows:
        assert row["category"] == "self"
        assert "<|im_end|>" not in row["messages"][0]["content"]
    whole = (tmp_path / "train.jsonl").read_text()
    assert main(options) == 0
    assert (tmp_path / "train.jsonl").read_text() == whole


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mine.jsonl", "source must be file:PATH"),
        ("self:0", "source must be file:PATH"),
        ("file:nothing.jsonl", "nothing.jsonl"),
    ],
)
def test_bad_sources_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--config", str(write_recipe(tmp_path)), source])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a question for you"}\n{"prompt": \n')
    with pytest.raises(SystemExit):
        main(["--config", str(write_recipe(tmp_path)), f"file:{tmp_path / 'bad.jsonl'}"])
    assert "bad.jsonl line 2 is not JSON" in capsys.readouterr().err


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4, unique=True), st.integers(1, len(WISHES)))
def test_variants_of_a_prompt_differ_from_it_and_from_each_other(prompts: list[str], times: int) -> None:
    records = [{"prompt": prompt, "category": "c"} for prompt in prompts]
    once = list(vary(records, times))
    assert once == list(vary(records, times))
    there = [prompt for prompt in prompts if prompt.strip()]
    assert len(once) == times * len(there)
    for i, prompt in enumerate(there):
        mine = [record["prompt"] for record in once[i * times : (i + 1) * times]]
        assert len({*mine, prompt.strip()}) == times + 1
        assert all(prompt.strip() in text for text in mine)


def test_a_translation_is_also_asked_for_in_other_languages() -> None:
    found = [r["prompt"] for r in vary([{"prompt": "Translate to German: I like my German dog."}], 4)]
    assert sum("German" in text for text in found) == 2
    assert all(any(language in text for language in LANGUAGES) for text in found)


def test_variants_come_from_the_command_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"What is the square of {i}?"} for i in range(3)])
    recipe = str(write_recipe(tmp_path))
    assert main(["--config", recipe, f"vary:3:{source}", "--hold-out", "0"]) == 0
    assert len(set(ids(tmp_path / "train.jsonl"))) == 9
    with pytest.raises(SystemExit):
        main(["--config", recipe, f"vary:300:{source}"])
    assert "variants of a prompt must be 1 to 20, got 300" in capsys.readouterr().err
