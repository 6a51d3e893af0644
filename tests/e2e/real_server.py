"""``python -m serve`` as users start it, with a real engine, and what the tests ask it."""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.serve.api.live_server import ServerProcess, events

START_SECONDS = 240.0


class RealServer(ServerProcess):
    """A server of ``model_dir``. One engine thread: the tests share their cores with others."""

    def __init__(
        self, model_dir: Path, *arguments: str, environ: dict[str, str] | None = None, wait_ready: float = START_SECONDS
    ) -> None:
        chosen = () if "--port" in arguments else ("--port", "0")
        command = [sys.executable, "-m", "serve", "--model-dir", str(model_dir), "--threads", "1", *chosen, *arguments]
        super().__init__(command, environ, wait_ready)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.base, "timeout": 120, "trust_env": False, **options})

    def metric(self, name: str, **labels: str) -> float:
        """Value of the first sample of ``name`` with these labels."""
        for line in httpx.get(self.base + "/metrics", trust_env=False).text.splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def port(self) -> str:
        found = re.search(r":(\d+)$", self.base)
        assert found
        return found[1]

    def __enter__(self) -> RealServer:
        return self


@dataclass(frozen=True)
class Answer:
    """One choice, however it was asked for."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    chunks: int = 0


def ask(http: httpx.Client, route: str, body: dict[str, Any]) -> Answer:
    """POST to ``/v1/<route>``; the answer must be a 200. With ``stream`` the events are checked and joined."""
    if body.get("stream"):
        body = {**body, "stream_options": {"include_usage": True}}
    response = http.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        reply = response.json()
        (choice,) = reply["choices"]
        text = choice["message"]["content"] if route == "chat/completions" else choice["text"]
        usage = reply["usage"]
        return Answer(text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])
    chunks = events(response.content.decode("utf-8", errors="strict"))
    assert len({chunk["id"] for chunk in chunks}) == 1
    *parts, last = chunks
    assert last["choices"] == []
    choices = [choice for part in parts for choice in part["choices"]]
    if route == "chat/completions":
        assert choices[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in choices[1:])
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
    else:
        text = "".join(choice["text"] for choice in choices)
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    usage = last["usage"]
    reason = choices[-1]["finish_reason"]
    return Answer(text, reason, usage["prompt_tokens"], usage["completion_tokens"], len(parts))


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat with one user message."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def both_ways(http: httpx.Client, route: str, body: dict[str, Any]) -> Answer:
    """The answer, which must be the same whole and streamed."""
    whole, streamed = ask(http, route, body), ask(http, route, {**body, "stream": True})
    facts = [(a.text, a.finish_reason, a.prompt_tokens, a.completion_tokens) for a in (whole, streamed)]
    assert facts[0] == facts[1]
    return streamed


def together(http: httpx.Client, route: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """All answers, asked at the same time."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(http, route, body), bodies))


class Stream(threading.Thread):
    """One stream in the background; ``body`` is what has arrived, ``broken`` whether the connection was cut."""

    def __init__(self, http: httpx.Client, route: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.body = ""
        self.broken = False
        self._left = False
        self._http, self._route, self._request = http, route, {**body, "stream": True}
        self.start()

    def run(self) -> None:
        try:
            with self._http.stream("POST", f"/v1/{self._route}", json=self._request) as response:
                for part in response.iter_text():
                    self.body += part
                    if self._left:
                        return
        except httpx.TransportError:
            self.broken = True

    def leave(self) -> None:
        """Hang up at the next piece."""
        self._left = True

    def ended_badly(self) -> bool:
        """Cut, or ended by an error frame: in no way like an answer that is complete."""
        complete = "[DONE]" in self.body or re.search(r'"finish_reason":"', self.body)
        return not complete and (self.broken or '"error"' in self.body.rsplit("data: ", 1)[-1])

    def ended_well(self) -> bool:
        return not self.broken and self.body.endswith("data: [DONE]\n\n")
