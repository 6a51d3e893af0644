"""Reads a server's Prometheus page while a load runs, stamped on the client's own clock.

Knows the names of vLLM-compatible metrics (new and old) and sums over label sets. It does not judge the values.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import httpx

from eval.beside import Beside

# our name -> names of the same thing, the first that is there wins.
NAMES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "kv_pages": ("foretoken:kv_pages",),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
}
COUNTERS = ("preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "drafts",
            "draft_tokens", "accepted_tokens")  # fmt: skip
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?\s+(\S+)")


def parse_metrics(text: str) -> dict[str, float]:
    """Sums of every sample name over its label sets; lines that are no samples are skipped."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.match(line)
        if match:
            with suppress(ValueError):
                sums[match.group(1)] = sums.get(match.group(1), 0.0) + float(match.group(3))
    return sums


@dataclass(frozen=True)
class Sample:
    """The known metrics at one moment of ``time.perf_counter``; what the server does not offer is absent."""

    time: float
    values: dict[str, float]


def sample_of(text: str, now: float) -> Sample:
    """Picks the known names out of a metrics page."""
    sums = parse_metrics(text)
    values = {}
    for name, candidates in NAMES.items():
        for candidate in candidates:
            if candidate in sums:
                values[name] = sums[candidate]
                break
    return Sample(now, values)


class Scraper(Beside):
    """Polls /metrics in the background of an event loop; a page that is missing or fails leaves no sample."""

    def __init__(self, url: str, every: float = 0.5) -> None:
        self._every = every
        self._client = httpx.AsyncClient(base_url=url.rstrip("/"), timeout=5.0, trust_env=False)
        self.samples: list[Sample] = []

    async def __aenter__(self) -> Scraper:
        await self._scrape()
        return await super().__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        try:
            await super().__aexit__(*exc)
            await self._scrape()
        finally:
            await self._client.aclose()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            await self._scrape()

    async def _scrape(self) -> None:
        with suppress(httpx.HTTPError):
            now = time.perf_counter()
            response = await self._client.get("/metrics")
            if response.status_code == 200:
                self.samples.append(sample_of(response.text, now))


def deltas(samples: Sequence[Sample]) -> dict[str, float]:
    """Growth of every counter from the first sample to the last; empty with fewer than two samples."""
    if len(samples) < 2:
        return {}
    first, last = samples[0].values, samples[-1].values
    return {name: last[name] - first[name] for name in COUNTERS if name in first and name in last}


def gauge_stats(samples: Sequence[Sample], name: str) -> dict[str, float] | None:
    """Mean and maximum of a gauge, None if the server does not offer it."""
    values = [sample.values[name] for sample in samples if name in sample.values]
    return {"mean": sum(values) / len(values), "max": max(values)} if values else None
