"""What a server traced becomes training data with the places where its rounds began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafter_train import train
from drafter_train.corpus import load_corpus
from drafter_train.tokens import TokenStore
from drafter_train.traces import main
from serve.config import ServeConfig
from serve.engine.build import build_engine
from serve.protocol import SamplingParams
from tests.drafter_train.tiny_runs import write_run


def line(**changes: Any) -> dict[str, Any]:
    return {
        "finish_reason": "length",
        "prompt_ids": [5, 6, 7],
        "output_ids": [8, 9, 10, 11, 12, 13],
        "temperature": 0.0,
        "preemptions": 0,
        "rounds": [["block", 3, 1], ["none", 0, 0], ["lookup", 3, 1]],
        **changes,
    }


def write_traces(folder: Path, *lines: dict[str, Any], tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace-1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines) + tail)
    return folder


def fill(tmp_path: Path, traces: Path, *options: str) -> TokenStore:
    recipe = write_run(tmp_path)
    place = tmp_path / "from-traces"
    arguments = ["--config", str(recipe), "--set", f"data.tokens={place}", str(traces), *options]
    assert main(arguments) == 0
    return TokenStore(place)


def test_greedy_answers_are_kept_with_their_rounds(tmp_path: Path) -> None:
    traces = write_traces(
        tmp_path / "traces",
        line(),
        line(finish_reason="error"),
        line(temperature=0.7),
        line(prompt_ids=[5] * 2000),
        line(preemptions=1, finish_reason="stop"),
        tail='{"half',
    )
    store = fill(tmp_path, traces)
    found = list(store.responses())
    assert [(r.prompt, r.pass_index, r.ids.tolist(), r.ended) for r in found] == [
        (0, 0, [8, 9, 10, 11, 12, 13], False),
        (0, 1, [8, 9, 10, 11, 12, 13], True),
    ]
    # Anchors: the first output token, then after 2, 1 and 2 tokens; the last place has nothing left to draft.
    assert {key: places.tolist() for key, places in store.replay().items()} == {(0, 0): [3, 5, 6]}
    corpus = load_corpus(store, 64)
    assert corpus.visited is not None
    assert corpus.visited.nonzero()[0].tolist() == [3, 5, 6]


def test_sampled_answers_are_context_when_asked_for(tmp_path: Path) -> None:
    store = fill(tmp_path, write_traces(tmp_path / "traces", line(temperature=0.7)), "--sampled")
    assert [r.greedy_from for r in store.responses()] == [6]


def test_what_a_real_engine_traced_trains_a_drafter(tmp_path: Path) -> None:
    recipe = write_run(tmp_path, name="first", max_steps=1)
    assert train.main(["--config", str(recipe), "--device", "cpu"]) == 0
    config = ServeConfig(
        model_dir=str(tmp_path / "target"),
        drafter_dir=str(tmp_path / "first" / "final"),
        proposer="block",
        block_length=3,
        weights="fp32",
        device="cpu",
        threads=1,
        trace_dir=str(tmp_path / "traces"),
    )
    engine, _ = build_engine(config)
    for i in range(3):
        engine.add(str(i), [10 + i, 20, 30], SamplingParams(max_tokens=12, ignore_eos=True))
    while engine.has_work:
        engine.step()
    store = fill(tmp_path, tmp_path / "traces")
    rounds = sum(len(json.loads(text)["rounds"]) for text in (tmp_path / "traces").glob("*").__next__().open())
    places = store.replay()
    assert len(places) == 3
    assert rounds - 3 <= sum(len(found) for found in places.values()) <= rounds
    again = ["--config", str(recipe), "--device", "cpu", "--set", f"data.tokens={store.folder}"]
    again += ["--set", "train.replay_weight=4.0", "--set", f"train.output={tmp_path / 'second'}"]
    assert train.main(again) == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [([{"finish_reason": "stop"}], "line 1 is not a trace"), ([line(temperature=1.0)], "no finished greedy request")],
)
def test_what_is_no_use_is_named(
    tmp_path: Path, lines: list[dict[str, Any]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = write_traces(tmp_path / "traces", *lines)
    with pytest.raises(SystemExit):
        fill(tmp_path, traces)
    assert message in capsys.readouterr().err
