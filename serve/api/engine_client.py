"""The API's side of the pipe: requests go in, their outputs come back, and a dead or hung engine is noticed.

Every request that was accepted ends: with its last output, or with an error when the engine dies, hangs or the server
stops. It does not know HTTP, prompts as text, or what a reply looks like.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from serve.api.engine_process import ENGINE_COMMAND, EngineProcess
from serve.api.generation import EngineError, EngineFailed, Generation, QueueFull
from serve.config import ServeConfig
from serve.protocol import EngineStats, FrameDecoder, Output, SamplingParams, encode_frame

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_STOP_SECONDS = 3.0


class EngineClient:
    """One engine process and every request in it. All methods belong to the event loop's thread."""

    def __init__(self, config: ServeConfig, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._config = config
        self._command = command
        self._process: EngineProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._generations: dict[str, Generation] = {}
        self._open: set[Generation] = set()
        self._last_message = time.monotonic()
        self._dead: str | None = None
        self._draining = False
        self._stalled = False
        self.places = config.max_num_seqs + config.max_queue
        self.places_taken = 0
        self.rejected = 0
        self.info: dict[str, Any] = {}
        self.stats = EngineStats()

    async def start(self) -> dict[str, Any]:
        """Start the engine and wait until it is ready; its ``info``. EngineError when it does not get there."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        try:
            self._process = EngineProcess(self._command, all_cores=self._config.threads == 0)
        except OSError as error:
            raise EngineError(f"the engine process cannot be started: {error}") from None
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.socket, limit=1 << 20)
        self._send({"type": "config", "config": self._config.to_json()})
        self._tasks.append(loop.create_task(self._read(reader)))
        self.info = await self._ready
        self._last_message = time.monotonic()
        self._tasks.append(loop.create_task(self._watch()))
        return self.info

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def unavailable_reason(self) -> str | None:
        """Why a request would not be answered now; None when it would."""
        if self._dead is not None:
            return self._dead
        if not self.info:
            return "the model is loading"
        if self._draining:
            return "the server is shutting down"
        if self._stalled or time.monotonic() - self._last_message > self._config.watchdog_seconds:
            return f"the engine has not answered for {self._config.watchdog_seconds:g} seconds"
        return None

    def check_available(self) -> None:
        """EngineError when a request would not be answered now."""
        reason = self.unavailable_reason()
        if reason is not None:
            raise EngineError(reason)

    def open(self, count: int) -> Generation:
        """Take ``count`` places of the queue. QueueFull when there are not that many, EngineError when unavailable."""
        self.check_available()
        if self.places_taken + count > self.places:
            self.rejected += 1
            raise QueueFull(f"the queue is full: {self.places_taken} of {self.places} places are taken")
        self.places_taken += count
        generation = Generation(self, count)
        self._open.add(generation)
        return generation

    def submit(
        self, generation: Generation, engine_id: str, prompt_ids: list[int], params: SamplingParams, cache_salt: str
    ) -> None:
        """Used by Generation only."""
        self._generations[engine_id] = generation
        self._send(
            {
                "type": "generate",
                "id": engine_id,
                "prompt_ids": prompt_ids,
                "params": params.to_json(),
                "cache_salt": cache_salt,
            }
        )

    def cancel(self, engine_id: str) -> None:
        self._send({"type": "cancel", "id": engine_id})

    def forget(self, engine_id: str) -> None:
        self._generations.pop(engine_id, None)

    def release(self, generation: Generation, places: int) -> None:
        self.places_taken -= places
        if generation.closed:
            self._open.discard(generation)

    def reset_prefix_cache(self) -> None:
        self.check_available()
        self._send({"type": "reset_prefix_cache"})

    def begin_drain(self) -> None:
        """Accept nothing more; what runs goes on."""
        self._draining = True

    def fail_all(self, reason: str) -> None:
        """End every running request with an error, and free what it holds in the engine."""
        for generation in list(self._open):
            generation.fail(EngineFailed(reason))

    async def stop(self) -> None:
        """End the engine process: asked first, killed after a short while. Running requests end with an error."""
        self._draining = True
        self.fail_all("the server is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        process, writer = self._process, self._writer
        if process is None:
            return
        try:
            if writer is not None:
                self._send({"type": "shutdown"})
                writer.close()
            await asyncio.to_thread(process.wait, _STOP_SECONDS)
        finally:
            process.kill()

    def kill(self) -> None:
        """End the engine process at once."""
        if self._process is not None:
            self._process.kill()

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and self._dead is None and not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder()
        try:
            while data := await reader.read(1 << 20):
                for message in decoder.feed(data):
                    self._take(message)
            reason = "it closed the pipe"
        except Exception as error:
            # Whatever it was, nobody reads the pipe any more: without this, requests would wait for ever.
            log.exception("reading from the engine failed")
            reason = f"the pipe to it broke: {type(error).__name__}: {error}"
        self._die(reason)
        await self._explain_exit(reason)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        self._last_message = time.monotonic()
        if self._stalled:
            log.warning("the engine answers again")
            self._stalled = False
        if "stats" in message:
            self.stats = EngineStats.from_json(message["stats"])
        if kind == "outputs":
            for item in message["items"]:
                # Outputs of requests that were cancelled here may still be on their way.
                generation = self._generations.get(item["id"])
                if generation is not None:
                    generation.deliver(item["id"], Output.from_json(item))
        elif kind == "ready":
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message["info"])
        elif kind == "fatal":
            self._die(str(message["error"]))

    def _die(self, reason: str) -> None:
        """Nothing more will come. The first reason stays: a fatal message says more than the closed pipe after it."""
        if self._dead is not None:
            return
        if self._ready is not None and self._ready.done():
            self._dead = "the engine has failed"
            log.error("the engine has failed: %s", reason)
            self.fail_all("the engine has failed")
        else:
            self._dead = reason

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
                self._dead if self._dead != reason else f"the engine process ended with code {code} before it was ready"
            )
            self._ready.set_exception(EngineError(told))
        else:
            log.error("the engine process ended with code %s", code)

    async def _watch(self) -> None:
        """Notice an engine that is silent too long, and one that ended although somebody keeps its pipe open."""
        limit = self._config.watchdog_seconds
        before = time.monotonic()
        while self._dead is None:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - before > _TICK_SECONDS + 1.0:
                # This process was the one that slept (a suspended machine, a stopped process): look again first.
                self._last_message = max(self._last_message, now - limit + 1.0)
            before = now
            if self._process is not None and self._process.exit_code() is not None:
                # Let the reader take what is still in the pipe first.
                await asyncio.sleep(_TICK_SECONDS)
                self._die(f"its process ended with code {self._process.exit_code()}")
            elif not self._stalled and now - self._last_message > limit:
                self._stalled = True
                log.error("the engine has not answered for %g seconds", limit)
                self.fail_all(f"the engine has not answered for {limit:g} seconds")
