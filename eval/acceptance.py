"""What a server's traces say about drafting: by position, length, category, place in the answer, and block length.

Reads the JSON lines that ``--trace-dir`` writes (one per finished request; ``rounds`` are [source, drafted, accepted]).
Conventions: the acceptance *length* of a round counts the target's own token (accepted + 1), the acceptance *rate* does
not. Rounds that drafted nothing are plain decoding and take no part. Intervals over means resample whole prompts. It
draws nothing and knows no server.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.roofline import speculative_speedup
from eval.stats import Interval, bootstrap_interval, wilson


@dataclass(frozen=True)
class Round:
    """One draft: who made it, tokens drafted and kept, tokens of the answer and of the context before it.

    ``cut`` marks a request's last round: an end token or the length limit may have cut it short of what would have
    been accepted. ``confidence`` holds the drafter's probability of each drafted token where the trace has it.
    """

    source: str
    drafted: int
    accepted: int
    answer_position: int
    context: int
    cut: bool
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True)
class Trace:
    """One finished request with its drafting rounds (those that drafted something)."""

    id: str
    category: str
    temperature: float
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    decode_seconds: float
    plain_rounds: int
    rounds: tuple[Round, ...] = field(default=())


def read_traces(path: str | Path, categories: Mapping[str, str] | None = None) -> list[Trace]:
    """Traces of a JSONL file or of every ``*.jsonl`` in a folder. ``categories`` maps ids of replies to labels; a
    line may also carry its own ``category``. A last line without its end, of a server that is writing it or was killed,
    is left out; any other that is not a trace is a ValueError naming file and line."""
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    traces: list[Trace] = []
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True), 1):
            if line.strip():
                try:
                    traces.append(_trace(json.loads(line), categories or {}))
                except (ValueError, KeyError, TypeError, AttributeError, IndexError) as fault:
                    if isinstance(fault, ValueError) and not line.endswith(b"\n"):
                        continue
                    raise ValueError(f"{file.name} line {number} is not a trace: {fault!r}") from fault
    if not traces:
        raise ValueError(f"no traces in {path}")
    return traces


def _trace(line: Mapping[str, Any], categories: Mapping[str, str]) -> Trace:
    prompt, done, plain = int(line["prompt_tokens"]), 1, 0
    rounds: list[Round] = []
    confidences = line.get("confidences") or [()] * len(line["rounds"])
    for index, (source, drafted, accepted) in enumerate(line["rounds"]):
        if accepted > drafted:
            raise ValueError(f"round {index} kept {accepted} of {drafted} tokens")
        if drafted:
            cut = index == len(line["rounds"]) - 1
            sure = tuple(float(value) for value in confidences[index])
            rounds.append(Round(str(source), int(drafted), int(accepted), done, prompt + done, cut, sure))
        else:
            plain += 1
        done += accepted + 1
    return Trace(
        id=str(line["id"]),
        category=str(line.get("category") or _category(str(line["id"]), categories)),
        temperature=float(line.get("temperature", 0.0)),
        prompt_tokens=prompt,
        completion_tokens=int(line["completion_tokens"]),
        finish_reason=str(line["finish_reason"]),
        decode_seconds=float(line.get("decode_seconds") or 0.0),
        plain_rounds=plain,
        rounds=tuple(rounds),
    )


def _category(name: str, categories: Mapping[str, str]) -> str:
    """The label of a trace by its own id, or by its reply's, to which a trace adds the choice: "chatcmpl-7-0"."""
    return categories.get(name) or categories.get(name.rpartition("-")[0]) or "all"


def select(traces: Iterable[Trace], source: str | None = None, keep_cut: bool = False) -> list[Trace]:
    """The same traces with the rounds of one source only and, by default, without cut rounds (they understate)."""
    return [
        Trace(**{**vars(trace), "rounds": tuple(
            item for item in trace.rounds
            if (source is None or item.source == source) and (keep_cut or not item.cut))})
        for trace in traces
    ]  # fmt: skip


