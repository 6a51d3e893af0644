"""The life of the API process: take the port, start the engine, say that it is ready, drain, and leave nothing behind.

It knows sockets, signals and exit codes; it does not know routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import ipaddress
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import uvicorn

from serve.api.app import create_app
from serve.api.auth import ENVIRONMENT_NAME, ApiKeys, KeyFileError
from serve.api.chat import ChatTemplateError
from serve.api.connections import MAX_HEADER_BYTES, BoundedH11Protocol, LoopFaults, raise_descriptor_limit
from serve.api.engine_client import EngineClient
from serve.api.engine_process import ENGINE_COMMAND
from serve.api.generation import EngineError
from serve.api.known_models import identify
from serve.api.model_names import accepted_names
from serve.api.sampling import GenerationConfigError, SamplingDefaults
from serve.api.state import ServerState
from serve.api.supervisor import supervise
from serve.api.text import ModelText
from serve.config import ServeConfig
from serve.logs import set_up_logging
from serve.tokenizer import TokenizerError

log = logging.getLogger("serve.api")

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
# After the drain time the streams still have to hear their error.
_AFTER_DRAIN_SECONDS = 3.0


class StartError(Exception):
    """The server cannot start; the message is the one line to show."""


def run_server(config: ServeConfig, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until a signal or a failed start; the exit code. The port is taken before anything is loaded."""
    set_up_logging(config.log_json)
    raise_descriptor_limit()
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable()  # a crash of a library leaves its stack in the log
    try:
        keys = ApiKeys.load(config.api_key_file, os.environ)
        listener = take_port(config.host, config.port)
    except (StartError, KeyFileError) as error:
        return _refuse(str(error))
    with listener:
        if not keys and not _is_loopback(config.host):
            log.warning(
                "listening on %s without an API key: everybody who reaches it may use it (--api-key-file, or env %s)",
                config.host,
                ENVIRONMENT_NAME,
            )
        return asyncio.run(Service(config, keys, engine_command).serve(listener))


def take_port(host: str, port: int) -> socket.socket:
    """A listening socket. StartError names address and port when it is taken or not ours to have."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartError(f"--host {host} cannot be resolved: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"port {port} on {host} cannot be used: {error.strerror or error}") from None
    return listener


class _HttpServer(uvicorn.Server):
    """uvicorn with our meaning of signals: the first drains, the second stops at once."""

    def __init__(self, config: uvicorn.Config, engine: EngineClient, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # In a signal handler: only flags here, the rest on the loop.
        loop = asyncio.get_running_loop()
        if self.should_exit:
            self.force_exit = True
            loop.call_soon_threadsafe(self._engine.fail_all, "the server was stopped")
            return
        self.should_exit = True
        loop.call_soon_threadsafe(self._engine.begin_drain)
        loop.call_soon_threadsafe(loop.call_later, self._drain_seconds, self._engine.fail_all, "the server is stopping")


class Service:
    """One server from start to end."""

    def __init__(self, config: ServeConfig, keys: ApiKeys, engine_command: Sequence[str]) -> None:
        self._config = config
        self._engine = EngineClient(config, engine_command)
        self._state = ServerState(config, self._engine, keys)
        self._failed: str | None = None

    async def serve(self, listener: socket.socket) -> int:
        """Answer on ``listener`` (503 while loading) until told to stop; 0, or 1 when the start failed."""
        settings = uvicorn.Config(
            create_app(self._state),
            http=BoundedH11Protocol,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            # Longer than what clients keep idle connections for: a reused one must not close under their request.
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            # The last resort only: the drain below ends every request before.
            timeout_graceful_shutdown=int(self._config.drain_seconds + _AFTER_DRAIN_SECONDS + 1),
        )
        http = _HttpServer(settings, self._engine, self._config.drain_seconds)
        asyncio.get_running_loop().set_exception_handler(LoopFaults())
        boot = asyncio.create_task(self._boot(listener, http))
        try:
            await http.serve(sockets=[listener])
        finally:
            boot.cancel()
            await asyncio.gather(boot, return_exceptions=True)
            try:
                if not http.force_exit:
                    await self._engine.stop()
            finally:
                self._engine.kill()
                if self._state.model is not None:
                    self._state.model.text.close()
        return 0 if self._failed is None else _refuse(self._failed)

    async def _boot(self, listener: socket.socket, http: _HttpServer) -> None:
        try:
            await self._load(listener)
        except (StartError, EngineError, TokenizerError, ChatTemplateError, GenerationConfigError, OSError) as error:
            self._failed = str(error)
        except Exception as error:
            log.exception("the start failed")
            self._failed = f"{type(error).__name__}: {error}"
        if self._failed is not None:
            http.should_exit = True
        elif self._config.restart_engine:
            await supervise(self._engine, self._config.restart_engine, self._reopen)

    def _reopen(self, info: dict[str, Any]) -> None:
        """The same model behind a new engine process."""
        served = self._state.model
        assert served is not None
        self._state.set_ready(info, served.text, served.defaults, served.names, served.created)

    async def _load(self, listener: socket.socket) -> None:
        model_dir = Path(self._config.model_dir)
        if not model_dir.is_dir():
            raise StartError(f"--model-dir {model_dir} is not a folder")
        defaults = SamplingDefaults.load(model_dir)
        loading = f"Foretoken is loading {model_dir} and answers 503 on {_url(listener)}"
        if self._config.log_json:
            log.info(loading)
        else:
            _say(loading, sys.stderr)
        # The engine loads in its own process meanwhile.
        text, info = await asyncio.gather(asyncio.to_thread(ModelText.load, model_dir), self._engine.start())
        identity = await asyncio.to_thread(identify, model_dir, text)
        names = accepted_names(self._config, identity.repository)
        self._state.set_ready(info, text, defaults, names, int(time.time()))
        for warning in (*(info.get("warnings") or ()), identity.warning()):
            if warning is not None:
                log.warning("%s", warning)
        _say(ready_lines(_url(listener), self._state.model_name, info, bool(self._state.keys)), sys.stdout)


def ready_lines(url: str, model: str, info: dict[str, Any], needs_key: bool) -> str:
    """The one line that says what serves where, then a command to try it."""
    pages, size = int(info.get("kv_pages") or 0), int(info.get("page_size") or 0)
    facts = {
        "model": model,
        "drafter": info.get("drafter") or "none",
        "kv_pages": pages,
        "kv_tokens": pages * size,
        "kernels": info.get("kernels"),
    }
    said = " ".join(f"{name}={_quoted(str(value))}" for name, value in facts.items())
    key = ' -H "Authorization: Bearer $FORETOKEN_API_KEY"' if needs_key else ""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "max_tokens": 32, "temperature": 0}, ensure_ascii=False)
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    return f"Foretoken ready: {url} {said}\n{curl}"


def _say(text: str, stream: TextIO) -> None:
    """Print; a closed pipe, a full disk or an encoding without these characters is no reason not to serve."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError):
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if " " in value else value


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _refuse(reason: str) -> int:
    """One line on standard error; the exit code of a start that failed."""
    _say("Foretoken cannot start: " + " ".join(reason.split()), sys.stderr)
    return 1
