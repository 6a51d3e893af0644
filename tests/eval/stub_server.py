"""A small fake server with fixed timing, for trying the measuring client. A process of its own, or a thread.

Behaviour is a JSON object: role_first (send an empty role chunk at once), first_delay, gap (seconds), chunks (texts),
serial (serve one request at a time), prefix_cache (a request seen before skips first_delay), failure (status to answer
with), finish ("done", "cut": no [DONE], "error": an error frame), answers ({substring of the prompt: text}),
knows ({question: option}: the option's letter, wherever it stands), unmetered (serve /metrics as 404), together (the
whole answer in one write), dies_after (requests it answers before it only fails).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WordCounter:
    """One token for every run of non-blank characters with the blanks before it."""

    def ends(self, text: str) -> Sequence[int]:
        return [match.end() for match in re.finditer(r"\s*\S+", text)]


class StubState:
    def __init__(self, behaviour: dict[str, Any]) -> None:
        self.behaviour = behaviour
        self.lock = threading.Lock()
        self.counts = threading.Lock()
        self.running = self.waiting = self.queries = self.hits = self.generated = self.firsts = 0
        self.first_seconds = 0.0
        self.seen: set[str] = set()
        self.bodies: list[dict[str, Any]] = []

    def metrics(self) -> str:
        return (
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{model_name="stub"}} {self.running}\n'
            f'vllm:num_requests_waiting{{model_name="stub"}} {self.waiting}\n'
            f'vllm:kv_cache_usage_perc{{model_name="stub"}} 0.25\n'
            f'vllm:time_to_first_token_seconds_sum{{model_name="stub"}} {self.first_seconds}\n'
            f'vllm:time_to_first_token_seconds_count{{model_name="stub"}} {self.firsts}\n'
            f'vllm:num_preemptions_total{{model_name="stub"}} 0\n'
            f'vllm:prefix_cache_queries_total{{model_name="stub"}} {self.queries}\n'
            f'vllm:prefix_cache_hits_total{{model_name="stub"}} {self.hits}\n'
            f'vllm:generation_tokens_total{{model_name="stub"}} {self.generated}\n'
            f'vllm:spec_decode_num_drafts_total{{model_name="stub"}} {self.generated}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{model_name="stub"}} {2 * self.generated}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{model_name="stub"}} {self.generated}\n'
        )


class StubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # on a kept connection it would hold every event but the first for 40 ms
    state: StubState
    _held = b""

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self._plain(200, '{"status":"ok"}')
        elif self.path == "/v1/models":
            self._plain(200, '{"object":"list","data":[{"id":"stub","root":"stub"}]}')
        elif self.path == "/metrics" and not self.state.behaviour.get("unmetered"):
            self._plain(200, self.state.metrics())
        else:
            self._plain(404, '{"error":{"message":"not found"}}')

    def do_POST(self) -> None:
        if self.path != "/v1/chat/completions":
            self._plain(404, '{"error":{"message":"not found"}}')
            return
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        behaviour = self.state.behaviour
        with self.state.counts:
            self.state.bodies.append(body)
        if "failure" in behaviour or len(self.state.bodies) > behaviour.get("dies_after", float("inf")):
            self._plain(behaviour.get("failure", 500), '{"error":{"message":"stub failure"}}')
            return
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(self._chunks(body))}
            self._plain(200, json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if behaviour.get("role_first"):
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        with self._turn():
            self._answer(body)
        with contextlib.suppress(OSError):
            if self._held:
                self.wfile.write(f"{len(self._held):x}\r\n".encode() + self._held + b"\r\n")
                self._held = b""
            self.wfile.write(b"0\r\n\r\n")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        state = self.state
        with state.counts:
            state.waiting += 1
        with state.lock if state.behaviour.get("serial") else contextlib.nullcontext():
            with state.counts:
                state.waiting -= 1
                state.running += 1
            try:
                yield
            finally:
                with state.counts:
                    state.running -= 1

    def _chunks(self, body: dict[str, Any]) -> list[str]:
        asked = body["messages"][-1]["content"].rpartition("Question: ")[2]
        for question, option in self.state.behaviour.get("knows", {}).items():
            found = re.search(rf"^([A-J])\. {re.escape(option)}$", asked, re.MULTILINE)
            if asked.startswith(question) and found:
                return [found[1]]
        for part, answer in self.state.behaviour.get("answers", {}).items():
            if part in body["messages"][-1]["content"]:
                return [answer]
        return list(self.state.behaviour.get("chunks", ["one", " two", " three"]))

    def _answer(self, body: dict[str, Any]) -> None:
        behaviour, state = self.state.behaviour, self.state
        prompt = json.dumps(body["messages"])
        with state.counts:
            cached = bool(behaviour.get("prefix_cache")) and prompt in state.seen
            state.seen.add(prompt)
            state.queries += 100
            state.hits += 100 * cached
        delay = 0.0 if cached else behaviour.get("first_delay", 0.0)
        time.sleep(delay)
        with state.counts:
            state.firsts += 1
            state.first_seconds += delay
        chunks = self._chunks(body)
        for index, text in enumerate(chunks):
            if index:
                time.sleep(behaviour.get("gap", 0.0))
            self._event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
            with state.counts:
                state.generated += 1
        if behaviour.get("finish") == "error":
            self._event({"error": {"message": "engine died"}})
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event(
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 100,
                    "completion_tokens": len(chunks),
                    "prompt_tokens_details": {"cached_tokens": 100 * cached},
                },
            }
        )
        if behaviour.get("finish") != "cut":
            self._chunk(b"data: [DONE]\n\n")

    def _event(self, payload: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps({'id': 'x', 'object': 'chat.completion.chunk', **payload})}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if self.state.behaviour.get("together"):
                self._held += data
                return
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    def _plain(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def make_server(behaviour: dict[str, Any], port: int = 0) -> tuple[Server, StubState]:
    state = StubState(behaviour)
    handler = type("Handler", (StubHandler,), {"state": state})
    return Server(("127.0.0.1", port), handler), state


@contextlib.contextmanager
def running_stub(**behaviour: Any) -> Iterator[tuple[str, StubState]]:
    """The stub in a thread; yields its URL and its state."""
    server, state = make_server(behaviour)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--behaviour", default="{}")
    arguments = parser.parse_args()
    make_server(json.loads(arguments.behaviour), arguments.port)[0].serve_forever()
