"""The /metrics page, read with the Prometheus client's own parser."""

from __future__ import annotations

import math
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.api.prometheus import Histogram, Page
from serve.protocol import EngineStats
from tests.serve.api.live_server import LiveServer, chat

EXPECTED = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_n",
    "vllm:iteration_tokens_total",
    "vllm:request_params_max_tokens",
    "vllm:cache_config_info",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "foretoken:block_length_rounds",
    "foretoken:draft_seconds",
    "foretoken:verify_seconds",
    "foretoken:drafter_faults",
    "foretoken:engine_restarts",
    "foretoken:info",
    "foretoken:up",
]


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") is not None
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_the_page_has_every_name_and_agrees_with_what_was_served(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--served-model-name", 'odd "name"\\n') as live, live.client() as http:
        for _ in range(3):
            assert http.post("/v1/chat/completions", json=chat("!say:abcdef!", n=2)).status_code == 200
        assert http.post("/v1/chat/completions", json=chat("!say:abcdef!", max_tokens=2)).status_code == 200
        assert http.post("/v1/chat/completions", json=chat("!error:0!")).status_code == 500
        response = http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        assert set(EXPECTED) <= set(families)
        labels = {sample.labels["model_name"] for family in families.values() for sample in family.samples}
        assert labels == {'odd "name"\\n'}
        page = samples(response.text)

    def value(name: str, **labels: str) -> float:
        return page[(name, frozenset(labels.items()))]

    assert value("vllm:request_success_total", finished_reason="stop") == 6
    assert value("vllm:request_success_total", finished_reason="length") == 1
    assert value("vllm:request_success_total", finished_reason="error") == 1
    assert value("vllm:generation_tokens_total") == 6 * 7 + 2
    assert value("vllm:request_generation_tokens_sum") == 6 * 7 + 2
    assert value("vllm:time_to_first_token_seconds_count") == 7
    # Every token after those of a first output has one gap.
    assert value("vllm:inter_token_latency_seconds_count") == 6 * 5
    assert value("vllm:request_params_n_count") == 5
    assert value("vllm:request_params_n_sum") == 3 * 2 + 2
    assert value("vllm:iteration_tokens_total_count") == 9
    assert value("vllm:iteration_tokens_total_bucket", le="8") == 6
    assert value("vllm:iteration_tokens_total_sum") == 77
    assert value("vllm:request_queue_time_seconds_sum") == pytest.approx(0.007)
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0") == 2
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="3") == 1
    assert value("foretoken:block_length_rounds_total", block_length="4") == 2
    assert value("foretoken:up") == 1
    cache = next(labels for name, labels in page if name == "vllm:cache_config_info")
    assert {("block_size", "32"), ("num_gpu_blocks", "64")} <= cache


def test_head_is_answered_and_no_label_holds_client_text(http: httpx.Client) -> None:
    assert http.head("/metrics").status_code == 200
    http.post("/v1/chat/completions", json=chat("secret words", user="somebody"))
    http.get("/some-odd-path")
    page = http.get("/metrics").text
    assert not [word for word in ("secret", "somebody", "some-odd-path") if word in page]


def test_a_histogram_is_cumulative_with_inclusive_bounds() -> None:
    histogram = Histogram((1, 2.5))
    for value in (1, 1.5, 2.5, 99):
        histogram.observe(value)
    histogram.observe(0.5, times=2)
    page = Page({"model_name": 'a"b\\c\nd'})
    page.histogram("t", "help", histogram)
    page.gauge("inf", "help", math.inf)
    found = samples(page.render())
    assert found[("t_bucket", frozenset({("le", "1")}))] == 3
    assert found[("t_bucket", frozenset({("le", "2.5")}))] == 5
    assert found[("t_bucket", frozenset({("le", "+Inf")}))] == found[("t_count", frozenset())] == 6
    assert found[("t_sum", frozenset())] == 1 + 1.5 + 2.5 + 99 + 1
    assert found[("inf", frozenset())] == math.inf


def test_a_page_before_the_engine_is_ready_parses() -> None:
    from serve.api.metrics import ServerMetrics, metrics_page

    page = metrics_page("m", {}, EngineStats(), ServerMetrics(), rejected=0, restarts=0, up=False)
    assert samples(page)[("foretoken:up", frozenset())] == 0