def by_position(traces: Iterable[Trace]) -> list[dict[str, Any]]:
    """Per draft position (from 1): ``survival`` = kept among rounds that drafted this far, ``conditional`` = kept among
    those that also kept everything before; each with Wilson's 95 % interval and its number of rounds.

    ``hazard`` (the chance to fail right here) is 1 - conditional. ``product`` multiplies the conditional shares so far:
    the survival of a draft that always goes on. Where the server drafts far only when it expects success, ``survival``
    of late positions is flattered by that choice and ``product`` is the fair one.
    """
    rounds = [item for trace in traces for item in trace.rounds]
    rows: list[dict[str, Any]] = []
    product = 1.0
    for position in range(1, max((item.drafted for item in rounds), default=0) + 1):
        reached = [item for item in rounds if item.drafted >= position]
        alive = [item for item in reached if item.accepted >= position - 1]
        kept = sum(item.accepted >= position for item in reached)
        conditional = wilson(kept, len(alive))
        product *= conditional.value if alive else 0.0
        rows.append({
            "position": position,
            "survival": wilson(kept, len(reached)).to_json(),
            "conditional": conditional.to_json(),
            "product": product,
            "hazard": {"value": 1 - conditional.value, "low": 1 - conditional.high, "high": 1 - conditional.low},
            "rounds": len(reached),
            "alive": len(alive),
        })  # fmt: skip
    return rows


def length_histogram(traces: Iterable[Trace]) -> dict[int, int]:
    """Rounds by acceptance length (accepted + 1)."""
    counts = Counter(item.accepted + 1 for trace in traces for item in trace.rounds)
    return dict(sorted(counts.items()))


def _lengths(trace: Trace) -> list[float]:
    return [item.accepted + 1.0 for item in trace.rounds]


def mean_length(traces: Sequence[Trace], seed: int = 0) -> dict[str, Interval]:
    """Mean acceptance length in both weightings, with bootstrap intervals over prompts.

    ``per_round`` weights every round alike (long answers count more: what the hardware sees); ``per_request`` averages
    the requests' own means (what a user sees).
    """
    groups = [_lengths(trace) for trace in traces if trace.rounds]
    if not groups:
        raise ValueError("no drafting rounds in these traces")

    def per_round(sample: list[Sequence[float]]) -> float:
        return sum(map(sum, sample)) / sum(map(len, sample))

    def per_request(sample: list[Sequence[float]]) -> float:
        return fmean(fmean(group) for group in sample)

    return {
        "per_round": bootstrap_interval(groups, per_round, seed),
        "per_request": bootstrap_interval(groups, per_request, seed),
    }


def acceptance_rate(traces: Iterable[Trace]) -> Interval:
    """Drafted tokens that were kept (the target's own token is in neither count)."""
    rounds = [item for trace in traces for item in trace.rounds]
    return wilson(sum(item.accepted for item in rounds), sum(item.drafted for item in rounds))


