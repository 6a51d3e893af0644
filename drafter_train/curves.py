"""Draws training metrics: ``python -m drafter_train.curves STEM NAME=metrics.jsonl ...`` writes STEM-loss.png and
STEM-acceptance.png. A name given twice continues the curve: the second run's steps count on from the first's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def read_points(path: Path, after: int) -> tuple[list[tuple[int, float, float]], list[tuple[int, float]], int]:
    """(step, loss, acceptance length of training blocks), (step, evaluated acceptance length), and the last step; all
    counted on from ``after``. Lines that a kill cut short are skipped."""
    training: list[tuple[int, float, float]] = []
    evaluated: list[tuple[int, float]] = []
    last = after
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        last = after + int(record["step"])
        if "eval" in record:
            evaluated.append((last, record["eval"]["acceptance_length"]))
        else:
            training.append((last, record["loss"], 1 + record["accepted"]))
    return training, evaluated, last


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.curves", description=__doc__)
    parser.add_argument("stem", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=METRICS")
    args = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ends: dict[str, int] = {}
    loss_figure, loss_axes = plt.subplots(figsize=(7, 4), layout="constrained")
    tau_figure, tau_axes = plt.subplots(figsize=(7, 4), layout="constrained")
    colours: dict[str, str] = {}
    for run in args.runs:
        name, equals, path = run.partition("=")
        if not equals:
            parser.error(f"runs are NAME=METRICS, got {run!r}")
        try:
            training, evaluated, last = read_points(Path(path), ends.get(name, 0))
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{run}: {error}")
        colour = colours.setdefault(name, f"C{len(colours)}")
        label = name if name not in ends else None
        ends[name] = last
        steps = [point[0] for point in training]
        loss_axes.plot(steps, [point[1] for point in training], label=label, color=colour)
        tau_axes.plot(steps, [point[2] for point in training], label=label, color=colour, alpha=0.5)
        tau_axes.plot([p[0] for p in evaluated], [p[1] for p in evaluated], "o", color=colour)
    for axes, what in ((loss_axes, "weighted loss"), (tau_axes, "acceptance length")):
        axes.set_xlabel("step")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
        axes.legend()
    loss_axes.set_yscale("log")
    tau_axes.set_title("lines: blocks of the training batches; dots: chains over held-out responses", fontsize=9)
    loss_figure.savefig(f"{args.stem}-loss.png", dpi=110)
    tau_figure.savefig(f"{args.stem}-acceptance.png", dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
