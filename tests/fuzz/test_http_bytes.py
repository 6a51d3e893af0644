"""Bytes that no client library would send: broken bodies, broken chunks, broken requests on a raw socket.

Each is answered with a client error or a closed connection, in bounded time, and the server goes on answering others.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.damage import Damage, byte_damage, json_damage
from tests.fuzz.scale import fuzz
from tests.serve.api.live_server import LiveServer

ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
BODIES = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        "stop": ["a"],
        "logit_bias": {"5": 1.5},
        "stream_options": {"include_usage": True},
        "stream": True,
        "temperature": 0.5,
        "max_tokens": 3,
    },
    "/v1/completions": {"prompt": [[5, 6], [7]], "n": 2, "logprobs": 2, "echo": True, "seed": 7, "max_tokens": 2},
    "/tokenize": {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": False},
    "/detokenize": {"tokens": [5, 6, 300]},
}
FIELDS = ["stream", "n", "stop", "messages", "prompt", "tokens", "logit_bias", "min_tokens", "echo", "tools", "model"]
SECONDS = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("bytes"), "--max-body-bytes", "200000") as live:
        yield live


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
def test_a_damaged_body_is_a_client_error_or_an_answer(
    http: httpx.Client, route: str, tried: Callable[[str], None]
) -> None:
    whole = json.dumps(BODIES[route]).encode()
    types = st.sampled_from(
        ["application/json", "text/plain", "application/xml", "multipart/form-data; boundary=x", ""]
    )

    @fuzz(40)
    @given(damage=byte_damage() | json_damage(FIELDS), kind=types)
    def attempt(damage: Damage, kind: str) -> None:
        body = damage.apply(whole)
        response = http.post(route, content=body, headers={"content-type": kind})
        assert response.status_code < 500, (body[:200], response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error["message"]
            assert len(response.content) < 2000, "an error does not echo the request"
        tried(str(response.status_code))

    attempt()
    assert http.get("/health").status_code == 200


def send(server: LiveServer, data: bytes, *, half_close: bool = True) -> bytes:
    """What comes back on a fresh connection until it is closed or still for a second."""
    at = urlsplit(server.base)
    with socket.create_connection((at.hostname or "", at.port or 0), timeout=10) as connection:
        try:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        connection.settimeout(1.5)
        answer = b""
        try:
            while part := connection.recv(1 << 16):
                answer += part
        except OSError:
            pass
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {size}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


GOOD = b'{"prompt": "x", "max_tokens": 1}'
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET http://example.com/health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT example.com:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /%00%ff%fe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models/%2e%2e%2f%2e%2e HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\nb\r\n\r\n",
        post(GOOD, length=5),
        post(GOOD, length=500),
        post(GOOD, "content-length: 7"),
        post(GOOD, "transfer-encoding: chunked"),
        post(GOOD, length=-5),
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: " + b"9" * 400 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: five\r\n\r\n" + GOOD,
        CHUNKED + b"zz\r\n",
        CHUNKED + b"ffffffffffffffffff\r\n",
        CHUNKED + b"5\r\nhello world",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"3;" + b"x" * 200_000 + b"\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"0\r\n" + b"trailer: x\r\n" * 20_000 + b"\r\n",
        post(GOOD) + b"\x00\xff garbage after a request\r\n\r\n",
        post(GOOD, "expect: 100-continue"),
        post(GOOD, "connection: upgrade", "upgrade: websocket"),
        post(GOOD, "content-encoding: br"),
        post(GOOD, "content-encoding: gzip, identity"),
        post(GOOD, "content-type: application/json; charset=utf-16"),
    ],
)
def test_broken_http_is_no_server_error_and_disturbs_nobody(
    server: LiveServer, http: httpx.Client, data: bytes
) -> None:
    started = time.monotonic()
    found = statuses(send(server, data))
    assert all(status < 500 for status in found)
    assert time.monotonic() - started < SECONDS
    assert http.get("/health").status_code == 200


def test_requests_in_a_row_on_one_connection_are_answered_in_order(server: LiveServer) -> None:
    answer = send(server, post(b"{") + post(GOOD) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", half_close=False)
    assert statuses(answer) == [400, 200, 200]


def test_chunks_of_single_bytes_make_a_body(server: LiveServer) -> None:
    chunks = b"".join(b"1\r\n" + GOOD[i : i + 1] + b"\r\n" for i in range(len(GOOD)))
    assert statuses(send(server, CHUNKED + chunks + b"0\r\n\r\n", half_close=False)) == [200]


def test_the_last_of_two_equal_keys_counts(http: httpx.Client) -> None:
    body = b'{"prompt": "!say:first!", "prompt": "!say:second!", "max_tokens": 0, "max_tokens": 9}'
    assert http.post("/v1/completions", content=body).json()["choices"][0]["text"] == "second"


def test_many_connections_that_send_nothing_block_nobody(server: LiveServer, http: httpx.Client) -> None:
    at = urlsplit(server.base)
    idle = [socket.create_connection((at.hostname or "", at.port or 0), timeout=10) for _ in range(60)]
    try:
        for index, connection in enumerate(idle):
            connection.sendall(post(GOOD, length=500)[: 10 + index])
        assert http.post("/v1/completions", content=GOOD).status_code == 200
        assert http.get("/health").status_code == 200
    finally:
        for connection in idle:
            connection.close()


def test_raw_bytes_are_never_a_server_error(
    server: LiveServer, http: httpx.Client, tried: Callable[[str], None]
) -> None:
    good = post(GOOD)

    @fuzz(12)
    @given(damage=byte_damage())
    def attempt(damage: Damage) -> None:
        found = statuses(send(server, damage.apply(good)))
        assert all(status < 500 for status in found)
        tried(str(found[0]) if found else "closed")

    attempt()
    assert http.get("/health").status_code == 200


def test_the_folder_of_these_tests_has_a_long_run() -> None:
    """Every fuzzer is known to the command for long runs."""
    from eval.fuzz import FUZZERS

    here = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert {file for file, _ in FUZZERS.values()} <= here