def grouped(traces: Iterable[Trace], key: Callable[[Trace], str]) -> dict[str, list[Trace]]:
    """Traces by a label, labels sorted."""
    groups: dict[str, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(key(trace), []).append(trace)
    return dict(sorted(groups.items()))


def by_category(traces: Sequence[Trace], seed: int = 0) -> dict[str, Interval]:
    """Mean acceptance length per round of every category, bootstrapped over its prompts (n differs by category)."""
    return {
        name: mean_length(group, seed)["per_round"]
        for name, group in grouped(traces, lambda trace: trace.category).items()
        if any(trace.rounds for trace in group)
    }


def against(traces: Sequence[Trace], what: str, edges: Sequence[int], seed: int = 0) -> dict[str, Interval]:
    """Mean acceptance length against "answer_position" or "context" in bins [edge, next edge)."""
    if what not in ("answer_position", "context"):
        raise ValueError(f"what must be answer_position or context, got {what!r}")
    result: dict[str, Interval] = {}
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        binned = [
            Trace(**{**vars(trace), "rounds": tuple(
                item for item in trace.rounds
                if getattr(item, what) >= low and (high is None or getattr(item, what) < high))})
            for trace in traces
        ]  # fmt: skip
        if any(trace.rounds for trace in binned):
            label = f"{low}+" if high is None else f"{low}-{high - 1}"
            result[label] = mean_length(binned, seed)["per_round"]
    return result


def calibration(traces: Iterable[Trace], bins: int = 10) -> list[dict[str, Any]]:
    """Drafter confidence against what the target kept: per bin the mean confidence, the share kept and its interval.

    Only tokens whose predecessors were kept are judged: after a rejection there is no verdict. Empty without
    confidences in the trace.
    """
    judged: list[tuple[float, bool]] = []
    for trace in traces:
        for item in trace.rounds:
            seen = min(item.accepted + 1, item.drafted, len(item.confidence))
            judged += [(item.confidence[index], index < item.accepted) for index in range(seen)]
    rows: list[dict[str, Any]] = []
    for index in range(bins):
        low, high = index / bins, (index + 1) / bins
        inside = [pair for pair in judged if low <= pair[0] < high or (index == bins - 1 and pair[0] == 1.0)]
        if inside:
            share = wilson(sum(kept for _, kept in inside), len(inside))
            rows.append({"confidence": fmean(sure for sure, _ in inside), **share.to_json(), "count": len(inside)})
    return rows


def calibration_error(rows: Sequence[Mapping[str, Any]]) -> float:
    """Mean distance of confidence and share kept, weighted by count."""
    total = sum(row["count"] for row in rows)
    return float(sum(abs(row["confidence"] - row["value"]) * row["count"] for row in rows) / total)


@dataclass(frozen=True)
class Costs:
    """Times in plain decode steps: a draft, and a verify of each block length (index 0 is 1.0)."""

    draft: float
    verify: tuple[float, ...]

    def round_cost(self, block_length: int) -> float:
        """Cost of one round; block length 0 is plain decoding and drafts nothing."""
        return (self.draft if block_length else 0.0) + self.verify[min(block_length, len(self.verify) - 1)]


def expected_by_block_length(traces: Iterable[Trace], costs: Costs) -> dict[int, float]:
    """Speed-up against plain decoding of every fixed block length, from the product of conditionals."""
    result = {0: 1.0}
    tau = 1.0
    for row in by_position(traces):
        tau += row["product"]
        length = row["position"]
        if length < len(costs.verify):
            result[length] = speculative_speedup(tau, costs.draft, costs.verify[length])
    return result


def choice_against_oracle(traces: Sequence[Trace], costs: Costs) -> dict[str, float]:
    """Tokens per plain step of the lengths the server chose, of the best fixed length, and of an oracle per round.

    The oracle knows how many tokens each round's draft would keep and verifies exactly those (or drafts nothing).
    """
    rounds = [item for trace in traces for item in trace.rounds]
    if not rounds:
        raise ValueError("no drafting rounds in these traces")
    tokens = sum(item.accepted + 1 for item in rounds)
    chosen = sum(costs.round_cost(item.drafted) for item in rounds)
    oracle_cost = 0.0
    for item in rounds:
        # Plain decoding would take one step for each of the tokens this round kept.
        oracle_cost += min(costs.round_cost(item.accepted) if item.accepted else 1.0, item.accepted + 1.0)
    best = max(expected_by_block_length(traces, costs).values())
    return {"chosen": tokens / chosen, "best_fixed": best, "oracle": tokens / oracle_cost}


def report(traces: Sequence[Trace], seed: int = 0) -> dict[str, Any]:
    """Everything above as one JSON-ready dictionary (the cost-based parts need costs and are left out)."""
    lengths = mean_length(traces, seed)
    return {
        "requests": len(traces),
        "rounds": sum(len(trace.rounds) for trace in traces),
        "plain_rounds": sum(trace.plain_rounds for trace in traces),
        "acceptance_length_per_round": lengths["per_round"].to_json(),
        "acceptance_length_per_request": lengths["per_request"].to_json(),
        "acceptance_rate": acceptance_rate(traces).to_json(),
        "by_position": by_position(traces),
        "histogram": length_histogram(traces),
        "by_category": {name: value.to_json() for name, value in by_category(traces, seed).items()},
    }
