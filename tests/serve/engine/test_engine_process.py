"""The loop of the engine process: what it says while a step runs, and when it falls silent."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

import serve.engine.__main__ as process
import serve.parallel.__main__ as rank_process
from serve.config import ServeConfig
from serve.engine.build import build_engine
from serve.protocol import FrameDecoder, Output, SamplingParams, pack_ids
from verify.costs import CostTable


def test_a_hung_step_silences_the_heartbeat(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 0.02)
    engine, _ = build_engine(ServeConfig(str(tiny_model_dir), weights="fp32", threads=1, proposer="none"))
    hang = threading.Event()

    def step() -> list[Output]:
        hang.wait(30)
        engine.cancel("a")
        return []

    engine.step = step  # type: ignore[method-assign]
    ours, theirs = socket.socketpair()
    pipe = process.Pipe(theirs)
    loop = process.EngineLoop(engine, pipe, step_limit=0.3)
    for target in (loop.heartbeat_forever, loop.run):
        threading.Thread(target=target, daemon=True).start()
    heard: list[float] = []

    def listen() -> None:
        decoder = FrameDecoder()
        while data := ours.recv(1 << 16):
            heard.extend(time.monotonic() for _ in decoder.feed(data))

    threading.Thread(target=listen, daemon=True).start()
    params = SamplingParams(max_tokens=2)
    started = time.monotonic()
    pipe.inbox.put({"type": "generate", "id": "a", "prompt_ids": pack_ids([5]), "params": params.to_json()})
    time.sleep(1.0)
    during = [at - started for at in heard if at > started + 0.05]
    assert during, "a step in its limit is not silent"
    assert max(during) < 0.8
    count = len(heard)
    hang.set()
    until = time.monotonic() + 10
    while len(heard) == count:
        assert time.monotonic() < until, "it speaks again when the step has ended"
        time.sleep(0.01)
    pipe.inbox.put({"type": "shutdown"})


def test_a_step_may_last_as_long_as_this_machine_needs(tiny_model_dir: Path) -> None:
    config = ServeConfig(str(tiny_model_dir), weights="fp32", threads=1, proposer="none", watchdog_seconds=2)
    engine, _ = build_engine(config)
    engine.controller.costs = CostTable({1: 0.001, 32: 0.002})
    assert process.step_limit(config, engine) == 10
    engine.controller.costs = CostTable({1: 0.1, 32: 3.2})
    assert process.step_limit(config, engine) == pytest.approx(256)


@pytest.mark.parametrize("loads", [True, False])
def test_an_engine_whose_api_process_could_not_start_ends_in_silence(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    for name in ("prepare_process", "set_up_logging", "hold_heap", "settle_garbage_collector"):
        monkeypatch.setattr(process, name, lambda *_, **__: None)  # they are for a process of its own
    folder = tiny_model_dir if loads else tmp_path / "nowhere"
    config = ServeConfig(str(folder), weights="fp32", threads=1, proposer="none")
    # The real reader ends an orphaned process some seconds later, which here would be that of the tests.
    first = {"type": "config", "config": config.to_json()}
    monkeypatch.setattr(process.Pipe, "read_forever", lambda pipe: pipe.inbox.put(first))
    ours, theirs = socket.socketpair()
    ours.close()
    monkeypatch.setattr(sys, "argv", ["serve.engine", "--fd", str(theirs.detach())])
    assert process.main() == (0 if loads else 1)


@pytest.mark.parametrize("module", [process, rank_process])
def test_a_process_starts_where_python_drops_docstrings(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "__doc__", None)  # as PYTHONOPTIMIZE=2 does
    monkeypatch.setattr(sys, "argv", ["engine", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert "--fd" in capsys.readouterr().out
