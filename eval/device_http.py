"""Prompt and burst times of the real server over HTTP, with random weights of the real shapes.

Prompts are token ids, so their lengths are exact; whole answers are counted by the server's own usage. Knows HTTP; no
engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from eval.servers import ManagedServer, our_server

FIRST_ID, LAST_ID = 1000, 40_000
LONG_PROMPT = 4096


def server(model_dir: Path, streams: int, *extra: str) -> ManagedServer:
    """The server on the card with room for ``streams`` requests at once, without prefix cache."""
    options = (
        "--device",
        "cuda",
        "--served-model-name",
        "default",
        "--max-num-seqs",
        str(streams),
        "--max-queue",
        str(4 * streams),
    )
    return our_server(model_dir, "foretoken", *options, "--no-prefix-cache", *extra)


def prompt_ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def first_token_ms(url: str, tokens: int, repeats: int = 4) -> float:
    """Milliseconds from sending a prompt to the first streamed event: the best of a few, after one for warming up. One
    token is asked for, so that its event comes whether or not it has text by itself."""
    times = []
    for number in range(repeats + 1):
        request = _request(url, prompt_ids(tokens, number), 1, stream=True)
        with socket.create_connection(_address(url)) as connection:
            started = time.perf_counter()
            connection.sendall(request)
            answer = b""
            while b"data:" not in answer:
                piece = connection.recv(1 << 16)
                if not piece:
                    raise RuntimeError(f"no event in the answer: {answer[:300]!r}")
                answer += piece
            times.append(time.perf_counter() - started)
    return min(times[1:]) * 1e3


def token_ms(url: str, prompt: int, tokens: int) -> float:
    """Milliseconds a token of one stream between its first and its last event."""
    arrivals = []
    with socket.create_connection(_address(url)) as connection:
        connection.sendall(_request(url, prompt_ids(prompt, 99), tokens, stream=True))
        while piece := connection.recv(1 << 16):
            if b"data:" in piece:
                arrivals.append(time.perf_counter())
    return (arrivals[-1] - arrivals[0]) / (tokens - 1) * 1e3


def burst_tokens_per_second(url: str, streams: int, prompt: int, tokens: int, repeats: int = 2) -> float:
    """Output tokens a second of ``streams`` requests sent at once, from the first send to the last answer: the best of
    a few, after a short one for warming up."""
    asyncio.run(_burst(url, streams, prompt, 8, seed=1))
    return max(asyncio.run(_burst(url, streams, prompt, tokens, seed=10 + i)) for i in range(repeats))


async def _burst(url: str, streams: int, prompt: int, tokens: int, seed: int) -> float:
    # Requests are made before the clock starts and answers read after it stops: a client library took a tenth of it.
    requests = [_request(url, prompt_ids(prompt, 1000 * seed + i), tokens, stream=False) for i in range(streams)]
    host, port = _address(url)

    async def one(request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer

    started = time.perf_counter()
    answers = await asyncio.gather(*map(one, requests))
    took = time.perf_counter() - started
    return sum(_completion_tokens(answer) for answer in answers) / took


def _completion_tokens(answer: bytes) -> int:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise RuntimeError(f"not answered: {answer[:300]!r}")
    return int(json.loads(body)["usage"]["completion_tokens"])


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _request(url: str, ids: list[int], tokens: int, *, stream: bool) -> bytes:
    """A whole HTTP request, after whose answer the server closes."""
    body = json.dumps(
        {
            "model": "default",
            "prompt": ids,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
