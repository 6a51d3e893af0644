"""What the server measures, and the /metrics page: vLLM's names where they exist, ``foretoken:`` for the rest.

Counters of the engine come from its own statistics; times and sizes of requests are observed here, as a client sees
them. Labels never hold anything that a client wrote. It does not know HTTP.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from serve.api.prometheus import Histogram, Page
from serve.protocol import STEP_TOKEN_BOUNDS, EngineStats, Output, SamplingParams

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 4, 8, 16)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From the arrival of the request to its first token.", _SECONDS),
    "inter_token_latency_seconds": (
        "Gap between commits divided by the tokens of the later one, once for each token after the first commit.",
        _TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": ("From the arrival of the request to its last token.", _SECONDS),
    "request_queue_time_seconds": ("Time in the queue of the engine.", _SECONDS),
    "request_prefill_time_seconds": ("Time from leaving the queue to the first token.", _SECONDS),
    "request_decode_time_seconds": ("Time from the first to the last token.", _SECONDS),
    "request_inference_time_seconds": ("Prefill and decode time together.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a finished request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a finished request.", _TOKENS),
    "request_params_max_tokens": ("Token cap of a request.", _TOKENS),
    "request_params_n": ("Choices asked for in a request.", _CHOICES),
}
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


class ServerMetrics:
    """Observations of all requests since the start."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter(dict.fromkeys(_FINISHED.values(), 0))
        self.responses: Counter[str] = Counter()

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)


class RequestObserver:
    """Feeds the metrics from the outputs of one client request; give it to ``Generation.start``.

    ``arrival`` is a ``time.monotonic()``; ``prompt_tokens[i]`` belongs to choice i.
    """

    def __init__(self, metrics: ServerMetrics, arrival: float, prompt_tokens: list[int], params: list[SamplingParams]):
        self._metrics = metrics
        self._arrival = arrival
        self._prompt_tokens = prompt_tokens
        self._last: list[float | None] = [None] * len(prompt_tokens)
        self._generated = [0] * len(prompt_tokens)
        for item in params:
            metrics.observe("request_params_max_tokens", item.max_tokens)

    def __call__(self, index: int, output: Output) -> None:
        now = time.monotonic()
        count = len(output.token_ids)
        if count:
            last = self._last[index]
            if last is None:
                self._metrics.observe("time_to_first_token_seconds", now - self._arrival)
            else:
                self._metrics.observe("inter_token_latency_seconds", (now - last) / count, count)
            self._last[index] = now
            self._generated[index] += count
        if output.finish_reason is not None:
            self._finish(index, output, now)

    def _finish(self, index: int, output: Output, now: float) -> None:
        metrics = self._metrics
        reason = _FINISHED.get(str(output.finish_reason), "error")
        metrics.finished[reason] += 1
        if reason not in ("stop", "length"):
            return
        metrics.observe("e2e_request_latency_seconds", now - self._arrival)
        metrics.observe("request_prompt_tokens", self._prompt_tokens[index])
        metrics.observe("request_generation_tokens", self._generated[index])
        final = output.final or {}
        prefill, decode = final.get("prefill_seconds", 0.0), final.get("decode_seconds", 0.0)
        metrics.observe("request_queue_time_seconds", final.get("queue_seconds", 0.0))
        metrics.observe("request_prefill_time_seconds", prefill)
        metrics.observe("request_decode_time_seconds", decode)
        metrics.observe("request_inference_time_seconds", prefill + decode)


def metrics_page(
    model_name: str,
    info: dict[str, Any],
    stats: EngineStats,
    metrics: ServerMetrics,
    *,
    rejected: int,
    restarts: int,
    up: bool,
) -> str:
    """The whole page as text."""
    page = Page({"model_name": model_name})
    total, free = stats.kv_pages_total, stats.kv_pages_free
    usage = (total - free) / total if total else 0.0
    page.gauge("vllm:num_requests_running", "Requests in the current step.", stats.running)
    page.gauge("vllm:num_requests_waiting", "Requests waiting for their first step.", stats.waiting)
    page.gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", usage)
    page.gauge("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", usage)
    page.counter("vllm:prompt_tokens_total", "Prompt tokens processed.", stats.prompt_tokens)
    page.counter("vllm:generation_tokens_total", "Tokens generated.", stats.generation_tokens)
    page.counter(
        "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries
    )
    page.counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
    page.counter("vllm:num_preemptions_total", "Sequences preempted for want of KV pages.", stats.preemptions)
    page.counter(
        "vllm:request_success_total", "Ended requests (choices), by reason.", 0, metrics.finished, "finished_reason"
    )
    page.counter("vllm:spec_decode_num_drafts_total", "Rounds with a draft.", stats.drafts)
    page.counter("vllm:spec_decode_num_draft_tokens_total", "Tokens drafted.", stats.draft_tokens)
    page.counter("vllm:spec_decode_num_accepted_tokens_total", "Drafted tokens accepted.", stats.accepted_tokens)
    page.counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "Rounds whose drafted token at this position was accepted.",
        0,
        {str(i): count for i, count in enumerate(stats.accepted_per_position)},
        "position",
    )
    for name, (help_text, _) in _HISTOGRAMS.items():
        page.histogram(f"vllm:{name}", help_text, metrics.histograms[name])
    page.histogram(
        "vllm:iteration_tokens_total",
        "Token rows of a step.",
        Histogram.of(STEP_TOKEN_BOUNDS, stats.steps_by_tokens, stats.step_tokens),
    )
    cache = {
        "block_size": str(info.get("page_size", "")),
        "num_gpu_blocks": str(info.get("kv_pages", "")),
        "enable_prefix_caching": str(info.get("prefix_cache", "")),
    }
    page.gauge("vllm:cache_config_info", "Settings of the KV cache.", 1, cache)
    page.counter("vllm:admission_rejections_total", "Requests refused because the queue was full.", rejected)
    page.counter("foretoken:engine_restarts_total", "Times the engine process was started again.", restarts)
    _own(page, info, stats, metrics, up)
    return page.render()


def _own(page: Page, info: dict[str, Any], stats: EngineStats, metrics: ServerMetrics, up: bool) -> None:
    page.gauge("foretoken:up", "1 when a request would be answered now.", int(up))
    page.gauge("foretoken:kv_pages", "KV pages of the pool.", stats.kv_pages_total)
    page.gauge("foretoken:kv_pages_free", "KV pages free or held by the prefix cache only.", stats.kv_pages_free)
    page.counter("foretoken:steps_total", "Steps of the engine.", stats.steps)
    page.counter("foretoken:step_tokens_total", "Token rows of all steps.", stats.step_tokens)
    page.counter(
        "foretoken:block_length_rounds_total",
        "Decoding rounds by the block length that was chosen.",
        0,
        {key: float(count) for key, count in sorted(stats.block_lengths.items(), key=lambda item: int(item[0]))},
        "block_length",
    )
    page.counter("foretoken:draft_seconds_total", "Time spent drafting.", stats.draft_seconds)
    page.counter("foretoken:verify_seconds_total", "Time spent in target passes.", stats.verify_seconds)
    page.counter(
        "foretoken:drafter_faults_total", "Failures of the drafter (plain decoding goes on).", stats.drafter_faults
    )
    page.counter("foretoken:http_responses_total", "Responses by status code.", 0, metrics.responses, "code")
    facts = ("kernels", "weights", "device", "proposer", "drafter")
    page.gauge("foretoken:info", "What serves.", 1, {name: str(info.get(name) or "none") for name in facts})
