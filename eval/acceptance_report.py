"""``python -m eval.acceptance_report``: the acceptance analysis of a trace folder as text, JSON and one HTML page.

It only arranges what ``eval.acceptance`` computes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.acceptance import against, calibration, read_traces, report, select
from eval.json_report import write_report
from eval.options import new_file
from eval.plots import calibration_figure, histogram_figure, intervals_figure, position_figure
from eval.report import heading, page, paragraph, picture

CONVENTIONS = (
    "Length counts the target's own token, rate does not; each request's last round is left out because an end token "
    "or the length limit may have cut it; intervals of means resample whole prompts. Survival of late positions is "
    "flattered where the server drafts far only when it expects success; the product of conditionals is not."
)


def lines(result: Mapping[str, Any]) -> list[str]:
    """The analysis as text."""
    length, rate = result["acceptance_length_per_round"], result["acceptance_rate"]
    own = result["acceptance_length_per_request"]
    text = [
        f"{result['requests']} requests, {result['rounds']} drafting rounds, {result['plain_rounds']} plain steps",
        f"acceptance length {length['value']:.3f} per round ({length['low']:.3f} .. {length['high']:.3f}), "
        f"{own['value']:.3f} per request ({own['low']:.3f} .. {own['high']:.3f})",
        f"acceptance rate {rate['value']:.1%} ({rate['low']:.1%} .. {rate['high']:.1%})",
        "position  survival  conditional  product  rounds",
    ]
    for row in result["by_position"]:
        survival, conditional = row["survival"]["value"], row["conditional"]["value"]
        text.append(
            f"{row['position']:8d}  {survival:8.3f}  {conditional:11.3f}  {row['product']:7.3f}  {row['rounds']:6d}"
        )
    text += [f"{name}: {row['value']:.3f} ({row['low']:.3f} .. {row['high']:.3f})"
             for name, row in result["by_category"].items()]  # fmt: skip
    return [*text, CONVENTIONS]


def read_labels(path: Path) -> dict[str, str]:
    """The category of each reply's id. ValueError when the file is something else."""
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise ValueError(f"--categories {path} is not JSON: {fault}") from fault
    if not isinstance(labels, dict):
        raise ValueError(f"--categories {path} must be an object from the id of a reply to its category")
    return {name: str(label) for name, label in labels.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.acceptance_report", description=__doc__)
    parser.add_argument("traces", type=Path, help="trace folder or JSONL file of a server")
    parser.add_argument("--source", help="only rounds of this proposer (block, lookup)")
    parser.add_argument("--categories", type=Path, help="JSON object from the id of a reply to its category")
    parser.add_argument("--html", type=new_file, help="write a page here")
    parser.add_argument("--json", type=new_file, help="write the numbers here")
    args = parser.parse_args(argv)
    try:
        labels = read_labels(args.categories) if args.categories else None
        traces = select(read_traces(args.traces, labels), args.source)
        result = report(traces)
    except (OSError, ValueError) as fault:
        print(fault, file=sys.stderr)
        return 1
    print("\n".join(lines(result)))
    if args.json:
        write_report(args.json, result)
    if args.html:
        places = {name: value.to_json() for name, value in against(traces, "answer_position", (1, 33, 129)).items()}
        figures = [
            (position_figure(result["by_position"], "Wilson 95 % bands"), "acceptance by position"),
            (histogram_figure(result["histogram"], "last rounds left out"), "acceptance length"),
            (intervals_figure(result["by_category"], "By category"), "acceptance length by category"),
            (intervals_figure(places, "By place in the answer"), "acceptance length by place in the answer"),
        ]
        rows = calibration(traces)
        if rows:
            figures.append((calibration_figure(rows), "share kept by the drafter's confidence"))
        parts = [heading("Acceptance", 1), *(paragraph(line) for line in lines(result)[:3]), paragraph(CONVENTIONS)]
        parts += [picture(figure, alt) for figure, alt in figures]
        args.html.write_text(page("Acceptance", parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
