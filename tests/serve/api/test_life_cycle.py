"""Start, readiness, ports, signals and orphans of the API process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from eval.servers import free_port
from tests.serve.api.live_server import ROOT, LiveServer, alive, chat, eventually
from tests.serve.api.test_engine_faults import LONG, open_streams


def test_one_ready_line_then_a_command_to_try(server: LiveServer) -> None:
    ready, command = server.lines
    for fact in (server.base, "model=tiny-model", "drafter=none", "kv_pages=64", "kernels=scripted"):
        assert fact in ready
    tried = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
    assert tried.returncode == 0, tried.stderr
    assert "choices" in json.loads(tried.stdout)


def test_a_ready_line_that_the_output_cannot_spell_does_not_end_the_server(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--served-model-name", "modèle", environ={"PYTHONIOENCODING": "ascii"}) as live:
        assert "model=mod\\xe8le " in live.lines[0]
        with live.client() as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "modèle"


def test_a_folder_whose_name_the_locale_cannot_spell_is_served_and_named(tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    with LiveServer(tmp_path / "modèle", environ=ascii_only) as live, live.client() as http:
        assert http.get("/v1/models").json()["data"][0]["root"] == str(live.model_dir)
        named = {**chat("!say:x!"), "model": str(live.model_dir)}
        assert http.post("/v1/chat/completions", json=named).status_code == 200


def test_health_is_503_until_ready_and_the_first_chat_after_it_works(tmp_path: Path) -> None:
    port = free_port()
    with LiveServer(tmp_path, "--port", str(port), start="late", wait_ready=False) as live:
        seen = set()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            until = time.monotonic() + 20
            while time.monotonic() < until:
                try:
                    status = http.get("/health").status_code
                except httpx.ConnectError:
                    time.sleep(0.02)
                    continue
                seen.add(status)
                if status == 200:
                    break
                assert http.get("/v1/models").status_code in (200, 503)
            assert http.post("/v1/chat/completions", json=chat("x")).status_code == 200
        assert seen == {200, 503}
        assert len(live.lines) <= 2


def test_a_port_in_use_is_refused_before_the_engine_starts(server: LiveServer, tmp_path: Path) -> None:
    port = server.base.rsplit(":", 1)[1]
    with LiveServer(tmp_path, "--port", port, wait_ready=False) as second:
        assert second.wait() == 1
    (line,) = second.errors
    assert port in line
    assert second.record.read_text() == ""
    assert httpx.get(server.base + "/health", trust_env=False).status_code == 200


@pytest.mark.parametrize(("start", "reason"), [("fatal", "hidden size 64"), ("exit", "code 3")])
def test_an_engine_that_cannot_start_ends_the_server_with_one_reason(tmp_path: Path, start: str, reason: str) -> None:
    with LiveServer(tmp_path, start=start, wait_ready=False) as live:
        assert live.wait() == 1
    assert live.lines == []
    loading, line = live.errors
    assert "loading" in loading
    assert reason in line


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("generation_config.json", '{"temperature": "hot"}', "temperature"),
        ("generation_config.json", "{", "generation_config.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
    ],
)
def test_a_broken_model_folder_is_refused_with_one_reason(tmp_path: Path, name: str, content: str, reason: str) -> None:
    with LiveServer(tmp_path, start="never", wait_ready=False) as live:
        pass
    (live.model_dir / name).write_text(content)
    again = subprocess.run(
        [*live.process.args],  # type: ignore[misc]
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert again.returncode == 1
    assert reason in again.stderr
    assert again.stderr.count("\n") <= 2


def test_sigterm_lets_streams_finish_takes_nothing_new_and_leaves_no_process(tmp_path: Path) -> None:
    live = LiveServer(tmp_path)
    engine = live.engine_pid()
    streams = open_streams(live, 2, "!say:abcdefghij! !slow:0.1!")
    live.process.send_signal(signal.SIGTERM)
    eventually(lambda: refuses(live.base), 2)
    for stream in streams:
        stream.join(10)
        assert stream.ended_well()
    assert live.wait() == 0
    assert not alive(engine)


def test_streams_longer_than_the_drain_time_end_with_an_error(tmp_path: Path) -> None:
    live = LiveServer(tmp_path, "--drain-seconds", "0.3")
    engine = live.engine_pid()
    (stream,) = open_streams(live, 1, LONG)
    started = time.monotonic()
    live.process.send_signal(signal.SIGTERM)
    stream.join(5)
    assert stream.ended_with_error()
    assert live.wait() == 0
    assert time.monotonic() - started < 10
    assert not alive(engine)


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    live = LiveServer(tmp_path)
    engine = live.engine_pid()
    open_streams(live, 1, LONG)
    started = time.monotonic()
    live.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    live.process.send_signal(signal.SIGTERM)
    live.wait()
    assert time.monotonic() - started < 8
    assert not alive(engine)


def test_a_killed_server_leaves_no_engine_and_the_port_can_be_used_again(tmp_path: Path) -> None:
    port = str(free_port())
    live = LiveServer(tmp_path / "first", "--port", port)
    engine = live.engine_pid()
    open_streams(live, 1, LONG)
    live.process.kill()
    live.wait()
    eventually(lambda: not alive(engine), 5)
    with LiveServer(tmp_path / "second", "--port", port) as again, again.client() as http:
        assert http.get("/health").status_code == 200


def test_sigterm_while_loading_ends_everything(tmp_path: Path) -> None:
    live = LiveServer(tmp_path, start="never", wait_ready=False)
    eventually(lambda: live.record.read_text() != "", 20)
    engine = live.engine_pid()
    live.process.send_signal(signal.SIGTERM)
    assert live.wait() == 0
    assert not alive(engine)
    assert live.lines == []


def test_a_stopped_engine_does_not_survive_the_server(tmp_path: Path) -> None:
    live = LiveServer(tmp_path)
    engine = live.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    live.process.send_signal(signal.SIGTERM)
    assert live.wait() == 0
    assert not alive(engine)


def test_the_api_process_never_loads_torch() -> None:
    code = (
        "import sys, serve.api.server, serve.config; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'serve.engine.engine') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def refuses(base: str) -> bool:
    try:
        return httpx.post(base + "/v1/chat/completions", json=chat("x"), trust_env=False).status_code == 503
    except httpx.TransportError:
        return True
