"""Other writers of responses than the rollout: the server's engine in this process, or an OpenAI-compatible URL.

A job that is sampled for some tokens and greedy from there is two requests, the second with the first one's ids behind
the prompt. A URL must return token ids (``return_token_ids``, as vLLM does): text that would have to be tokenised again
is refused. This file knows no token store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import numpy as np

from drafter_train.rollout import Job
from drafter_train.served import Decoded, drive, open_engine
from drafter_train.tokens import Response
from serve.protocol import SamplingParams

URL_TRIES = 4
_PASSING = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Ask:
    """One request: go on from ``ids`` for at most ``max_tokens``; temperature 0 is greedy."""

    ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class Backend(Protocol):
    """Answers requests; the ids include the end token where one was written."""

    def complete(self, asks: Sequence[Ask]) -> list[list[int]]: ...


class EngineBackend:
    """The server's engine without a drafter, in this process. ValueError when it cannot start."""

    def __init__(self, target: str, weights: str, device: str, sequences: int) -> None:
        self._engine = open_engine(target, None, 0, weights, device, sequences)

    def complete(self, asks: Sequence[Ask]) -> list[list[int]]:
        found: dict[int, list[int]] = {}

        def keep(name: str, item: Decoded) -> None:
            found[int(name)] = list(item.ids)

        drive(
            self._engine,
            [
                (
                    str(i),
                    ask.ids,
                    SamplingParams(ask.max_tokens, ask.temperature, top_p=ask.top_p, top_k=ask.top_k, seed=ask.seed),
                )
                for i, ask in enumerate(asks)
            ],
            keep,
        )
        return [found[i] for i in range(len(asks))]


class UrlBackend:
    """``POST URL/completions`` with token ids in and out. Errors are ValueError naming URL and reason."""

    def __init__(self, url: str, model: str, parallel: int, key: str | None = None, pause_seconds: float = 1.0) -> None:
        self._url, self._model, self._pause = url.rstrip("/"), model, pause_seconds
        self._pool = ThreadPoolExecutor(parallel)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(600, connect=10))

    def complete(self, asks: Sequence[Ask]) -> list[list[int]]:
        return list(self._pool.map(self._one, asks))

    def _one(self, ask: Ask) -> list[int]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ask.ids),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "return_token_ids": True,
        }
        if ask.temperature > 0:
            body |= {"top_p": ask.top_p, "top_k": ask.top_k}
        reason = ""
        for attempt in range(URL_TRIES):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                reply = self._client.post(f"{self._url}/completions", json=body)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if reply.status_code in _PASSING:
                reason = f"HTTP {reply.status_code}"
                continue
            if reply.status_code != 200:
                raise ValueError(f"{self._url}: HTTP {reply.status_code}: {reply.text[:300]}")
            choice = reply.json()["choices"][0]
            if choice.get("finish_reason") not in ("stop", "length"):
                # A server that is going away answers with what it had, and HTTP 200.
                reason = f"finish_reason {choice.get('finish_reason')!r}, an answer that is not whole"
                continue
            ids = choice.get("token_ids")
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise ValueError(f"{self._url} returns no token_ids; its text would have to be tokenised again")
            return ids
        raise ValueError(f"{self._url} failed {URL_TRIES} times, last with {reason}")


def write_through(
    backend: Backend,
    jobs: Sequence[Job],
    ends: tuple[int, ...],
    emit: Callable[[Response], None],
    *,
    together: int,
    deadline: float = float("inf"),
) -> bool:
    """The same contract as ``rollout.roll_out``, ``together`` jobs at a time."""
    for start in range(0, len(jobs), together):
        part = jobs[start : start + together]
        prompts = [tuple(int(i) for i in job.ids) for job in part]
        first = backend.complete([_first(job, ids) for job, ids in zip(part, prompts, strict=True)])
        rest = [
            i
            for i, (job, ids) in enumerate(zip(part, first, strict=True))
            if 0 < job.sampled_tokens <= len(ids) < job.max_new_tokens and ids[-1] not in ends
        ]
        more = backend.complete(
            [Ask(prompts[i] + tuple(first[i]), part[i].max_new_tokens - len(first[i])) for i in rest]
        )
        for i, ids in zip(rest, more, strict=True):
            first[i] += ids
        for job, ids in zip(part, first, strict=True):
            greedy_from = min(job.sampled_tokens, len(ids))
            emit(Response(job.prompt, job.pass_index, np.array(ids), greedy_from, bool(ids) and ids[-1] in ends))
        if time.monotonic() > deadline and start + together < len(jobs):
            return False
    return True


def _first(job: Job, prompt: tuple[int, ...]) -> Ask:
    if not job.sampled_tokens:
        return Ask(prompt, job.max_new_tokens)
    count = min(job.sampled_tokens, job.max_new_tokens)
    seed = job.pass_index * 1_000_003 + job.prompt
    return Ask(prompt, count, job.temperature, job.top_p, job.top_k, seed)
