"""Command lines and result files of two load generators that others wrote: AIPerf and guidellm.

Each lives in a virtual environment of its own and is called as a program on a file of prompts, so that it sends what
our client sends. This file knows their options and the names in their JSON; it runs nothing and judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.agreement import ClientRun
from eval.client import ChatRequest

LATENCIES_AIPERF = {"ttft": ("time_to_first_token", 1e-3), "tpot": ("inter_token_latency", 1e-3)}
LATENCIES_GUIDELLM = {"ttft": ("time_to_first_token_ms", 1e-3), "tpot": ("inter_token_latency_ms", 1e-3)}


@dataclass(frozen=True)
class Load:
    """One run: ``requests`` chats of ``prompt`` tokens answered by ``output`` tokens, ``concurrency`` in flight, after
    ``warmup`` others that nobody measures: connections, worker processes and their first use. Answers are up to
    ``spread`` tokens longer or shorter: where all are equal, the streams keep in step, and one run is a few draws of
    who shares a pass with whom. With a ``rate`` requests start at even spaces, so many a second, whatever is in flight:
    in a closed loop the next one starts as fast as the client notices the end of the last, and comes sooner or later in
    the server's step for that."""

    concurrency: int
    requests: int
    prompt: int
    output: int
    warmup: int = 0
    spread: int = 0
    rate: float = 0.0


@dataclass(frozen=True)
class Tool:
    """How one tool is asked (program, url, model, tokenizer, load, folder) and how its folder is read."""

    command: Callable[[str, str, str, Path, Load, Path], list[str]]
    write: Callable[[Path, Sequence[ChatRequest]], None]
    read: Callable[[Path], ClientRun]


def aiperf_command(program: str, url: str, model: str, tokenizer: Path, load: Load, folder: Path) -> list[str]:
    """An AIPerf run over ``prompts.jsonl`` of ``folder``, in order; AIPerf takes a relative tokenizer folder only."""
    where = ["--model", model, "--url", url, "--tokenizer", tokenizer, "--artifact-dir", folder]
    what = ["--input-file", folder / "prompts.jsonl", "--custom-dataset-type", "single_turn"]
    what += ["--dataset-sampling-strategy", "sequential"]
    amount = ["--request-count", load.requests]
    if load.rate:
        amount += ["--request-rate", load.rate, "--arrival-pattern", "constant", "--workers-max", load.concurrency]
    else:
        amount += ["--concurrency", load.concurrency]
    if load.warmup:  # it goes on in the file where the warm-up ended
        amount += ["--warmup-request-count", load.warmup]
    # It would read the server's metrics and the card's counters beside the load, as no other client here does.
    fixed = ["--endpoint-type", "chat", "--streaming", "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry"]
    for extra in ("temperature:0", "ignore_eos:true"):
        fixed += ["--extra-inputs", extra]
    return [str(part) for part in (program, "profile", *where, *what, *amount, *fixed)]


def write_aiperf(folder: Path, requests: Sequence[ChatRequest]) -> None:
    """The prompts as AIPerf reads them: one single-turn object a line, with the length of its answer."""
    lines = [json.dumps({"text": _text(item), "output_length": item.max_tokens}) for item in requests]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def read_aiperf(folder: Path) -> ClientRun:
    """TTFT, TPOT (seconds, means and medians) and output tokens/s; AIPerf's "inter token latency" is our tpot. Where
    the server drafts, also the means over requests of its speculative-decoding section."""
    exported = _load(folder / "profile_export_aiperf.json", "AIPerf")
    names = {**LATENCIES_AIPERF, "tokens_per_second": ("output_token_throughput", 1.0)}
    drafts = {"acceptance_length": ("spec_decode_acceptance_length", 1.0),
              "acceptance_rate": ("spec_decode_draft_acceptance_rate", 1e-2)}  # fmt: skip
    names |= {ours: pair for ours, pair in drafts.items() if exported.get(pair[0])}
    found = {ours: _number(exported, (theirs, "avg"), "AIPerf") * unit for ours, (theirs, unit) in names.items()}
    for name, (theirs, unit) in LATENCIES_AIPERF.items():
        found[f"{name}_p50"] = _number(exported, (theirs, "p50"), "AIPerf") * unit
    return ClientRun(found, _aiperf_samples(folder / "profile_export.jsonl"))


