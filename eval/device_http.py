"""Prompt and burst times of the real server over HTTP, with random weights of the real shapes.

Prompts are token ids, so their lengths are exact; whole answers are counted by the server's own usage. Knows HTTP; no
engine.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx

from eval.servers import ManagedServer, our_server

FIRST_ID, LAST_ID = 1000, 40_000


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
    """Milliseconds to the first streamed token of a prompt: the best of a few, after one for warming up."""
    times = []
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        for number in range(repeats + 1):
            body = _body(prompt_ids(tokens, number), 2, stream=True)
            started = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                arrivals = [time.perf_counter() for line in response.iter_lines() if line.startswith("data:")]
                times.append(arrivals[0] - started)
    return min(times[1:]) * 1e3


def token_ms(url: str, prompt: int, tokens: int) -> float:
    """Milliseconds a token of one stream between its first and its last event."""
    arrivals = []
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        body = _body(prompt_ids(prompt, 99), tokens, stream=True)
        with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data:") and "[DONE]" not in line:
                    arrivals.append(time.perf_counter())
    return (arrivals[-1] - arrivals[0]) / (tokens - 1) * 1e3


def burst_tokens_per_second(url: str, streams: int, prompt: int, tokens: int, repeats: int = 2) -> float:
    """Output tokens a second of ``streams`` requests sent at once, from the first send to the last answer: the best of
    a few, after a short one for warming up."""
    asyncio.run(_burst(url, streams, prompt, 8, seed=1))
    return max(asyncio.run(_burst(url, streams, prompt, tokens, seed=10 + i)) for i in range(repeats))


async def _burst(url: str, streams: int, prompt: int, tokens: int, seed: int) -> float:
    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:

        async def one(number: int) -> int:
            body = _body(prompt_ids(prompt, 1000 * seed + number), tokens, stream=False)
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            return int(response.json()["usage"]["completion_tokens"])

        started = time.perf_counter()
        counts = await asyncio.gather(*(one(number) for number in range(streams)))
        return sum(counts) / (time.perf_counter() - started)


def _body(ids: list[int], tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": "default",
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
