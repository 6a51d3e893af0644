from __future__ import annotations

from typing import Any

import pytest

from eval.metrics import Sample, deltas, parse_metrics, sample_of
from eval.points import dollars_per_million, goodput, knees, lint, little, little_of, summarise

# Lab note: concurrency, tok/s, TTFT p50/p99 ms, TPOT p50/p99 ms.
NOTE = (
    (1, 88.8, 23, 26, 11.25, 11.27), (2, 175.2, 59, 138, 11.34, 11.41), (4, 339.7, 69, 201, 11.67, 11.81),
    (8, 639.5, 75, 263, 12.40, 12.66), (16, 1139.6, 93, 546, 13.78, 14.40), (32, 1763.3, 140, 1018, 17.68, 18.91),
    (64, 2504.6, 519, 3730, 25.09, 25.44), (128, 3088.2, 678, 8302, 41.00, 41.30),
)  # fmt: skip


def note_summaries() -> list[dict[str, Any]]:
    return [
        {"mode": "closed", "load": c, "tokens_per_second": rate,
         "ttft": {"p50": f50 / 1000, "p99": f99 / 1000}, "tpot": {"p50": t50 / 1000, "p99": t99 / 1000}}
        for c, rate, f50, f99, t50, t99 in NOTE
    ]  # fmt: skip


def row(sent: float, finished: float, **changes: Any) -> dict[str, Any]:
    base = {"outcome": "ok", "error": None, "sent": sent, "finished": finished, "client_wait": 0.0, "ttft": 0.1,
            "tpot": 0.01, "latency": finished - sent, "latency_from_plan": finished - sent, "tokens": 10,
            "usage_tokens": 10, "finish_reason": "length", "prompt_tokens": 100, "cached_tokens": 0,
            "window_tokens": 10}  # fmt: skip
    return {**base, **changes}