def _aiperf_samples(path: Path) -> dict[str, tuple[float, ...]]:
    """Every counted request's latencies, from the file of records, where there is one."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    counted = [row["metrics"] for row in lines if row["metadata"]["benchmark_phase"] != "warmup"]
    return {ours: tuple(row[theirs]["value"] * unit for row in counted if theirs in row)
            for ours, (theirs, unit) in LATENCIES_AIPERF.items()}  # fmt: skip


def guidellm_command(program: str, url: str, model: str, tokenizer: Path, load: Load, folder: Path) -> list[str]:
    """A guidellm run over ``prompts.jsonl`` of ``folder``; it sets ``ignore_eos`` itself where a length is given."""
    backend = {"kind": "openai_http", "target": url, "model": model, "request_format": "/v1/chat/completions",
               "extras": {"body": {"temperature": 0}}}  # fmt: skip
    command: list[str] = [program, "run", "--disable-console", "--backend", json.dumps(backend)]
    profile: dict[str, Any] = {"kind": "concurrent", "streams": load.concurrency}
    if load.rate:
        profile = {"kind": "constant", "rate": [load.rate]}
    if load.warmup:
        profile["warmup"] = {"value": load.warmup, "mode": "requests"}
    command += ["--profile", json.dumps(profile)]
    command += ["--constraint", f"kind=max_requests,count={load.warmup + load.requests}"]
    command += ["--data", f"kind=json_file,path={folder / 'prompts.jsonl'}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer.resolve()}"]
    return [*command, "--output", f"kind=json,path={folder / 'guidellm.json'}"]


def write_guidellm(folder: Path, requests: Sequence[ChatRequest]) -> None:
    """The prompts as guidellm reads them, each with the length of its answer."""
    lines = [json.dumps({"prompt": _text(item), "output_tokens_count": item.max_tokens}) for item in requests]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def read_guidellm(folder: Path) -> ClientRun:
    """TTFT, TPOT (seconds, means and medians) and output tokens/s. Its "time per output token" counts the first one
    in."""
    exported = _load(folder / "guidellm.json", "guidellm")
    runs = exported.get("benchmarks") or [{}]
    metrics = runs[0].get("metrics", {})
    totals = metrics.get("request_totals", {})
    if totals.get("errored") or totals.get("incomplete"):
        raise ValueError(f"guidellm: {totals['errored']} requests failed, {totals['incomplete']} were cut off")
    names = {**LATENCIES_GUIDELLM, "tokens_per_second": ("output_tokens_per_second", 1.0)}
    found = {
        ours: _number(metrics, (theirs, "successful", "mean"), "guidellm") * unit
        for ours, (theirs, unit) in names.items()
    }
    for name, (theirs, unit) in LATENCIES_GUIDELLM.items():
        found[f"{name}_p50"] = _number(metrics, (theirs, "successful", "median"), "guidellm") * unit
    rows = runs[0].get("requests", {}).get("successful", ())
    samples = {ours: tuple(row[theirs] * unit for row in rows if row.get(theirs) is not None)
               for ours, (theirs, unit) in LATENCIES_GUIDELLM.items()}  # fmt: skip
    return ClientRun(found, samples)


TOOLS = {
    "aiperf": Tool(aiperf_command, write_aiperf, read_aiperf),
    "guidellm": Tool(guidellm_command, write_guidellm, read_guidellm),
}


def _text(request: ChatRequest) -> str:
    return request.messages[0]["content"]


def _load(path: Path, tool: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{tool} left no {path.name} in {path.parent}")
    return dict(json.loads(path.read_text()))


def _number(tree: Any, path: Sequence[str], tool: str) -> float:
    for name in path:
        if not isinstance(tree, dict) or tree.get(name) is None:
            raise ValueError(f"{tool}'s result has no {path[0]}")
        tree = tree[name]
    return float(tree)
