"""Connections that send nothing, too much, or no HTTP: bounded in number, size and time, and closed."""

from __future__ import annotations

import json
import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from serve.api import connections
from tests.serve.api.live_server import LiveServer, eventually
from tests.serve.api.served_here import served_here


@contextmanager
def connected(base: str) -> Iterator[socket.socket]:
    found = re.search(r"127\.0\.0\.1:(\d+)", base)
    assert found
    with socket.create_connection(("127.0.0.1", int(found[1])), timeout=15) as peer:
        yield peer


def everything(peer: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    with suppress(ConnectionResetError):
        while data := peer.recv(65536):
            parts.append(data)
    return b"".join(parts)


def answered(peer: socket.socket) -> bool:
    """Ask for a page and read its whole answer."""
    peer.sendall(b"GET /here HTTP/1.1\r\nhost: x\r\n\r\n")
    reply = b""
    while not reply.endswith(b"\r\n\r\nok"):
        data = peer.recv(65536)
        if not data:
            return False
        reply += data
    return reply.startswith(b"HTTP/1.1 200 OK")


def error_of(reply: bytes) -> tuple[int, str]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


LONG_HEADER = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-long: " + b"a" * 40_000 + b"\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        [LONG_HEADER],
        [LONG_HEADER[:35_000], LONG_HEADER[35_000:]],
        [b"GET /" + b"a" * 40_000],
        [b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"],
        [
            b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            + b"".join(b"x-%d: y\r\n" % i for i in range(4000))
            + b"\r\n"
        ],
    ],
    ids=["long header", "long header in pieces", "endless path", "long path", "many headers"],
)
def test_headers_over_the_limit_are_431_however_they_arrive(server: LiveServer, sent: list[bytes]) -> None:
    with connected(server.base) as peer:
        for part in sent:
            peer.sendall(part)
            time.sleep(0.05)
        status, message = error_of(everything(peer))
    assert status == 431
    assert str(connections.MAX_HEADER_BYTES) in message
    assert httpx.get(server.base + "/health", trust_env=False).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n"],
    ids=["TLS", "no HTTP", "no host"],
)
def test_what_is_no_request_is_refused_and_closed(server: LiveServer, sent: bytes) -> None:
    with connected(server.base) as peer:
        peer.sendall(sent)
        status, message = error_of(everything(peer))
    assert (status, message) == (400, "not a valid HTTP request")
    assert httpx.get(server.base + "/health", trust_env=False).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_headers_that_do_not_come_close_the_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    with served_here() as base, connected(base) as peer:
        peer.sendall(sent)
        assert everything(peer) == b""


def test_a_kept_connection_has_the_same_time_for_its_next_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    with served_here() as base, connected(base) as peer:
        for _ in range(2):
            assert answered(peer)
            time.sleep(0.8)  # idle after an answer is what connections are kept for
        peer.sendall(b"GET /here HTTP/1.1\r\n")
        assert everything(peer) == b""


def test_one_connection_too_many_is_503_and_a_place_that_is_left_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    with served_here() as base:
        with connected(base) as first, connected(base) as second, connected(base) as third:
            status, _ = error_of(everything(third))
            assert status == 503
            for peer in (first, second):
                assert answered(peer)
        assert httpx.get(base + "/here", trust_env=False).status_code == 200


CHUNKED = b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "told"),
    [
        (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n" + CHUNKED, 400, "transfer-encoding"),
        (b"POST /tokenize HTTP/1.0\r\n" + CHUNKED, 400, "transfer-encoding"),
        (b"POST /tokenize HTTP/2.0\r\nhost: x\r\ncontent-length: 0\r\n", 400, "HTTP/1.1"),
    ],
    ids=["two lengths", "chunks in HTTP/1.0", "HTTP/2"],
)
def test_a_request_that_a_proxy_may_read_otherwise_is_refused_and_closed(
    server: LiveServer, sent: bytes, status: int, told: str
) -> None:
    with connected(server.base) as peer:
        peer.sendall(sent + b"\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        reply = everything(peer)
    found, message = error_of(reply)
    assert found == status
    assert told in message
    assert reply.count(b"x-request-id") == 1


@pytest.mark.parametrize("encodings", [["identity", "gzip"], ["gzip", "identity"], ["identity, br"]])
def test_an_encoding_is_seen_in_whichever_header_it_is(server: LiveServer, encodings: list[str]) -> None:
    headers = [("content-encoding", encoding) for encoding in encodings]
    response = httpx.post(server.base + "/tokenize", content=b'{"prompt": "x"}', headers=headers, trust_env=False)
    assert response.status_code == 415


def test_a_method_that_a_client_made_up_is_neither_quoted_nor_logged(server: LiveServer) -> None:
    response = httpx.request("SECRET" * 100, server.base + "/health", trust_env=False)
    assert response.status_code == 405
    assert response.headers["allow"]
    assert "SECRET" not in response.text
    assert "SECRET" not in "".join(server.errors)


def chunked(size: int, each: int) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (each, b" " * each) for _ in range(size // each))
    return b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + CHUNKED + b"connection: close\r\n\r\n" + chunks


def test_a_body_in_crumbs_is_refused_and_one_in_small_chunks_is_read(server: LiveServer) -> None:
    small, last = chunked(60_000, 30), b'f\r\n{"prompt": "x"}\r\n0\r\n\r\n'
    for crumbs, status in ((chunked(6_000, 1), 400), (small, 200)):
        with connected(server.base) as peer:
            with suppress(ConnectionError):  # what is refused in the middle need not be read to its end
                peer.sendall(crumbs + last)
            said = everything(peer)
        assert said.startswith(b"HTTP/1.1 %d " % status) or (status == 400 and not said)


@pytest.mark.parametrize(
    ("soft", "most"), [(65536, 4096), (1024, 960), (64, 16), (resource.RLIM_INFINITY, 4096)], ids=str
)
def test_connections_leave_open_files_for_the_server(monkeypatch: pytest.MonkeyPatch, soft: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (soft, soft))
    assert connections.most_connections() == most


def test_without_open_files_to_spare_connections_wait_and_the_log_says_it_once(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live:
        pid = live.process.pid
        held = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + 4, hard))
        with ExitStack() as peers:
            opened = [peers.enter_context(connected(live.base)) for _ in range(12)]
            eventually(lambda: any("none can be accepted" in line for line in live.errors))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
            for peer in opened:  # those that waited are accepted now
                peer.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                assert everything(peer).startswith(b"HTTP/1.1 200 OK")
    said = [line for line in live.errors if "accept" in line or "Traceback" in line]
    assert said == ["ERROR serve.api: connections wait, as none can be accepted: Too many open files\n"]
