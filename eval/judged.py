"""A sweep's raw points judged: warnings, goodput, knees, the prediction's score, and all of it as text.

It reads a folder of points and runs nothing; what a point's numbers are is known elsewhere, and so is how they look.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.points import dollars_per_million, goodput, knees, lint, summarise
from eval.score import check_seal, score, score_lines, step_lines


def point_name(point: dict[str, Any]) -> str:
    """File name of a point: sweep_c8.json (closed) or sweep_r2.5.json (open)."""
    return f"sweep_{'c' if point['mode'] == 'closed' else 'r'}{point['load']:g}.json"


def load_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run record and its points (closed by concurrency, then open by rate); ValueError if there are none."""
    points = [json.loads(path.read_text()) for path in folder.glob("sweep_*.json")]
    if not points:
        raise ValueError(f"no sweep_*.json in {folder}")
    run = json.loads((folder / "run.json").read_text())
    return run, sorted(points, key=lambda point: (point["mode"], point["load"]))


def point_line(item: dict[str, Any]) -> str:
    """One point in one line."""
    ttft, tpot = item.get("ttft"), item.get("tpot")
    ms = [
        f"{value['p50'] * 1000:8.1f}/{value['p99'] * 1000:<8.1f}" if value else f"{'-':>17}" for value in (ttft, tpot)
    ]
    law = item.get("little")
    hit = "-" if item["hit_rate"] is None else f"{item['hit_rate']:.1%}"
    tau = "-" if item["acceptance_length"] is None else f"{item['acceptance_length']:.2f}"
    return (
        f"{item['mode']:>6} {item['load']:>6g} {item['tokens_per_second']:>10.1f} {item['completed']:>6} "
        f"{ms[0]} {ms[1]} {law['product'] if law else 0:>8.2f} {hit:>7} {tau:>6}"
    )


HEADER = (
    f"{'mode':>6} {'load':>6} {'tok/s':>10} {'done':>6} {'TTFT p50/p99 ms':>17} {'TPOT p50/p99 ms':>17} "
    f"{'L = XW':>8} {'cached':>7} {'tau':>6}"
)


def judge(
    run: dict[str, Any],
    points: Sequence[dict[str, Any]],
    slo_ttft: float,
    slo_tpot: float,
    prediction: dict[str, Any] | None = None,
    dollars_per_hour: float | None = None,
) -> dict[str, Any]:
    """Everything that follows from the raw points: summaries, warnings, goodput, knees, score, price."""
    floor = prediction["predictions"]["prefill_floor"] if prediction else None
    summaries = [summarise(point, slo_ttft, slo_tpot) for point in points]
    closed = [item for item in summaries if item["mode"] == "closed"]
    result: dict[str, Any] = {
        "quick": run["quick"],
        "slo": {"ttft": slo_ttft, "tpot": slo_tpot},
        "summaries": summaries,
        "lints": {point_name(point): lint(point, item, floor) for point, item in zip(points, summaries, strict=True)},
        "goodput": [vars(goodput(closed, which, slo_ttft, slo_tpot)) for which in ("p50", "p99")],
        "knees": knees(closed, [point for point in points if point["mode"] == "closed"]),
    }
    if prediction:
        result["prediction_faults"] = check_seal(prediction, run["started"])
        result["score"] = score(prediction, summaries)
        result["step_parts"] = step_lines(prediction, summaries)
    best = max((item["tokens_per_second"] for item in summaries), default=0.0)
    if dollars_per_hour and best:
        result["dollars_per_million_tokens"] = dollars_per_million(best, dollars_per_hour)
    return result


def report_lines(result: dict[str, Any]) -> list[str]:
    """The judged sweep as text."""
    lines = ["QUICK RUN: points are short; use it to find faults, not to quote numbers"] if result["quick"] else []
    lines += [HEADER, *(point_line(item) for item in result["summaries"])]
    lines += conclusion_lines(result)
    for name, faults in result["lints"].items():
        lines += [f"  {name}: {fault}" for fault in faults]
    lines += [f"PREDICTION NOT VALID: {fault}" for fault in result.get("prediction_faults", ())]
    if "score" in result:
        lines += score_lines(result["score"])
    return lines


def _load(item: dict[str, Any]) -> str:
    """ "C=8" (closed loop) or "2.5/s" (open loop)."""
    return f"C={item['load']:g}" if item["mode"] == "closed" else f"{item['load']:g}/s"


def conclusion_lines(result: dict[str, Any]) -> list[str]:
    """What follows from the points: gaps, goodput, knees, where a step's time went, the price."""
    gaps = [f"{_load(item)} {item['icl_p99'] * 1e3:.1f}" for item in result["summaries"] if item.get("icl_p99")]
    lines = [f"p99 gap between chunks, ms: {', '.join(gaps)}"] if gaps else []
    slo = result["slo"]
    for item in result["goodput"]:
        what = (
            f"goodput, {item['percentile']} of TTFT < {slo['ttft'] * 1000:g} ms and TPOT < {slo['tpot'] * 1000:g} ms: "
        )
        found = item["load"] is not None
        lines.append(what + (f"{item['tokens_per_second']:.1f} tok/s at C={item['load']:g}, raw maximum is "
                             f"{item['gap']:.2f} times that" if found else "no point meets it"))  # fmt: skip
    for item in result["summaries"]:
        if item.get("goodput"):
            good = item["goodput"]
            lines.append(
                f"  {item['mode']} {item['load']:g}: {good['requests_per_second']:.2f} requests/s and "
                f"{good['tokens_per_second']:.1f} tok/s within the SLO ({good['share']:.0%} of the requests)"
            )
    shown = {key: "none" if value is None else f"{value:g}" for key, value in result["knees"].items()}
    lines.append(f"requests wait in the server from C={shown['server_waiting']}; "
                 f"p99 TTFT over twice the median from C={shown['ttft_p99_over_2_p50']}")  # fmt: skip
    lines += result.get("step_parts", ())
    if "dollars_per_million_tokens" in result:
        lines.append(f"${result['dollars_per_million_tokens']:.3f} per million output tokens at the raw maximum")
    return lines
