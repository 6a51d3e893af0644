"""A prediction as evidence: sealed with a hash and a time before a run, and set beside what a sweep measured after it.

The hash covers inputs, time and every number, so that a prediction cannot be touched up later without showing. It
predicts nothing and runs nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.json_report import finite


def seal(inputs: dict[str, Any], predictions: dict[str, Any], now: float | None = None) -> dict[str, Any]:
    """The record to write: inputs, predictions, time (UTC seconds) and a SHA-256 over all of them."""
    record = {"time": time.time() if now is None else now, "inputs": inputs, "predictions": predictions}
    return {**record, "sha256": _digest(record)}


def _digest(record: dict[str, Any]) -> str:
    text = json.dumps(finite(record), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load_prediction(path: Path) -> dict[str, Any]:
    """A record of ``seal`` from its file; ValueError when the file is something else."""
    try:
        record = json.loads(path.read_text())
    except ValueError as fault:
        raise ValueError(f"{path} is no prediction: {fault}") from fault
    if not isinstance(record, dict) or not isinstance(record.get("predictions"), dict) or "time" not in record:
        raise ValueError(f"{path} is no prediction of eval.predict: it has no 'predictions' and 'time'")
    return record


def check_seal(record: dict[str, Any], run_started: float) -> list[str]:
    """What is wrong with a prediction as evidence: changed since it was written, or written after the run began."""
    faults = []
    body = {key: value for key, value in record.items() if key != "sha256"}
    if _digest(body) != record.get("sha256"):
        faults.append("the prediction was changed after it was written: its hash does not match")
    if record["time"] >= run_started:
        faults.append("the prediction was written after the run began")
    return faults


def score(record: dict[str, Any], summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicted beside measured with the error in percent, for what the sweep's closed-loop points can tell."""
    predictions = record["predictions"]
    rows: list[dict[str, Any]] = []

    def add(name: str, predicted: float, measured: float | None) -> None:
        error = None if not measured else (predicted / measured - 1) * 100
        rows.append({"what": name, "predicted": predicted, "measured": measured, "error_percent": error})

    closed = {f"{item['load']:g}": item for item in summaries if item["mode"] == "closed"}
    for load, item in closed.items():
        whole = predictions.get("served", {}).get(load)
        if whole:
            add(f"tok/s at C={load}, served", whole["tokens_per_second"], item["tokens_per_second"])
            if item.get("tpot"):
                add(f"TPOT at C={load}, s, mean, served", whole["tpot"], item["tpot"]["mean"])
            if item.get("ttft"):
                add(f"TTFT at C={load}, s, p50, served", whole["ttft_p50"], item["ttft"]["p50"])
        for curve in ("curve", "serving_curve"):
            if load in predictions[curve]:
                name = "decode only" if curve == "curve" else "prefill included"
                add(f"tok/s at C={load}, {name}", predictions[curve][load], item["tokens_per_second"])
    pages = next((item["kv_pages"] for item in summaries if item.get("kv_pages")), None)
    if pages:
        add("KV pages of the server", predictions["kv_pages"], pages)
    if "1" in closed and closed["1"].get("tpot"):
        add("ceiling of one stream, tok/s, decode", predictions["batch_one_ceiling"], 1 / closed["1"]["tpot"]["p50"])
        add("TPOT at C=1, s", predictions["batch_one_tpot"], closed["1"]["tpot"]["p50"])
        add("TTFT at C=1, s", predictions["ttft"], closed["1"]["ttft"]["p50"])
    late = [
        item["load"] for item in closed.values() if item.get("ttft") and item["ttft"]["p99"] > 2 * item["ttft"]["p50"]
    ]
    add("TTFT knee (p99 > 2 p50), concurrency", predictions["ttft_knee"], min(late, default=None))
    return rows


def step_lines(record: dict[str, Any], summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Where the measured time of a token went at each concurrency: weights and KV at peak bandwidth, the prompts of
    others, and the rest."""
    lines = []
    for item in summaries:
        parts = record["predictions"].get("step_parts", {}).get(f"{item['load']:g}")
        if item["mode"] != "closed" or not parts or not item.get("tpot"):
            continue
        known = {name: parts[name] for name in ("weights", "kv", "prefill")}
        cells = {**known, "rest": item["tpot"]["mean"] - sum(known.values())}
        text = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in cells.items())
        lines.append(f"  C={item['load']:g}: {item['tpot']['mean'] * 1e3:.2f} ms a token = {text}")
    return ["where a token's time went, ms:", *lines] if lines else []


def score_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The score as text."""
    lines = [f"{'':44}{'predicted':>12}{'measured':>12}{'error':>12}"]
    for row in rows:
        measured = "-" if row["measured"] is None else f"{row['measured']:.4g}"
        error = "-" if row["error_percent"] is None else f"{row['error_percent']:+.1f} %"
        lines.append(f"{row['what']:44}{row['predicted']:>12.4g}{measured:>12}{error:>12}")
    return lines
