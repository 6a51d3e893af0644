"""The engine is started again where that was asked for: after a crash or a hang, not too often, not while draining."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from serve.api import supervisor
from serve.api.generation import EngineError
from serve.config import parse_config
from tests.serve.api.live_server import LiveServer, alive, chat, eventually
from tests.serve.api.test_engine_faults import open_streams


def test_a_killed_engine_comes_back_and_the_running_request_has_failed(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--restart-engine") as live, live.client() as http:
        first = live.engine_pid()
        (stream,) = open_streams(live, 1)
        os.kill(first, signal.SIGKILL)
        stream.join(5)
        assert stream.ended_with_error()
        eventually(lambda: http.get("/health").status_code == 200)
        assert live.engine_pid() != first
        assert http.post("/v1/chat/completions", json=chat("!say:back!")).status_code == 200
        page = http.get("/metrics").text
        assert 'foretoken:engine_restarts_total{model_name="tiny-model"} 1' in page
    assert len(live.lines) == 2, "the ready line is said once"


def test_a_stopped_engine_is_asked_for_its_stacks_then_killed_and_replaced(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--restart-engine", "1", "--watchdog-seconds", "1") as live, live.client() as http:
        first = live.engine_pid()
        (stream,) = open_streams(live, 1)
        os.kill(first, signal.SIGSTOP)
        stream.join(5)
        assert stream.ended_with_error()
        eventually(lambda: not alive(first))
        eventually(lambda: http.get("/health").status_code == 200)
        assert http.post("/v1/chat/completions", json=chat("!say:back!")).status_code == 200
    assert any("stacks" in line for line in live.errors)


def test_without_the_option_a_dead_engine_stays_dead(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live, live.client() as http:
        os.kill(live.engine_pid(), signal.SIGKILL)
        eventually(lambda: http.get("/health").status_code == 503)
        assert "again" not in http.get("/health").json()["error"]["message"]


def test_sigterm_during_a_restart_ends_the_server(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--restart-engine") as live, live.client() as http:
        os.kill(live.engine_pid(), signal.SIGKILL)
        eventually(lambda: http.get("/health").status_code == 503)
        assert "again" in http.get("/health").json()["error"]["message"]
        live.process.send_signal(signal.SIGTERM)
        assert live.wait() == 0


def test_a_stalled_engine_writes_its_stacks_into_the_log(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--watchdog-seconds", "1") as live, live.client() as http:
        engine = live.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        eventually(lambda: http.get("/health").status_code == 503)
        eventually(lambda: any("stacks" in line for line in live.errors))
        os.kill(engine, signal.SIGCONT)
        eventually(lambda: any("scripted_engine.py" in line for line in live.errors))
        eventually(lambda: http.get("/health").status_code == 200)


def test_with_json_logs_every_line_of_the_engine_is_json_too(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--watchdog-seconds", "1", "--log-json") as live:
        engine = live.engine_pid()
        os.kill(engine, signal.SIGUSR1)
        eventually(lambda: any("scripted_engine.py" in line for line in live.errors))
    lines = [json.loads(line) for line in live.errors]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    assert any(line["logger"] == "serve.engine.output" and "thread" in line["message"].lower() for line in lines)


def test_an_engine_that_is_busy_and_silent_gets_more_time_than_one_that_is_stopped(tmp_path: Path) -> None:
    """It computes for half a second longer than that. A crowded machine may keep an idle process waiting for one."""
    with LiveServer(tmp_path, "--watchdog-seconds", "2", "--restart-engine") as live, live.client() as http:
        engine = live.engine_pid()
        response = http.post("/v1/chat/completions", json=chat("!spin:2! !say:abcdef!"))
        assert response.status_code == 200
        assert live.engine_pid() == engine
    assert not any("stacks" in line for line in live.errors)


class FailingEngine:
    """Fails on every start but the third."""

    def __init__(self) -> None:
        self.failed = asyncio.Event()
        self.failed.set()
        self.draining = False
        self.starts = 0

    async def start(self) -> dict[str, Any]:
        self.starts += 1
        if self.starts != 3:
            raise EngineError("not yet")
        self.failed.clear()
        return {"start": self.starts}


def test_pauses_grow_and_one_start_too_many_waits_for_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [supervisor.pause_before(n) for n in (0, 1, 2, 99)] == [0.5, 1.0, 2.0, 30.0]
    pauses: list[float] = []
    ready: list[dict[str, Any]] = []
    engine = FailingEngine()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            engine.draining = True

    def on_ready(info: dict[str, Any]) -> None:
        ready.append(info)
        engine.failed.set()  # it dies again at once

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(supervisor.supervise(engine, 4, on_ready))  # type: ignore[arg-type]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert supervisor.WINDOW_SECONDS - 5 < pauses[4] <= supervisor.WINDOW_SECONDS
    assert ready == [{"start": 3}]
    assert engine.starts == 4


def test_the_option_has_a_number_of_its_own() -> None:
    model = ["--model-dir", "m"]
    assert parse_config(model, {}).restart_engine == 0
    assert parse_config([*model, "--restart-engine"], {}).restart_engine == 3
    assert parse_config([*model, "--restart-engine", "7"], {}).restart_engine == 7
    with pytest.raises(SystemExit):
        parse_config([*model, "--restart-engine", "-1"], {})
