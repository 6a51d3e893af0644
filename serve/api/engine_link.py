"""One engine process from its start to its end: the pipe, the ready message, its log lines, and why it ended.

It hands messages on without knowing what they are about; requests and restarts are the engine client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from serve.api.engine_process import EngineProcess
from serve.api.generation import EngineError
from serve.config import ServeConfig
from serve.cores import bound_cores, usable_cores
from serve.logs import json_line
from serve.protocol import FrameDecoder, encode_frame

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""On a crowded machine an engine may not get to speak although it works: then it has this many times the limit."""
_STOP_SECONDS = 3.0
_LOG_LINE_BYTES = 1 << 16


class EngineLink:
    """A started engine. ``on_message`` gets what it sends; ``on_failure`` its end, once, if it had been ready.

    last_heard: ``time.monotonic()`` of the newest message. failure: why nothing more will come; None while it may.
    """

    def __init__(
        self,
        config: ServeConfig,
        command: Sequence[str],
        on_message: Callable[[dict[str, Any]], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._config = config
        self._command = command
        self._on_message = on_message
        self._on_failure = on_failure
        self._process: EngineProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._logs: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self.last_heard = time.monotonic()
        self.failure: str | None = None

    async def start(self) -> dict[str, Any]:
        """Start the process and wait until it is ready; its ``info``. EngineError when it does not get there."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        try:
            self._process = await self._spawn(loop)
        except OSError as error:
            raise EngineError(f"the engine process cannot be started: {error}") from None
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.socket, limit=1 << 20)
        self.send({"type": "config", "config": self._config.to_json()})
        self._reader = loop.create_task(self._read(reader))
        info = await self._ready
        self.last_heard = time.monotonic()
        return info

    async def _spawn(self, loop: asyncio.AbstractEventLoop) -> EngineProcess:
        # With a quota of time no core is its own.
        has_its_cores = usable_cores() == bound_cores()
        all_cores = self._config.threads == 0 and self._config.tensor_parallel == 1 and has_its_cores
        if not self._config.log_json:
            return EngineProcess(self._command, all_cores=all_cores)
        # Libraries and crash reports write what they like: every line passes through here to become JSON.
        ours, theirs = os.pipe()
        try:
            process = EngineProcess(self._command, all_cores=all_cores, output=theirs)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._logs = loop.create_task(_relay_lines(ours))
        return process

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.exit_code()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; one that can reach nobody any more is dropped."""
        if self._writer is not None and self.failure is None and not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    def fail(self, reason: str) -> None:
        """Nothing more will come. The first reason stays: a fatal message says more than the closed pipe after it."""
        if self.failure is not None:
            return
        self.failure = reason
        if self._ready is not None and self._ready.done():
            self._on_failure(reason)

    def silent_for(self, limit: float) -> bool:
        """Whether it has said nothing for ``limit`` seconds; ``PATIENCE`` times that while it is only short of CPU."""
        silence = time.monotonic() - self.last_heard
        if silence <= limit:
            return False
        return silence > PATIENCE * limit or self._process is None or not self._process.is_runnable()

    def dump_stacks(self) -> None:
        if self._process is not None:
            self._process.dump_stacks()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """End the process: asked first, killed after a short while."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        process, writer = self._process, self._writer
        if process is None:
            return
        try:
            if writer is not None:
                self.send({"type": "shutdown"})
                writer.close()
            await asyncio.to_thread(process.wait, _STOP_SECONDS)
        finally:
            process.kill()
        if self._logs is not None:
            await asyncio.wait({self._logs}, timeout=1.0)
            self._logs.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder()
        try:
            while data := await reader.read(1 << 20):
                for message in decoder.feed(data):
                    self._take(message)
            reason = "it closed the pipe"
        except ConnectionError as error:  # it was killed with something of ours unread
            reason = f"the pipe to it broke: {error}"
        except Exception as error:
            # Whatever it was, nobody reads the pipe any more: without this, requests would wait for ever.
            log.exception("reading from the engine failed")
            reason = f"the pipe to it broke: {type(error).__name__}: {error}"
        self.fail(reason)
        await self._explain_exit(reason)

    def _take(self, message: dict[str, Any]) -> None:
        self.last_heard = time.monotonic()
        if message["type"] == "fatal":
            self.fail(str(message["error"]))
            return
        self._on_message(message)
        if message["type"] == "ready" and self._ready is not None and not self._ready.done():
            self._ready.set_result(message["info"])

    async def _explain_exit(self, reason: str) -> None:
        process = self._process
        assert process is not None
        code = await asyncio.to_thread(process.wait, 1.0)
        if code is None:
            # It closed the pipe and lives on: of no use any more, and its memory is wanted.
            process.kill()
            code = process.exit_code()
        if self._ready is not None and not self._ready.done():
            told = (
                self.failure
                if self.failure != reason
                else f"the engine process ended with code {code} before it was ready"
            )
            self._ready.set_exception(EngineError(told))
        else:
            log.error("the engine process ended with code %s", code)


async def _relay_lines(descriptor: int) -> None:
    """Copy the engine's log lines to our standard error, each as a JSON object, until it has ended."""
    reader = asyncio.StreamReader(limit=_LOG_LINE_BYTES)
    pipe = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - closed by the transport
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # a line over the limit: what was read of it is dropped
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                with contextlib.suppress(OSError):
                    print(json_line(text, "serve.engine.output"), file=sys.stderr, flush=True)
    finally:
        transport.close()
