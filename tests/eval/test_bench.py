from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.bench import TARGETS, rates, read_chats, summarise, table, verdict
from eval.client import Measurement
from eval.servers import ServerFailed

ROUND = {
    "transformers.single": 10.0, "transformers.burst": 9.0, "plain.single": 35.0, "plain.burst": 81.0,
    "lookup.single": 36.0, "lookup.burst": 80.0, "plain.copy": 30.0, "lookup.copy": 60.0,
    "step.rows_1": 0.010, "step.rows_4": 0.014, "memory.gib": 1.2,
}  # fmt: skip


def item(**changes: Any) -> Measurement:
    base: dict[str, Any] = {"tokens": 11, "tpot": 0.1, "ttft": 0.5, "sent_at": 0.0, "finished_at": 2.0}
    return Measurement(**{"outcome": "ok", **base, **changes})


def test_ratios_are_taken_within_a_round_so_shared_noise_cancels() -> None:
    slow = {key: value if key == "memory.gib" else value * (3 if key.startswith("step") else 1 / 3)
            for key, value in ROUND.items()}  # fmt: skip
    summary = summarise([ROUND, slow])
    assert summary["single_stream"].value == pytest.approx(3.5)
    assert summary["single_stream"].low == pytest.approx(3.5)
    assert summary["burst"].value == pytest.approx(9.0)
    assert summary["verify"].value == pytest.approx(1.4)
    assert summary["lookup_copy"].value == pytest.approx(2.0)
    assert "block_chat" not in summary


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("single_stream", 2.9, "MISSED"), ("single_stream", 3.0, "reached"), ("verify", 1.6, "MISSED"),
     ("verify", 1.5, "reached"), ("memory_gib", 3.1, "MISSED"), ("lookup_chat", 0.1, "")],
)  # fmt: skip
def test_verdicts_know_which_way_is_better(name: str, value: float, expected: str) -> None:
    assert verdict(name, value) == expected


def test_table_shows_every_ratio_with_its_target() -> None:
    text = table([ROUND], summarise([ROUND]))
    for name in ("single_stream", "burst", "verify", "lookup_copy", "memory_gib"):
        assert TARGETS[name][0] in text
    assert ">= 3 " in text
    assert "<= 1.5 " in text


def test_rates_of_some_requests() -> None:
    made = rates([item(), item(tokens=21, tpot=0.2, sent_at=1.0, finished_at=5.0)])
    assert made.decode == pytest.approx(30 / (10 * 0.1 + 20 * 0.2))
    assert made.total == pytest.approx(32 / 5.0)
    assert made.tau is None
    spoken = item(speculation={"num_accepted_draft_tokens": 6, "num_spec_steps": 4})
    assert rates([spoken]).tau == 2.5


def test_a_failed_request_ends_the_benchmark_instead_of_entering_a_mean() -> None:
    with pytest.raises(ServerFailed, match="HTTP 500"):
        rates([item(), item(outcome="error", error="HTTP 500")])


def test_chats_of_a_file_are_its_prompts_and_a_line_without_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "Why?"}\n{"prompt": "How?", "id": 3}\n')
    assert read_chats(path) == ["Why?", "How?"]
    path.write_text('{"prompt": "Why?"}\n{"question": "How?"}\n')
    with pytest.raises(ValueError, match=r'chats.jsonl line 2: no "prompt"'):
        read_chats(path)
