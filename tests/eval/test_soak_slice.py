"""The soak on a tiny model for some seconds, its traffic, and that it sees what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from eval import soak
from eval.servers import our_server
from eval.soak import Memory, Tally, _judge_text, growth
from eval.soak_traffic import MALFORMED, Shot, Traffic
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.tiny_models import write_model

SECONDS = 8.0


def test_a_soak_cut_short_by_ctrl_c_is_judged_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ctrl_c(client: object, tally: Tally, memory: list[Memory], seconds: float) -> None:
        if len(memory) == 1:  # the first sample comes after a sixtieth of the time
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(soak, "_progress", ctrl_c)
    write_model(tmp_path / "model", num_hidden_layers=5, max_position_embeddings=4096)
    write_drafter(tmp_path / "drafter", random_drafter(drafter_config(max_position_embeddings=4096)))
    extra = ["--drafter-dir", str(tmp_path / "drafter"), "--threads", "1", "--weights", "fp32", "--page-size", "16"]
    extra += ["--kv-memory-mib", "1", "--max-num-seqs", "16", "--block-length", "3"]
    with our_server(tmp_path / "model", "soak", *extra) as server:
        report = asyncio.run(soak.run(server, 60 * SECONDS, 16, seed=1))
    assert SECONDS - 1 <= report["seconds"] <= 2 * SECONDS
    assert soak.exit_code({**report, "passed": True}, 60 * SECONDS) == 130
    assert soak.exit_code({**report, "passed": False}, 60 * SECONDS) == 1
    # Whether so short a run meets preemption depends on the machine's speed.
    broken = {check for check, held in report["checks"].items() if not held} - {"sequences were preempted"}
    assert not broken, json.dumps({key: report[key] for key in ("checks", "faults", "log_errors")}, indent=1)
    outcomes = report["outcomes"]
    assert outcomes["answer: whole"] > 5
    assert outcomes["sentinel: same text"] >= 6
    assert report["generated_tokens"] > 100


def test_traffic_is_mixed_as_promised_and_repeats_with_its_seed() -> None:
    shots = [Traffic(3, 640).next() for _ in range(2)]
    assert shots[0] == shots[1]
    traffic = Traffic(3, 640)
    drawn = [traffic.next() for _ in range(4000)]
    share = {kind: sum(shot.kind == kind for shot in drawn) / len(drawn) for kind in ("cancel", "malformed")}
    assert share["cancel"] == pytest.approx(0.05, abs=0.015)
    assert share["malformed"] == pytest.approx(0.01, abs=0.006)
    lengths = [json.loads(shot.content)["max_tokens"] for shot in drawn if shot.kind == "answer"]
    assert min(lengths) == 1
    assert max(lengths) > 150
    assert len({content for _, content in MALFORMED}) == len(MALFORMED)


def test_growth_compares_the_end_with_the_time_after_warm_up() -> None:
    flat = [Memory(10.0 * at, 100, 1000) for at in range(200)]
    assert growth(flat, 2000) == {"front": 0, "engine": 0}
    rising = [Memory(10.0 * at, 100, 1000 + at) for at in range(200)]
    assert growth(rising, 2000)["engine"] > 0.05
    warm = [Memory(10.0 * at, min(100, 20 + 2 * at), 1000) for at in range(200)]
    assert growth(warm, 2000)["front"] == 0


def test_memory_of_a_short_run_is_not_judged() -> None:
    assert growth([Memory(float(at), 100 + at, 1000 + at) for at in range(120)], 120) == {}
    assert growth([], 2000) == {}


def test_another_text_for_the_same_greedy_request_is_a_fault() -> None:
    tally = Tally()
    shot = Shot("sentinel", "/v1/completions", b"{}", stream=False, key=2)
    _judge_text(shot, "a", tally)
    _judge_text(shot, "a", tally)
    assert not tally.faults
    _judge_text(shot, "b", tally)
    assert len(tally.faults) == 1
