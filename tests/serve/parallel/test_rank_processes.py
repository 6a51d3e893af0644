"""Ranks as processes: the server over HTTP, a lost rank, a start that fails in one of them, an orderly end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from serve.config import parse_config
from serve.engine.build import StartError, build_engine
from serve.parallel.ranks import meeting
from serve.protocol import SamplingParams
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


def reference(folder: Path) -> str:
    """What one rank answers."""
    engine, _ = build_engine(parse_config(["--model-dir", str(folder), *ARGUMENTS], {}))
    prompt = load_tokenizer(folder).encode(PROMPT, add_special_tokens=True)
    engine.add("a", prompt, SamplingParams(max_tokens=24, ignore_eos=True))
    text = ""
    while engine.has_work:
        text += "".join(output.text for output in engine.step())
    return text


def test_two_ranks_answer_like_one_and_come_back_when_one_is_lost_in_the_middle_of_a_step(folder: Path) -> None:
    expected = reference(folder)
    with RealServer(folder, *ARGUMENTS, "--tensor-parallel", "2", "--restart-engine", "1") as two:
        with two.client() as http:
            assert completion(http) == expected
            pid = two.engine_pid()
            (follower,) = children(pid)
            body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = (line for line in answer.iter_lines() if line)
                next(lines)
                os.kill(follower, signal.SIGKILL)
                assert any('"error"' in line for line in lines)
            eventually(lambda: not alive(pid), 10)
            eventually(lambda: http.get("/health").status_code == 200 and two.engine_pid() != pid, 60)
            assert completion(http) == expected
            (follower,) = children(two.engine_pid())
        two.process.send_signal(signal.SIGTERM)
        assert two.wait() == 0
        eventually(lambda: not alive(follower), 5)
    assert any("rank 1 was lost (SIGKILL)" in line for line in two.errors)


def test_a_rank_that_waits_for_the_others_goes_with_rank_0(folder: Path) -> None:
    """The longest wait there is: in the rendezvous, before rank 0 has come."""
    config = parse_config(["--model-dir", str(folder), *ARGUMENTS, "--tensor-parallel", "2"], {})
    store_fd = os.memfd_create("ranks")
    script = """
import subprocess, sys, time
command = [sys.executable, "-m", "serve.parallel", "--rank", "1", "--fd", "0", "--store", sys.argv[1]]
print(subprocess.Popen([*command, "--config", sys.argv[2]], pass_fds=[int(sys.argv[1])]).pid, flush=True)
time.sleep(600)
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank_0 = subprocess.Popen(
            [sys.executable, "-c", script, str(store_fd), config.to_json()],
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            pass_fds=[store_fd],
        )
        try:
            assert rank_0.stdout is not None
            follower = int(rank_0.stdout.readline())
            store = meeting(store_fd, 2)
            eventually(lambda: store.check(["here-1"]), 60)
        finally:
            rank_0.kill()
            rank_0.communicate()
            os.close(store_fd)
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
