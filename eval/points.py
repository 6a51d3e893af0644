"""From the requests of one sweep point to its numbers, its consistency checks and its warnings; goodput over points.

Works on plain dictionaries (the raw JSON of a point), so that everything can be computed again without a run. It knows
no server and draws nothing. Times are seconds, rates per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from eval.client import Measurement, was_buffered
from eval.metrics import Sample, deltas, gauge_stats
from eval.stats import percentile, samples_needed

MIN_SECONDS = 180.0
DIRTY_SHARE = 0.01
LITTLE_TOLERANCE = 0.05
WAIT_SHARE = 0.05
MAX_LAG = 0.005


@dataclass(frozen=True)
class Window:
    """The measured stretch of a point on ``time.perf_counter``; the drain after it does not count as load."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def request_row(item: Measurement, window: Window) -> dict[str, Any]:
    """One request as it is kept in the raw JSON; times relative to the window's start."""
    return {
        "outcome": item.outcome,
        "error": item.error,
        "sent": item.sent_at - window.start,
        "finished": item.finished_at - window.start,
        "client_wait": item.client_wait,
        "ttft": item.ttft,
        "tpot": item.tpot,
        "latency": item.latency,
        "latency_from_plan": item.latency_from_plan,
        "tokens": item.tokens,
        "usage_tokens": item.usage_tokens,
        "finish_reason": item.finish_reason,
        "prompt_tokens": item.prompt_tokens,
        "cached_tokens": item.cached_tokens,
        "window_tokens": sum(window.start <= at < window.end for at in item.token_times),
        "chunks": len(item.icl) + 1 if item.outcome == "ok" else 0,
        "icl_p50": percentile(item.icl, 50) if item.icl else None,
        "icl_max": max(item.icl) if item.icl else None,
        "buffered": was_buffered(item),
    }


def point_of(
    label: dict[str, Any], items: Sequence[Measurement], samples: Sequence[Sample], window: Window
) -> dict[str, Any]:
    """The raw record of one point: its label (mode, load, seed, shape), every request, every scrape."""
    gaps = [gap for item in items for gap in item.icl]
    amortised = [gap for item in items for gap in item.itl_amortised]
    # Gauges are those under load: not of the moment before it, nor of the drain after it.
    loaded = [sample for sample in samples if window.start <= sample.time < window.end]
    return {
        **label,
        "seconds": window.seconds,
        "requests": [request_row(item, window) for item in items],
        "scrapes": [{"time": sample.time - window.start, **sample.values} for sample in samples],
        "icl": _quantiles(gaps),
        "itl_amortised": _quantiles(amortised),
        "counters": deltas(samples),
        "gauges": {name: gauge_stats(loaded, name) for name in ("running", "waiting", "kv_usage")},
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"p50": percentile(values, 50), "p90": percentile(values, 90), "p99": percentile(values, 99),
            "max": max(values), "count": float(len(values))}  # fmt: skip


def summarise(point: dict[str, Any], slo_ttft: float, slo_tpot: float) -> dict[str, Any]:
    """The numbers of a point. Errors and empty answers are counted and take no part in any latency."""
    rows = point["requests"]
    good = [row for row in rows if row["outcome"] == "ok"]
    seconds = point["seconds"]
    summary: dict[str, Any] = {
        "mode": point["mode"],
        "load": point["load"],
        "completed": len(good),
        "errors": sum(row["outcome"] == "error" for row in rows),
        "empty": sum(row["outcome"] == "empty" for row in rows),
        "tokens_per_second": sum(row["window_tokens"] for row in rows) / seconds,
        "hit_rate": hit_rate(point),
        "acceptance_length": acceptance_length(point),
        "preemptions": point["counters"].get("preemptions"),
        "kv_pages": next((sample["kv_pages"] for sample in point.get("scrapes", ()) if "kv_pages" in sample), None),
        "icl_p99": (point.get("icl") or {}).get("p99"),
    }
    for name in ("ttft", "tpot", "latency", "latency_from_plan"):
        values = [row[name] for row in good if row[name] is not None]
        if values:
            summary[name] = {"mean": fmean(values), "p50": percentile(values, 50), "p99": percentile(values, 99)}
    if good:
        summary["client_wait_mean"] = fmean(row["client_wait"] for row in good)
        summary["little"] = little_of(good, seconds)
        met = [row for row in good if _meets(row, slo_ttft, slo_tpot)]
        summary["goodput"] = {
            "requests_per_second": sum(0 <= row["finished"] < seconds for row in met) / seconds,
            "tokens_per_second": sum(row["window_tokens"] for row in met) / seconds,
            "share": len(met) / len(good),
        }
        if point["mode"] == "open":
            summary["rate_reached"] = sum(0 <= row["sent"] < seconds for row in good) / seconds
    concurrency = point["load"] if point["mode"] == "closed" else None
    if concurrency:
        summary["tokens_per_second_per_stream"] = summary["tokens_per_second"] / concurrency
    return summary