def point(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    base = {"mode": "closed", "load": 2.0, "seconds": 200.0, "requests": rows, "counters": {}, "gauges": {}}
    return {**base, **changes}


def steady(count: int, concurrency: int = 2, seconds: float = 200.0, **changes: Any) -> list[dict[str, Any]]:
    """Back-to-back requests that keep ``concurrency`` in flight through the whole window."""
    each = seconds * concurrency / count
    return [row(i // concurrency * each, (i // concurrency + 1) * each - 1e-6, **changes) for i in range(count)]


def faults_of(rows: list[dict[str, Any]], floor: float | None = None, **changes: Any) -> str:
    one = point(rows, **changes)
    return "\n".join(lint(one, summarise(one, 0.5, 0.05), floor))


def test_goodput_of_the_lab_note_depends_on_the_percentile() -> None:
    strict = goodput(note_summaries(), "p99", 0.5, 0.05)
    loose = goodput(note_summaries(), "p50", 0.5, 0.05)
    assert (strict.load, strict.tokens_per_second) == (8, 639.5)
    assert (loose.load, loose.tokens_per_second) == (32, 1763.3)
    assert strict.gap == pytest.approx(4.83, abs=0.005)
    assert loose.gap == pytest.approx(1.75, abs=0.005)
    assert goodput(note_summaries(), "p99", 0.001, 0.05).load is None


def test_a_point_without_a_token_in_its_window_sells_nothing() -> None:
    late = summarise(point([row(0, 1, window_tokens=0)]), 0.5, 0.05)
    assert vars(goodput([late], "p50", 0.5, 0.05)) == {
        "percentile": "p50", "load": None, "tokens_per_second": 0.0, "gap": None
    }  # fmt: skip


def test_ttft_knee_of_the_lab_note_is_measured_at_two() -> None:
    points = [point([], load=c, gauges={"waiting": {"mean": 3.0 if c >= 64 else 0.0, "max": 5.0}}) for c, *_ in NOTE]
    assert knees(note_summaries(), points) == {"server_waiting": 64, "ttft_p99_over_2_p50": 2}


def test_littles_law_on_the_lab_note_drifts_with_medians() -> None:
    values = [little(rate / 1000, f50 / 1000 + 999 * t50 / 1000) for _, rate, f50, _, t50, _ in NOTE]
    assert values == [pytest.approx(v, rel=6e-3) for v in (1.00, 2.00, 3.98, 7.97, 15.8, 31.4, 64.1, 128.6)]


def test_littles_law_holds_for_a_full_closed_loop_and_flags_a_starved_one() -> None:
    law = little_of(steady(400), 200.0)
    assert law is not None
    assert law["product"] == pytest.approx(2.0, rel=1e-3)
    assert law["in_flight"] == pytest.approx(2.0, rel=1e-3)
    slow = [row(0, 190), row(0, 900), row(0, 900), row(0, 900)]
    assert "Little's law off" in faults_of(slow)


def test_a_clean_long_point_with_enough_samples_has_no_warning() -> None:
    assert faults_of(steady(2000)) == ""


def test_each_lint_fires_on_its_seeded_case() -> None:
    assert "dirty cache: 50.0%" in faults_of(steady(2000, cached_tokens=50))
    assert "dirty cache: 20.0%" in faults_of(steady(2000), counters={"prefix_queries": 100.0, "prefix_hits": 20.0})
    assert "hit rate unknown" in faults_of(steady(2000, cached_tokens=None))
    assert "short point" in faults_of(steady(2000, seconds=30.0), seconds=30.0)
    assert "p99 of 400 requests, 1000 needed" in faults_of(steady(400))
    assert "under the compute floor" in faults_of(steady(2000), floor=0.2)
    assert "client-side queueing" in faults_of(steady(2000, client_wait=0.5, latency_from_plan=0.7))
    lag = {"p50": 0.01, "p99": 0.04, "max": 0.1}
    assert "client behind: its event loop was up to 40 ms late" in faults_of(steady(2000), client_lag=lag)
    assert faults_of(steady(2000), client_lag={"p50": 0.0, "p99": 0.002, "max": 0.1}) == ""
    assert "rate not reached" in faults_of(steady(2000), mode="open", load=20.0)
    failed = row(0, 1, outcome="error", error="HTTP 429: slow down")
    said = faults_of([*steady(2000), failed, row(0, 1, outcome="empty")])
    assert "1 errors and 1 empty" in said
    assert "the first: HTTP 429: slow down" in said
    assert "usage is +10.0%" in faults_of(steady(2000, usage_tokens=11))
    assert faults_of(steady(2000, usage_tokens=11, finish_reason="stop")) == ""


def test_errors_and_empty_answers_do_not_touch_the_latencies() -> None:
    bad = row(0, 1, outcome="error", ttft=None, tpot=None, latency=None, window_tokens=0)
    with_bad = summarise(point([*steady(100), bad]), 0.5, 0.05)
    assert with_bad["ttft"] == summarise(point(steady(100)), 0.5, 0.05)["ttft"]
    assert (with_bad["completed"], with_bad["errors"]) == (100, 1)


def test_goodput_counts_requests_and_tokens_within_the_slo() -> None:
    rows = steady(100) + steady(100, ttft=0.6)
    found = summarise(point(rows), 0.5, 0.05)["goodput"]
    assert found["share"] == 0.5
    assert found["requests_per_second"] == pytest.approx(0.5)
    assert found["tokens_per_second"] == pytest.approx(5.0)


def test_acceptance_length_comes_from_the_counters() -> None:
    counters = {"drafts": 10.0, "accepted_tokens": 25.0}
    assert summarise(point(steady(10), counters=counters), 0.5, 0.05)["acceptance_length"] == 3.5
    assert summarise(point(steady(10)), 0.5, 0.05)["acceptance_length"] is None


def test_metric_pages_are_summed_over_labels_and_old_names_are_known() -> None:
    text = (
        '# HELP x y\nvllm:num_requests_running{a="1"} 2\nvllm:num_requests_running{a="2"} 3\n'
        "vllm:gpu_cache_usage_perc 0.5\nbroken line\nvllm:num_preemptions_total 1e2\n"
    )
    assert parse_metrics(text)["vllm:num_requests_running"] == 5
    first = sample_of(text, 1.0)
    assert first.values == {"running": 5, "kv_usage": 0.5, "preemptions": 100}
    second = Sample(2.0, {"preemptions": 103.0, "running": 1.0})
    assert deltas([first, second]) == {"preemptions": 3.0}
    assert deltas([first]) == {}


def test_price_of_a_million_tokens() -> None:
    assert dollars_per_million(1000, 3.6) == pytest.approx(1.0)
