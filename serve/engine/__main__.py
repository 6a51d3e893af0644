"""The engine process: ``python -m serve.engine --fd N``, started by the API process with one end of a socket pair.

Reads its settings and requests as JSON frames (serve/protocol.py), steps the engine while there is work, and sends
outputs and statistics back. It ends when the pipe closes, so a killed API process leaves nothing behind. A heartbeat
thread speaks once a second, also during a long step, until the step has lasted so long that it must have hung: then the
API's watchdog hears the silence. This file knows no HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from serve.config import ServeConfig
from serve.engine.build import StartError, build_engine
from serve.engine.engine import Engine
from serve.engine.memory import hold_heap
from serve.logs import set_up_logging
from serve.protocol import FrameDecoder, Output, SamplingParams, encode_frame, unpack_ids

log = logging.getLogger("serve.engine")

HEARTBEAT_SECONDS = 1.0
STATS_SECONDS = 0.1
"""Statistics travel with a request's end and this often in between, not with every token."""
STEP_WATCHDOGS = 5
"""A step may last this many times --watchdog-seconds: a kernel compiled in the middle of one takes a while."""
STEP_PREDICTIONS = 10
"""... or this many times what the costs measured at the start predict for a full one, on machines that are slow."""
ORPHAN_SECONDS = 10.0
GC_OBJECTS = 50_000
"""Objects made and not yet gone after which the collector looks for cycles."""
PR_SET_PDEATHSIG = 1
CLOSED: dict[str, Any] = {"type": "closed"}


@dataclass
class Pipe:
    """The socket to the API process: whole frames, many writing threads, one reading thread."""

    sock: socket.socket
    inbox: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: dict[str, Any]) -> None:
        frame = encode_frame(message)
        with self.lock:
            self.sock.sendall(frame)

    def read_forever(self) -> None:
        """Put every message into the inbox; CLOSED when the other side is gone."""
        decoder = FrameDecoder()
        try:
            while data := self.sock.recv(1 << 16):
                for message in decoder.feed(data):
                    self.inbox.put(message)
        except (OSError, ValueError) as error:
            log.warning("pipe to the API process broke: %s", error)
        self.inbox.put(CLOSED)
        # The loop leaves after its step; one that hangs must not outlive the API process for long.
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)


class EngineLoop:
    """Messages in, steps, messages out; one thread owns the engine. ``step_limit``: seconds a step may last."""

    def __init__(self, engine: Engine, pipe: Pipe, step_limit: float) -> None:
        self.engine = engine
        self.pipe = pipe
        self._step_limit = step_limit
        self._step_started: float | None = None
        self._last_stats = engine.stats().to_json()
        self._stats_sent = 0.0

    def heartbeat_forever(self) -> None:
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            started = self._step_started
            if started is not None and time.monotonic() - started > self._step_limit:
                continue
            try:
                self.pipe.send({"type": "stats", "stats": self._last_stats})
            except OSError:
                return

    def run(self) -> None:
        """Until the pipe closes or a shutdown is asked for."""
        while self._take_messages():
            if not self.engine.has_work:
                continue
            self._step_started = time.monotonic()
            outputs = self.engine.step()
            self._step_started = None
            self._last_stats = self.engine.stats().to_json()
            if outputs:
                items = [output.to_json() for output in outputs]
                message: dict[str, Any] = {"type": "outputs", "items": items}
                ended = any(output.finish_reason for output in outputs)
                if ended or time.monotonic() - self._stats_sent > STATS_SECONDS:
                    message["stats"] = self._last_stats
                    self._stats_sent = time.monotonic()
                self.pipe.send(message)

    def _take_messages(self) -> bool:
        """Handle what has arrived, waiting for the first message when idle. False: it is time to go."""
        block = not self.engine.has_work
        if block:
            self.engine.check()
        while True:
            try:
                message = self.pipe.inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if message["type"] in ("closed", "shutdown"):
                return False
            self._handle(message)
            self._last_stats = self.engine.stats().to_json()

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "generate":
            try:
                params = SamplingParams.from_json(message["params"])
                self.engine.add(message["id"], unpack_ids(message["prompt_ids"]), params, message.get("cache_salt", ""))
            except Exception as error:
                if not isinstance(error, ValueError):
                    log.exception("request %s could not be added", message.get("id"))
                failed = Output(str(message.get("id")), finish_reason="error", error=f"refused: {error}")
                self.pipe.send({"type": "outputs", "items": [failed.to_json()], "stats": self._last_stats})
        elif kind == "cancel":
            self._step_started = time.monotonic()  # the last request's end may wait for the device
            self.engine.cancel(message["id"])
            self._step_started = None
        elif kind == "reset_prefix_cache":
            self.engine.scheduler.pool.forget()
        else:
            log.warning("unknown message type %r", kind)


def step_limit(config: ServeConfig, engine: Engine) -> float:
    """Seconds after which a step counts as hung."""
    full = engine.controller.costs.verify_seconds(engine.scheduler.max_batch_tokens)
    return max(STEP_WATCHDOGS * config.watchdog_seconds, STEP_PREDICTIONS * full)


def settle_garbage_collector() -> None:
    """What a start has made stays, and steps make no cycles: looking for some every few hundred objects took a tenth of
    a step of many sequences, with a pause now and then that everybody waited for."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 20, 50)


def told(pipe: Pipe, message: dict[str, Any]) -> bool:
    """Whether the message went out. An API process that could not start is gone, and has said why itself."""
    try:
        pipe.send(message)
    except OSError:
        return False
    return True


def end_with(pipe: Pipe, reason: str) -> None:
    """A rank is lost: the step that waits for it would never end, so the process does."""
    told(pipe, {"type": "fatal", "error": reason})
    os._exit(1)


def prepare_process() -> None:
    """Signals, crash reports, and an end together with the API process.

    The API process decides when the engine goes: Ctrl-C and SIGTERM reach whole process groups, and a drain would be
    lost if the engine took them to itself. SIGUSR1 writes the stacks of all threads; so does a crash of a library.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    # The closed pipe says it too, but only to an engine that is able to read.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m serve.engine", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the socket to the API process")
    args = parser.parse_args()
    prepare_process()
    set_up_logging(as_json=False)
    pipe = Pipe(socket.socket(fileno=args.fd))
    threading.Thread(target=pipe.read_forever, name="pipe-reader", daemon=True).start()
    first = pipe.inbox.get()
    if first["type"] != "config":
        return 1
    try:
        settings = first["config"]
        config = ServeConfig.from_json(settings) if isinstance(settings, str) else ServeConfig(**settings)
        set_up_logging(config.log_json)
        engine, info = build_engine(config, partial(end_with, pipe))
    except Exception as error:
        expected = isinstance(error, StartError | OSError | ValueError)
        if not expected:
            log.exception("the engine could not be built")
        told(pipe, {"type": "fatal", "error": str(error) if expected else f"{type(error).__name__}: {error}"})
        return 1
    loop = EngineLoop(engine, pipe, step_limit(config, engine))
    hold_heap(os.environ)
    settle_garbage_collector()
    if not told(pipe, {"type": "ready", "info": info, "stats": engine.stats().to_json()}):
        return 0
    threading.Thread(target=loop.heartbeat_forever, name="heartbeat", daemon=True).start()
    try:
        loop.run()
    except (BrokenPipeError, ConnectionResetError):
        log.warning("the API process is gone")
    except Exception as error:
        log.exception("the engine loop failed")
        told(pipe, {"type": "fatal", "error": engine.runner.mirror.explain(error)})
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Threads of the math libraries may still be parked; nothing is left to clean up.
    os._exit(code)
