"""One replica: the application of ``python -m serve`` and its engine process, spoken to by Ray instead of by a socket.

It knows one server's start and end. It does not know how many others there are, nor who chose it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from ray import serve as ray_serve
from starlette.requests import Request
from starlette.types import Message, Scope

from scripts.cluster.settings import ClusterSettings
from serve.api import routes_server
from serve.api.app import create_app
from serve.api.auth import ApiKeys
from serve.api.engine_client import EngineClient
from serve.api.engine_process import ENGINE_COMMAND
from serve.api.known_models import identify
from serve.api.model_names import accepted_names
from serve.api.sampling import SamplingDefaults
from serve.api.server import StartError
from serve.api.state import ServerState
from serve.api.text import ModelText
from serve.logs import set_up_logging

log = logging.getLogger("scripts.cluster")

Head = tuple[int, list[tuple[bytes, bytes]]]
"""Status and headers of a response."""

LOST = (b"x-lost-with-its-engine", b"1")
"""A header for the front alone: this error is that of a request whose engine died, and nothing of it was said."""

# Streams still have to hear the error of an engine that died before this process ends too.
_LAST_WORDS_SECONDS = 0.5
_SENT_AHEAD = 64


class EngineReplica:
    """The deployment behind the front. Ray calls its methods; each replica is a process of its own."""

    # Ray awaits it.
    async def __init__(  # type: ignore[misc]
        self, settings_json: str, engine_command: Sequence[str] = ENGINE_COMMAND
    ) -> None:
        settings = ClusterSettings.from_json(settings_json)
        config = settings.serve
        set_up_logging(config.log_json)
        keys = ApiKeys.load(config.api_key_file, os.environ)
        if settings.needs_key and not keys:
            raise StartError("this node has no API key; give --api-key-file, or set the variable before `ray start`")
        self._engine = EngineClient(config, engine_command)
        self._state = ServerState(config, self._engine, keys)
        self._app = create_app(self._state)
        folder = Path(config.model_dir)
        if not folder.is_dir():
            raise StartError(f"--model-dir {folder} is not a folder on this node")
        try:
            text, info = await asyncio.gather(asyncio.to_thread(ModelText.load, folder), self._engine.start())
            identity = await asyncio.to_thread(identify, folder, text)
            names = accepted_names(config, identity.repository)
            self._state.set_ready(info, text, SamplingDefaults.load(folder), names, int(time.time()))
        except BaseException:
            self._engine.kill()
            raise
        for warning in (*(info.get("warnings") or ()), identity.warning()):
            if warning is not None:
                log.warning("%s", warning)
        self._watcher = asyncio.create_task(self._end_with_engine())

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Head | bytes]:
        """The response to one HTTP request: its head, then its body as it comes. When the caller cancels, the
        application sees a client that hung up."""
        asked = asyncio.Event()
        gone = asyncio.Event()
        sent: asyncio.Queue[Message | None] = asyncio.Queue(_SENT_AHEAD)

        async def receive() -> Message:
            if not asked.is_set():
                asked.set()
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            full: Scope = {"type": "http", "asgi": {"version": "3.0"}, "scheme": "http", "root_path": "", **scope}
            try:
                await self._app(full, receive, sent.put)
            finally:
                await sent.put(None)

        work = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
                    if message["status"] == 500 and self._engine.failed.is_set():
                        headers.append(LOST)
                    yield message["status"], headers
                elif message.get("body"):
                    yield message["body"]
            await work
        finally:
            gone.set()
            while not work.done():
                # Room for what it still says to nobody.
                while not sent.empty():
                    sent.get_nowait()
                await asyncio.wait({work}, timeout=0.05)

    async def metrics(self) -> tuple[str, bytes]:
        """This replica's name and its metrics page; the front has looked at the key."""
        response = await routes_server.metrics(Request({"type": "http", "app": self._app}))
        return _replica_name(), bytes(response.body)

    async def unavailable_reason(self) -> str | None:
        """Why a request would not be answered now, None when it would."""
        return self._state.unavailable_reason()

    async def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica that raises."""
        self._engine.check_available()

    async def _end_with_engine(self) -> None:
        await self._engine.failed.wait()
        log.error("the engine failed; this replica ends, and Ray starts another")
        await asyncio.sleep(_LAST_WORDS_SECONDS)
        sys.stderr.flush()
        os._exit(1)

    async def __del__(self) -> None:
        """Ray has waited for the running requests (``--drain-seconds``); the engine process ends with this one."""
        self._watcher.cancel()
        await self._engine.stop()
        self._engine.kill()
        if self._state.model is not None:
            self._state.model.text.close()


def _replica_name() -> str:
    return str(ray_serve.get_replica_context().replica_id.unique_id)