def _meets(row: dict[str, Any], slo_ttft: float, slo_tpot: float) -> bool:
    return bool(row["ttft"] <= slo_ttft and (row["tpot"] is None or row["tpot"] <= slo_tpot))


def little(arrivals_per_second: float, mean_seconds: float) -> float:
    """Mean number in the system that Little's law gives: L = X W, with the *mean* time in the system."""
    return arrivals_per_second * mean_seconds


def little_of(good: Sequence[dict[str, Any]], seconds: float) -> dict[str, float] | None:
    """Little's law on the window: what X W says beside what was really in flight. None if nothing finished in it."""
    inside = [row for row in good if 0 <= row["finished"] < seconds]
    if not inside:
        return None
    product = little(len(inside) / seconds, fmean(row["latency"] for row in inside))
    overlap = sum(max(0.0, min(row["finished"], seconds) - max(row["sent"], 0.0)) for row in good)
    return {"product": product, "in_flight": overlap / seconds, "ratio": product / (overlap / seconds)}


def hit_rate(point: dict[str, Any]) -> float | None:
    """Share of prompt tokens served from the prefix cache: the server's counters, else the usage of the answers."""
    queries = point["counters"].get("prefix_queries")
    if queries:
        return float(point["counters"].get("prefix_hits", 0.0) / queries)
    told = [row for row in point["requests"] if row["cached_tokens"] is not None and row["prompt_tokens"]]
    if not told:
        return None
    return float(sum(row["cached_tokens"] for row in told) / sum(row["prompt_tokens"] for row in told))


def acceptance_length(point: dict[str, Any]) -> float | None:
    """Tokens kept per round, the target's own included, from the server's counters; None without speculation."""
    drafts = point["counters"].get("drafts")
    return 1 + point["counters"].get("accepted_tokens", 0.0) / drafts if drafts else None


