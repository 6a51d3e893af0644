"""What the chaos run asks a server and watches about it: streams in threads, health over time, processes and ports.

It knows the API and /proc. It does not know which fault is under way.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from eval.metrics import parse_metrics
from eval.servers import ManagedServer

QUESTION = "Tell me how a lighthouse works, in a few sentences."
DRAIN_SECONDS = 4.0


class BrokenPromise(Exception):
    """Something was seen that must not be; the message says what."""


def check(kept: bool, seen: object) -> None:
    """BrokenPromise with what was seen, unless ``kept``."""
    if not kept:
        raise BrokenPromise(str(seen))


@dataclass(frozen=True)
class Lab:
    """What every fault starts its servers from. seconds: what takes longer counts as hung."""

    model_dir: str
    drafter_dir: str
    threads: int = 1
    seconds: float = 60.0

    def server(
        self,
        *extra: str,
        fault: str | None = None,
        environ: dict[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> ManagedServer:
        """A server with the drafter, every round drafted; with ``fault``, one whose engine has that fault."""
        module = ["serve"] if fault is None else ["eval.chaos_engine", "server", fault, "--"]
        command = [
            *(sys.executable, "-m", *module, "--model-dir", self.model_dir, "--port", "{port}"),
            *("--threads", str(self.threads), "--drain-seconds", f"{DRAIN_SECONDS:g}", "--kv-memory-mib", "128"),
            *("--drafter-dir", self.drafter_dir, "--block-length", "5", *extra),
        ]
        clean = {"DRAFTER_BYO_DIR": "", "MODEL_DIR": "", "PORT": "", **(environ or {})}
        return ManagedServer(command, "chaos", clean, output=output)


def question(tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy chat whose answer goes on for ``tokens`` tokens."""
    messages = [{"role": "user", "content": QUESTION}]
    return {"messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": tokens, **fields}


class Stream(threading.Thread):
    """One streamed chat. ``text`` is what has arrived; ``end`` says how it ended, "" while it runs."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.end = ""
        self._left = False
        self._url = url
        self._body = {**body, "stream": True}
        self.start()

    def run(self) -> None:
        last = ""
        try:
            with (
                httpx.Client(base_url=self._url, timeout=600, trust_env=False) as client,
                client.stream("POST", "/v1/chat/completions", json=self._body) as response,
            ):
                if response.status_code != 200:
                    response.read()
                    self.end = f"HTTP {response.status_code}"
                    return
                for line in response.iter_lines():
                    if self._left:
                        self.end = "left"
                        return
                    if line.startswith("data: "):
                        last = line[6:]
                        self._take(last)
            self.end = "done" if last == "[DONE]" else "error frame" if '"error"' in last else "cut"
        except httpx.TransportError as error:
            self.end = f"cut ({type(error).__name__})"

    def _take(self, data: str) -> None:
        if data != "[DONE]":
            for choice in json.loads(data).get("choices", ()):
                self.text += choice["delta"].get("content") or ""

    def leave(self) -> None:
        """Hang up at the next line."""
        self._left = True


def streams(url: str, count: int, tokens: int, seconds: float) -> list[Stream]:
    """``count`` streams that all have text already; TimeoutError when they do not get it."""
    running = [Stream(url, question(tokens)) for _ in range(count)]
    wait_for(lambda: all(stream.text or stream.end for stream in running), seconds, "the first text of every stream")
    return running


def ends(running: list[Stream], seconds: float) -> str:
    """How they ended, each counted ("2 error frame"); "HUNG" for those that have not after ``seconds``."""
    deadline = time.monotonic() + seconds
    for stream in running:
        stream.join(max(0.0, deadline - time.monotonic()))
    found = [stream.end or "HUNG" for stream in running]
    return ", ".join(f"{found.count(end)} {end}" for end in dict.fromkeys(found))


def answer(url: str, tokens: int = 24, **fields: Any) -> str:
    """A whole answer's text. httpx.HTTPStatusError when it is not a 200."""
    response = httpx.post(f"{url}/v1/chat/completions", json=question(tokens, **fields), timeout=600, trust_env=False)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


def health(url: str) -> int:
    """The status of /health, 0 when nobody answers."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code
    return 0


def metrics(url: str) -> dict[str, float]:
    return parse_metrics(httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds until ``condition()`` holds; TimeoutError names ``what`` did not happen."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - started


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def port_is_free(url: str) -> bool:
    """Whether a new server could listen on the port of ``url``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", int(url.rpartition(":")[2])))
            return True
    return False
