"""The API's side of the pipe: requests go in, their outputs come back, and a dead or hung engine is noticed.

Every request that was accepted ends: with its last output, or with an error when the engine dies, hangs or the server
stops. The engine may be started again after it failed. It does not know HTTP, prompts as text, or what a reply looks
like.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serve.api.engine_link import EngineLink
from serve.api.engine_process import ENGINE_COMMAND
from serve.api.generation import EngineError, EngineFailed, Generation, QueueFull
from serve.config import ServeConfig
from serve.protocol import EngineStats, Output, SamplingParams, pack_ids

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25


class EngineClient:
    """One engine process at a time and every request in it. All methods belong to the event loop's thread.

    failed: set while the engine is dead and not started again. starts: how often it was started.
    """

    def __init__(self, config: ServeConfig, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._config = config
        self._command = command
        self._link: EngineLink | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._generations: dict[str, Generation] = {}
        self._open: set[Generation] = set()
        self._stalled = False
        self.failed = asyncio.Event()
        self.draining = False
        self.places = config.max_num_seqs + config.max_queue
        self.places_taken = 0
        self.rejected = 0
        self.starts = 0
        self.info: dict[str, Any] = {}
        self.stats = EngineStats()

    async def start(self) -> dict[str, Any]:
        """Start the engine and wait until it is ready; its ``info``. EngineError when it does not get there."""
        self.starts += 1
        self._stalled = False
        link = self._link = EngineLink(self._config, self._command, self._take, self._on_failure)
        info = await link.start()
        if link.failure is not None:
            raise EngineError(f"the engine failed as soon as it was ready: {link.failure}")
        self.info = info
        self.failed.clear()
        self._watcher = asyncio.get_running_loop().create_task(self._watch(link))
        return self.info

    @property
    def pid(self) -> int | None:
        return None if self._link is None else self._link.pid

    def unavailable_reason(self) -> str | None:
        """Why a request would not be answered now; None when it would."""
        if self.failed.is_set():
            return "the engine has failed" + (" and is started again" if self._config.restart_engine else "")
        if self._link is None or not self.info:
            return "the model is loading"
        if self.draining:
            return "the server is shutting down"
        if self._stalled or self._link.silent_for(self._config.watchdog_seconds):
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
                "prompt_ids": pack_ids(prompt_ids),
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
        self.draining = True

    def fail_all(self, reason: str) -> None:
        """End every running request with an error, and free what it holds in the engine."""
        for generation in list(self._open):
            generation.fail(EngineFailed(reason))

    async def stop(self) -> None:
        """End the engine process: asked first, killed after a short while. Running requests end with an error."""
        self.draining = True
        self.fail_all("the server is shutting down")
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._link is not None:
            await self._link.stop()

    def kill(self) -> None:
        """End the engine process at once."""
        if self._link is not None:
            self._link.kill()

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is not None:
            self._link.send(message)

    def _take(self, message: dict[str, Any]) -> None:
        if self._stalled:
            log.warning("the engine answers again")
            self._stalled = False
        if "stats" in message:
            self.stats = EngineStats.from_json(message["stats"])
        if message["type"] == "outputs":
            for item in message["items"]:
                # Outputs of requests that were cancelled here may still be on their way.
                generation = self._generations.get(item["id"])
                if generation is not None:
                    generation.deliver(item["id"], Output.from_json(item))

    def _on_failure(self, reason: str) -> None:
        log.error("the engine has failed: %s", reason)
        self.failed.set()
        self.stats = replace(self.stats, running=0, waiting=0, kv_pages_free=self.stats.kv_pages_total)
        self.fail_all("the engine has failed")

    async def _watch(self, link: EngineLink) -> None:
        """Notice an engine that is silent too long, and one that ended although somebody keeps its pipe open.

        One that may be started again is killed when it stays silent for as long again.
        """
        limit = self._config.watchdog_seconds
        before = stalled_at = time.monotonic()
        while link.failure is None:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - before > _TICK_SECONDS + 1.0:
                # This process was the one that slept (a suspended machine, a stopped process): look again first.
                link.last_heard = max(link.last_heard, now - limit + 1.0)
            before = now
            silence = now - link.last_heard
            if link.exit_code() is not None:
                # Let the reader take what is still in the pipe first.
                await asyncio.sleep(_TICK_SECONDS)
                link.fail(f"its process ended with code {link.exit_code()}")
            elif not self._stalled and link.silent_for(limit):
                self._stalled = True
                log.error("the engine has not answered for %.0f seconds; it is asked for its stacks", silence)
                link.dump_stacks()
                self.fail_all(f"the engine has not answered for {silence:.0f} seconds")
                stalled_at = now
            elif self._stalled and self._config.restart_engine and now - stalled_at > limit:
                log.error("the engine is killed after %.0f seconds of silence", silence)
                link.kill()