def lint(point: dict[str, Any], summary: dict[str, Any], prefill_floor: float | None = None) -> list[str]:
    """Reasons not to trust a point, each in one sentence."""
    found: list[str] = []
    rate = summary["hit_rate"]
    if rate is not None and rate > DIRTY_SHARE:
        found.append(f"dirty cache: {rate:.1%} of the prompt tokens came from the prefix cache")
    if rate is None:
        found.append("prefix-cache hit rate unknown: the server reports neither counters nor cached tokens")
    if point["seconds"] < MIN_SECONDS:
        found.append(f"short point: {point['seconds']:.0f} s is under {MIN_SECONDS:.0f} s")
    for q, name in ((50, "median"), (99, "p99")):
        if summary["completed"] < samples_needed(q):
            found.append(f"too few samples: {name} of {summary['completed']} requests, {samples_needed(q)} needed")
    ttft = summary.get("ttft")
    if ttft and prefill_floor is not None and ttft["p50"] < prefill_floor:
        found.append(
            f"TTFT under the compute floor: median {ttft['p50'] * 1000:.0f} ms, a cold prefill takes at least "
            f"{prefill_floor * 1000:.0f} ms"
        )
    latency = summary.get("latency")
    if latency and summary["client_wait_mean"] > WAIT_SHARE * latency["mean"]:
        found.append(
            f"client-side queueing: requests waited {summary['client_wait_mean']:.2f} s in the client on average; "
            f"latency from the planned start is {summary['latency_from_plan']['mean']:.2f} s"
        )
    if summary.get("rate_reached") is not None and summary["rate_reached"] < 0.95 * point["load"]:
        found.append(f"rate not reached: {summary['rate_reached']:.2f}/s of {point['load']:g}/s asked")
    lag = point.get("client_lag")
    if lag and lag["p99"] > MAX_LAG and ttft and lag["p99"] > WAIT_SHARE * ttft["p50"]:
        found.append(
            f"client behind: its event loop was up to {lag['p99'] * 1000:.0f} ms late (p99), which is in TTFT and in "
            "the gaps between chunks; more client processes or a freer machine are needed"
        )
    law = summary.get("little")
    if law and abs(law["ratio"] - 1) > LITTLE_TOLERANCE:
        found.append(
            f"Little's law off by {law['ratio'] - 1:+.1%}: {law['product']:.2f} against {law['in_flight']:.2f}"
        )
    if summary["errors"] or summary["empty"]:
        first = next((row["error"] for row in point["requests"] if row.get("error")), None)
        found.append(
            f"{summary['errors']} errors and {summary['empty']} empty answers, kept out of the latencies"
            + (f"; the first: {first}" if first else "")
        )
    held = sum(row.get("buffered", False) for row in point["requests"])
    if held:
        found.append(
            f"buffered stream: {held} of {summary['completed']} answers came all at once or in large pieces, held back "
            "by the server or a proxy before it: TTFT, TPOT and the gaps between chunks are not the server's"
        )
    mismatch = usage_mismatch(point)
    if mismatch is not None and abs(mismatch) > 0.02:
        found.append(f"token counts differ: the server's usage is {mismatch:+.1%} off the re-tokenised text")
    return found


def usage_mismatch(point: dict[str, Any]) -> float | None:
    """Server's completion tokens over re-tokenised ones, minus 1; None where the server tells nothing.

    An answer that ended by itself may count its end token, which is not in the text: that one is allowed for.
    """
    told = [row for row in point["requests"] if row["outcome"] == "ok" and row["usage_tokens"]]
    counted = sum(row["tokens"] for row in told)
    said = sum(row["usage_tokens"] - (row["usage_tokens"] > row["tokens"] and row["finish_reason"] == "stop")
               for row in told)  # fmt: skip
    return float(said / counted - 1) if counted else None


@dataclass(frozen=True)
class Goodput:
    """The most a provider could sell under the SLO when it holds for one percentile, and the gap to the raw maximum."""

    percentile: str
    load: float | None
    tokens_per_second: float
    gap: float | None


def goodput(summaries: Sequence[dict[str, Any]], which: str, slo_ttft: float, slo_tpot: float) -> Goodput:
    """Best point of one mode whose ``which`` ("p50" or "p99") of TTFT and TPOT meets the SLO."""
    best = max((item["tokens_per_second"] for item in summaries), default=0.0)
    meeting = [item for item in summaries
               if item["tokens_per_second"] > 0 and item.get("ttft") and item["ttft"][which] < slo_ttft
               and (not item.get("tpot") or item["tpot"][which] < slo_tpot)]  # fmt: skip
    if not meeting:
        return Goodput(which, None, 0.0, None)
    chosen = max(meeting, key=lambda item: float(item["tokens_per_second"]))
    return Goodput(which, chosen["load"], chosen["tokens_per_second"], best / chosen["tokens_per_second"])


def knees(summaries: Sequence[dict[str, Any]], points: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Least load at which requests wait in the server, and at which p99 TTFT passes twice its median."""
    waiting = [point["load"] for point in points if (point["gauges"].get("waiting") or {}).get("mean", 0) > 0.5]
    late = [item["load"] for item in summaries if item.get("ttft") and item["ttft"]["p99"] > 2 * item["ttft"]["p50"]]
    return {"server_waiting": min(waiting, default=None), "ttft_p99_over_2_p50": min(late, default=None)}


def dollars_per_million(tokens_per_second: float, dollars_per_hour: float) -> float:
    """Price of a million output tokens."""
    return dollars_per_hour / (tokens_per_second * 3600) * 1e6
