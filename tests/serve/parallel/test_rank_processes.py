"""Ranks as processes: the server over HTTP, a lost rank, a start that fails in one of them, an orderly end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.api.engine_process import EngineProcess
from serve.config import parse_config
from serve.engine.build import StartError, build_engine
from serve.protocol import FrameDecoder, SamplingParams, encode_frame
from serve.tokenizer import load_tokenizer
from tests.e2e.real_server import RealServer
from tests.serve.api.live_server import alive, eventually
from tests.tiny_models import write_model

PROMPT = "tell me"
ARGUMENTS = ("--weights", "fp32", "--page-size", "16", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder, "qwen3", seed=3)
    return folder


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def completion(http: httpx.Client) -> str:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


class Pair:
    """An engine process of two ranks, as the API process has it, and what it said last."""

    def __init__(self, folder: Path) -> None:
        self.process = EngineProcess()
        config = parse_config(["--model-dir", str(folder), *ARGUMENTS, "--tensor-parallel", "2"], {})
        self.send({"type": "config", "config": config.to_json()})
        self._decoder = FrameDecoder()
        self._waiting: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.process.socket.sendall(encode_frame(message))

    def until(self, kind: str) -> dict[str, Any]:
        self.process.socket.settimeout(60)
        while True:
            while self._waiting:
                message = self._waiting.pop(0)
                if message["type"] == kind:
                    return message
            data = self.process.socket.recv(1 << 16)
            assert data, f"the engine ended without a {kind!r} message"
            self._waiting += self._decoder.feed(data)


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Iterator[list[Pair]]:
    """Two engines, started together: a start is mostly waiting for imports."""
    started = [Pair(folder) for _ in range(2)]
    yield started
    for pair in started:
        pair.process.kill()


def test_two_ranks_answer_over_http_like_one_and_come_back_when_one_is_lost(folder: Path) -> None:
    engine, _ = build_engine(parse_config(["--model-dir", str(folder), *ARGUMENTS], {}))
    prompt = load_tokenizer(folder).encode(PROMPT, add_special_tokens=True)
    engine.add("a", prompt, SamplingParams(max_tokens=24, ignore_eos=True))
    expected = ""
    while engine.has_work:
        expected += "".join(output.text for output in engine.step())
    with RealServer(folder, *ARGUMENTS, "--tensor-parallel", "2", "--restart-engine") as two:
        with two.client() as http:
            assert completion(http) == expected
            pid = two.engine_pid()
            (follower,) = children(pid)
            os.kill(follower, signal.SIGKILL)
            eventually(lambda: not alive(pid), 10)
            eventually(lambda: http.get("/health").status_code == 200 and two.engine_pid() != pid, 60)
            assert completion(http) == expected
            (follower,) = children(two.engine_pid())
        two.process.send_signal(signal.SIGTERM)
        assert two.wait() == 0
        eventually(lambda: not alive(follower), 5)
    assert any("rank 1 was lost (SIGKILL)" in line for line in two.errors)


def test_a_lost_rank_ends_the_engine_with_a_reason_in_the_middle_of_a_step(pairs: list[Pair]) -> None:
    pair = pairs[0]
    pair.until("ready")
    (follower,) = children(pair.process.pid)
    params = SamplingParams(max_tokens=400, ignore_eos=True).to_json()
    pair.send({"type": "generate", "id": "a", "prompt_ids": [5, 6, 7], "params": params})
    pair.until("outputs")
    os.kill(follower, signal.SIGKILL)
    assert pair.until("fatal")["error"] == "rank 1 was lost (SIGKILL)"
    assert pair.process.wait(10) == 1


def test_the_ranks_go_with_rank_0(pairs: list[Pair]) -> None:
    pair = pairs[1]
    pair.until("ready")
    (follower,) = children(pair.process.pid)
    os.kill(pair.process.pid, signal.SIGKILL)
    eventually(lambda: not alive(follower), 5)


def test_a_rank_that_cannot_start_ends_all_with_its_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, socket; i = sys.argv.index('--fd'); s = socket.socket(fileno=int(sys.argv[i + 1]))"
    script += "; s.sendall(b'no room for my part'); sys.exit(1)"
    monkeypatch.setattr("serve.parallel.ranks.COMMAND", ("python3", "-c", script))
    config = parse_config(["--model-dir", str(folder), *ARGUMENTS, "--tensor-parallel", "2"], {})
    reasons: list[str] = []
    with pytest.raises(StartError, match="rank 1: no room for my part"):
        build_engine(config, reasons.append)
    assert reasons == ["rank 1: no room for my part"]
