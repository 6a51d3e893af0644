"""Start, readiness, a killed, stopped or orphaned engine, signals and ports, with real engines under load."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.real_server import RealServer, Stream, ask
from tests.serve.api.live_server import alive, eventually

TEXT = "completions"


def long(seed: int) -> dict[str, Any]:
    return {"prompt": [50 + seed, 60, 70], "temperature": 0, "ignore_eos": True, "max_tokens": 480}


def load(http: httpx.Client, count: int) -> list[Stream]:
    """``count`` running streams, each with text already."""
    streams = [Stream(http, TEXT, long(seed)) for seed in range(count)]
    eventually(lambda: all(stream.body for stream in streams), 60)
    return streams


def until_ready(port: str, seconds: float = 120) -> set[int]:
    """Poll /health until it is 200; the statuses seen."""
    seen: set[int] = set()
    until = time.monotonic() + seconds
    while 200 not in seen:
        assert time.monotonic() < until
        try:
            seen.add(httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code)
        except httpx.ConnectError:
            time.sleep(0.05)
    return seen


def test_a_killed_engine_is_seen_at_once_and_the_port_serves_again(tiny_pair: tuple[Path, Path]) -> None:
    with RealServer(tiny_pair[0], "--weights", "fp32") as server, server.client() as http:
        port = server.port()
        second = RealServer(tiny_pair[0], "--port", port, wait_ready=0)
        assert second.wait(30) == 1
        assert port in second.errors[0]
        streams = load(http, 3)
        os.kill(server.engine_pid(), signal.SIGKILL)
        for stream in streams:
            stream.join(10)
            assert stream.ended_badly()
        assert http.get("/health").status_code == 503
        started = time.monotonic()
        assert http.post("/v1/completions", json=long(0)).status_code == 503
        assert time.monotonic() - started < 5
    with RealServer(tiny_pair[0], "--weights", "fp32", "--port", port, wait_ready=0) as again:
        assert until_ready(port) <= {200, 503}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
            assert ask(http, TEXT, {**long(1), "max_tokens": 3}).completion_tokens == 3
            load(http, 2)
            engine = again.engine_pid()
            again.process.kill()
            again.wait()
            eventually(lambda: not alive(engine), 15)


def test_a_stopped_engine_turns_health_red_within_the_watchdog_time_and_sigterm_ends_streams(
    tiny_pair: tuple[Path, Path],
) -> None:
    arguments = ("--weights", "fp32", "--watchdog-seconds", "2", "--drain-seconds", "1")
    server = RealServer(tiny_pair[0], *arguments)
    with server.client() as http:
        engine = server.engine_pid()
        streams = load(http, 2)
        os.kill(engine, signal.SIGSTOP)
        started = time.monotonic()
        eventually(lambda: http.get("/health").status_code == 503, 10)
        assert 1 < time.monotonic() - started < 10
        for stream in streams:
            stream.join(10)
            assert stream.ended_badly()
        assert http.post("/v1/completions", json=long(0)).status_code == 503
        os.kill(engine, signal.SIGCONT)
        eventually(lambda: http.get("/health").status_code == 200, 10)
        streams = load(http, 4)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.join(20)
            assert stream.ended_badly() or stream.ended_well()
        assert server.wait(20) == 0
        assert not alive(engine)
        with pytest.raises(httpx.TransportError):
            http.get("/health")


def test_the_engine_leaves_sigterm_to_the_server_and_dies_with_it_even_when_stopped(
    tiny_pair: tuple[Path, Path],
) -> None:
    server = RealServer(tiny_pair[0], "--weights", "fp32")
    with server.client() as http:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGTERM)
        assert ask(http, TEXT, {**long(1), "max_tokens": 3}).completion_tokens == 3
        assert server.engine_pid() == engine
    os.kill(engine, signal.SIGSTOP)
    server.process.kill()
    server.wait()
    eventually(lambda: not alive(engine), 10)


@pytest.fixture(scope="module")
def wrong_drafter(tmp_path_factory: pytest.TempPathFactory, tiny_pair: tuple[Path, Path]) -> Path:
    """A drafter for a target of another size."""
    from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter

    config = drafter_config(hidden_size=32)
    return write_drafter(tmp_path_factory.mktemp("wrong") / "drafter", random_drafter(config))


def test_a_drafter_for_another_target_stops_the_start_when_asked_for(
    tiny_pair: tuple[Path, Path], wrong_drafter: Path
) -> None:
    server = RealServer(tiny_pair[0], "--drafter-dir", str(wrong_drafter), wait_ready=0)
    assert server.wait(120) == 1
    assert server.lines == []
    assert all(word in server.errors[-1] for word in ("hidden", "32", "64"))


def test_the_same_drafter_from_the_environment_costs_one_loud_line(
    tiny_pair: tuple[Path, Path], wrong_drafter: Path
) -> None:
    with RealServer(tiny_pair[0], environ={"DRAFTER_BYO_DIR": str(wrong_drafter)}) as server, server.client() as http:
        ready, command = server.lines
        assert "drafter=none" in ready
        (line,) = [line for line in server.errors if "WITHOUT" in line]
        assert all(word in line for word in ("hidden", "32", "64"))
        assert ask(http, TEXT, {**long(1), "max_tokens": 3}).completion_tokens == 3
        tried = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert '"choices"' in tried.stdout


def test_a_long_prompt_starves_no_running_stream_and_no_short_prompt(tmp_path: Path) -> None:
    """Counted in events, not seconds: 16 rows a step, so the long prompt takes thirty steps or more."""
    from tests.tiny_models import write_model

    write_model(tmp_path)
    arguments = ("--weights", "fp32", "--max-batch-tokens", "16", "--max-num-seqs", "8", "--proposer", "none")
    with RealServer(tmp_path, *arguments) as server, server.client() as http:
        (running,) = load(http, 1)
        before = running.body.count("data: ")
        prompt = [4 + (11 * i + i * i) % 250 for i in range(480)]
        big = Stream(http, TEXT, {**long(0), "prompt": prompt, "max_tokens": 2})
        short = Stream(http, TEXT, {**long(5), "max_tokens": 2})
        eventually(lambda: bool(short.body), 60)
        assert not big.body
        eventually(lambda: bool(big.body), 60)
        assert running.body.count("data: ") - before >= 15
        big.join(30)
        assert big.ended_well()
