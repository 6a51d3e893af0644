"""The engine dies, hangs, errs or is slow: what clients see, and that nothing waits for ever."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.serve.api.live_server import LiveServer, chat, eventually

LONG = "!say:" + "word " * 30 + "! !slow:0.05!"


class Stream(threading.Thread):
    """One streamed chat in the background; ``body`` is what has arrived."""

    def __init__(self, live: LiveServer, text: str) -> None:
        super().__init__(daemon=True)
        self.body = ""
        self._live = live
        self._text = text
        self.start()

    def run(self) -> None:
        body = chat(self._text, stream=True)
        with (
            contextlib.suppress(httpx.TransportError),
            self._live.client() as http,
            http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            for part in response.iter_text():
                self.body += part

    def ended_well(self) -> bool:
        return self.body.endswith("data: [DONE]\n\n")

    def ended_with_error(self) -> bool:
        """Whether the last frame is an error, with neither [DONE] nor a finish reason before it."""
        chunks = [json.loads(frame.removeprefix("data: ")) for frame in self.body.split("\n\n") if frame]
        assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])
        return set(chunks[-1]) == {"error"}


def open_streams(live: LiveServer, count: int, text: str = LONG) -> list[Stream]:
    """``count`` streams, each of which has had its first event."""
    streams = [Stream(live, text) for _ in range(count)]
    eventually(lambda: all(stream.body for stream in streams))
    return streams


def test_a_killed_engine_ends_streams_with_an_error_and_turns_health_red(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live, live.client() as http:
        streams = open_streams(live, 2)
        os.kill(live.engine_pid(), signal.SIGKILL)
        for stream in streams:
            stream.join(5)
            assert stream.ended_with_error()
        response = http.get("/health")
        assert response.status_code == 503
        assert "failed" in response.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json=chat("x")).status_code == 503
        assert 'foretoken:up{model_name="tiny-model"} 0' in http.get("/metrics").text
    assert live.process.returncode == 0
    assert not any("Traceback" in line for line in live.errors)


@pytest.mark.parametrize("fault", ["die", "garbage"])
def test_a_request_that_the_engine_did_not_survive_is_a_quick_500(tmp_path: Path, fault: str) -> None:
    with LiveServer(tmp_path) as live, live.client() as http:
        started = time.monotonic()
        response = http.post("/v1/chat/completions", json=chat(f"!{fault}:0!"))
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error"
        assert time.monotonic() - started < 5
        assert http.get("/health").status_code == 503
    assert any("engine" in line for line in live.errors)


def test_a_stopped_engine_is_noticed_within_the_watchdog_time_and_forgiven_when_it_goes_on(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--watchdog-seconds", "1") as live, live.client() as http:
        (stream,) = open_streams(live, 1)
        engine = live.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        started = time.monotonic()
        stream.join(5)
        assert stream.ended_with_error()
        assert time.monotonic() - started < 6
        assert http.get("/health").status_code == 503
        assert http.post("/v1/chat/completions", json=chat("x")).status_code == 503
        os.kill(engine, signal.SIGCONT)
        eventually(lambda: http.get("/health").status_code == 200)
        assert (
            http.post("/v1/chat/completions", json=chat("!say:back!")).json()["choices"][0]["message"]["content"]
            == "back"
        )
        assert len(live.messages("cancel")) == 1


def test_a_server_that_was_itself_suspended_does_not_blame_the_engine(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--watchdog-seconds", "1") as live, live.client() as http:
        (stream,) = open_streams(live, 1)
        live.process.send_signal(signal.SIGSTOP)
        time.sleep(1.6)
        live.process.send_signal(signal.SIGCONT)
        stream.join(20)
        assert stream.ended_well()
        assert http.get("/health").status_code == 200


def test_an_error_of_one_request_leaves_the_others_alone(http: httpx.Client, server: LiveServer) -> None:
    (stream,) = open_streams(server, 1)
    response = http.post("/v1/chat/completions", json=chat("!error:0!"))
    assert response.status_code == 500
    assert "not finite" in response.json()["error"]["message"]
    streamed = http.post("/v1/chat/completions", json=chat("!error:4! !say:abcdefgh!", stream=True))
    frames = [frame for frame in streamed.text.split("\n\n") if frame]
    assert len(frames) == 3
    assert "error" in json.loads(frames[-1].removeprefix("data: "))
    before_first = http.post("/v1/chat/completions", json=chat("!error:0!", stream=True))
    assert before_first.status_code == 500
    stream.join(30)
    assert stream.ended_well()


def test_an_error_of_one_choice_cancels_its_sisters(server: LiveServer, http: httpx.Client) -> None:
    before = len(server.messages("cancel"))
    body = {"prompt": ["!error:2! !say:abcdef!", LONG], "max_tokens": 100}
    assert http.post("/v1/completions", json=body).status_code == 500
    eventually(lambda: len(server.messages("cancel")) == before + 1)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_cancels_every_choice(server: LiveServer, streamed: bool) -> None:
    before = len(server.messages("cancel"))
    body = chat("!say:" + "x" * 200 + "! !slow:0.2!", stream=streamed, n=2)
    with httpx.Client(base_url=server.base, timeout=0.5, trust_env=False) as impatient:
        if streamed:
            with impatient.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_text())
        else:
            with pytest.raises(httpx.ReadTimeout):
                impatient.post("/v1/chat/completions", json=body)
    eventually(lambda: len(server.messages("cancel")) == before + 2, 2)
    ids = {message["id"] for message in server.messages("generate")}
    assert {message["id"] for message in server.messages("cancel")} <= ids


def test_a_full_queue_is_429_with_retry_after_and_frees_when_requests_end(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--max-num-seqs", "1", "--max-queue", "1") as live, live.client() as http:
        streams = open_streams(live, 2, "!say:abcdefghij! !slow:0.1!")
        response = http.post("/v1/chat/completions", json=chat("x"))
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == 200
        for stream in streams:
            stream.join(10)
        assert http.post("/v1/chat/completions", json=chat("x")).status_code == 200
        assert http.post("/v1/chat/completions", json=chat("x", n=3)).status_code == 400
        assert 'vllm:admission_rejections_total{model_name="tiny-model"} 1' in http.get("/metrics").text


def test_refused_requests_give_their_places_back(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--max-num-seqs", "1", "--max-queue", "1") as live, live.client() as http:
        for _ in range(5):
            assert http.post("/v1/completions", json={"prompt": [97] * 600}).status_code == 400
        assert http.post("/v1/completions", json={"prompt": "x", "n": 2}).status_code == 200


def test_resetting_the_prefix_cache_is_for_this_machine_only(server: LiveServer, http: httpx.Client) -> None:
    before = len(server.messages("reset_prefix_cache"))
    assert http.post("/reset_prefix_cache").status_code == 200
    for foreign in (
        {"x-forwarded-for": "8.8.8.8"},
        {"origin": "https://example.org"},
        {"origin": "null"},
        {"host": "rebound.example.org"},
        {"host": "[::"},
    ):
        assert http.post("/reset_prefix_cache", headers=foreign).status_code in (400, 403), foreign
    assert len(server.messages("reset_prefix_cache")) <= before + 1
    eventually(lambda: len(server.messages("reset_prefix_cache")) == before + 1)
