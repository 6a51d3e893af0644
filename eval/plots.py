"""Charts as matplotlib figures: throughput, first-token times, acceptance, expected against measured speed-up.

Takes plain numbers and returns figures; it reads no files and runs nothing. Every axis carries its unit, and every
convention that a reader could mistake is written on the chart.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

ACCEPTANCE_LENGTH = (
    "tokens of a round, the target's own included\nevery round weighs the same\n95 % bootstrap over whole prompts"
)
"""What an acceptance length is on these charts, as the label of its axis."""
_BLUE, _ORANGE, _GREEN, _GREY = "#1f5fa8", "#c8641b", "#2f7d4f", "#777777"


def _figure(title: str, x: str, y: str, width: float = 5.4, height: float = 4.0) -> tuple[Figure, Axes]:
    """An empty chart. Inches that fill a phone's width, so that a point of type is about a pixel there."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
    return figure, axes


def _doubling(axes: Axes, loads: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(loads), [f"{load:g}" for load in loads])


def throughput_figure(
    summaries: Sequence[Mapping[str, Any]], prediction: Mapping[str, Any] | None, title: str = "Throughput"
) -> Figure:
    """Measured tokens/s over concurrency, the predicted curves, the roof and both knees."""
    figure, axes = _figure(title, "requests in flight (closed loop)", "output tokens/s, all streams")
    loads = [item["load"] for item in summaries]
    _doubling(axes, loads)
    axes.plot(loads, [item["tokens_per_second"] for item in summaries], "o-", color=_BLUE, label="measured")
    good = [item.get("goodput", {}).get("tokens_per_second", 0.0) for item in summaries]
    axes.plot(loads, good, ".:", color=_GREEN, label="measured, within the SLO")
    if prediction:
        for name, style, label in (("curve", "--", "predicted, decode only"),
                                   ("serving_curve", "-.", "predicted, prefill included")):  # fmt: skip
            pairs = sorted((float(load), value) for load, value in prediction[name].items())
            pairs = [pair for pair in pairs if not loads or pair[0] <= max(loads)]
            axes.plot([p[0] for p in pairs], [p[1] for p in pairs], style, color=_ORANGE, label=label)
        whole = sorted((float(load), row["tokens_per_second"]) for load, row in prediction.get("served", {}).items())
        whole = [pair for pair in whole if not loads or pair[0] <= max(loads)]
        if whole:
            axes.plot([p[0] for p in whole], [p[1] for p in whole], "-", color=_ORANGE, label="predicted, served")
        text = f"half saturation B = {prediction['half_saturation']:.0f}; {prediction['knee_text']}"
        axes.text(0.98, 0.03, text, transform=axes.transAxes, ha="right", fontsize=8, color=_GREY)
        for name, value in (("naive knee", prediction["naive_knee"]), ("knee", prediction["knee"])):
            if value and loads and value <= 2 * max(loads):
                axes.axvline(value, color=_GREY, linestyle=":")
                axes.text(
                    value,
                    0.5,
                    f" {name}",
                    transform=axes.get_xaxis_transform(),
                    rotation=90,
                    va="center",
                    fontsize=8,
                    color=_GREY,
                )
    axes.set_ylim(bottom=0)
    if prediction and prediction.get("served") and summaries:
        # What memory traffic alone would allow leaves the frame: it would press everything else to the floor.
        highest = max(*(item["tokens_per_second"] for item in summaries), *(value for _, value in whole))
        axes.set_ylim(0, 1.6 * highest)
    axes.legend(fontsize=8, loc="upper left")
    return figure


def ttft_figure(
    summaries: Sequence[Mapping[str, Any]],
    knee: float | None = None,
    served: Mapping[str, Mapping[str, float]] | None = None,
) -> Figure:
    """TTFT p50 and p99 over concurrency, the p50 predicted for the served loop; the predicted knee is where p99 should
    pass twice the median."""
    figure, axes = _figure("Time to first token", "requests in flight (closed loop)", "TTFT, ms")
    have = [item for item in summaries if item.get("ttft")]
    loads = [item["load"] for item in have]
    _doubling(axes, loads)
    for which, colour in (("p50", _BLUE), ("p99", _ORANGE)):
        axes.plot(loads, [item["ttft"][which] * 1000 for item in have], "o-", color=colour, label=which)
    at = sorted(float(load) for load in served or {} if loads and float(load) <= max(loads))
    if served and at:
        axes.plot(at, [served[f"{load:g}"]["ttft_p50"] * 1000 for load in at], "--", color=_GREY, label="p50 predicted")
    if knee is not None and loads and knee <= max(loads):
        axes.axvline(knee, color=_GREY, linestyle=":", label=f"predicted: p99 > 2 p50 from {knee:g}")
    axes.set_yscale("log")
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.legend(fontsize=8)
    return figure


def gauges_figure(points: Sequence[Mapping[str, Any]]) -> Figure:
    """What the server said of itself: mean running and waiting requests, and KV use, over concurrency."""
    figure, axes = _figure("Inside the server", "requests in flight (closed loop)", "requests (mean over the point)")
    loads = [point["load"] for point in points]
    _doubling(axes, loads)
    for name, colour in (("running", _BLUE), ("waiting", _ORANGE)):
        axes.plot(loads, [(point["gauges"][name] or {}).get("mean", float("nan")) for point in points], "o-",
                  color=colour, label=name)  # fmt: skip
    share = axes.twinx()
    share.plot(loads, [(point["gauges"]["kv_usage"] or {}).get("max", float("nan")) for point in points], "s:",
               color=_GREEN, label="KV use, largest (right)")  # fmt: skip
    share.set_ylim(0, 1.05)
    lines = [*axes.get_lines(), *share.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], fontsize=8)
    return figure


def position_figure(positions: Sequence[Mapping[str, Any]], note: str) -> Figure:
    """Acceptance by draft position: unconditional survival and conditional hazard, each with Wilson bands."""
    figure, axes = _figure("Acceptance by draft position", "position in the draft (1 = first)", "share", height=5.0)
    for name, colour, label in (("survival", _BLUE, "survival: kept, of all rounds that drafted this far"),
                                ("conditional", _ORANGE, "conditional: kept, given all before were kept")):  # fmt: skip
        have = [row for row in positions if row[name]["value"] == row[name]["value"]]
        at = [row["position"] for row in have]
        axes.plot(at, [row[name]["value"] for row in have], "o-", color=colour, label=label)
        axes.fill_between(at, [row[name]["low"] for row in have], [row[name]["high"] for row in have],
                          color=colour, alpha=0.15)  # fmt: skip
    axes.plot([row["position"] for row in positions], [row["product"] for row in positions], ":", color=_GREY,
              label="product of conditionals: survival had every round gone on")  # fmt: skip
    axes.set_ylim(0, 1.02)
    note = f"drafted tokens only, the target's own not counted; {note}"
    figure.legend(fontsize=8, title=note, title_fontsize=8, loc="outside lower center")
    return figure


def histogram_figure(counts: Mapping[int, int], note: str) -> Figure:
    """Rounds by acceptance length (tokens kept, the target's own included)."""
    label = "tokens kept in a round, the target's own included"
    figure, axes = _figure("Acceptance length", label, "share of rounds, each weighs the same")
    total = sum(counts.values()) or 1
    keys = sorted(counts)
    axes.bar(keys, [counts[key] / total for key in keys], color=_BLUE)
    axes.text(0.98, 0.95, note, transform=axes.transAxes, ha="right", va="top", fontsize=8, color=_GREY)
    return figure


def intervals_figure(rows: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """The acceptance length with its interval for each name (categories, prompt lengths, positions in the answer)."""
    figure, axes = _figure(title, ACCEPTANCE_LENGTH, "", height=1.6 + 0.42 * max(2, len(rows)))
    names = list(rows)
    for index, name in enumerate(names):
        row = rows[name]
        axes.errorbar(row["value"], index, xerr=[[row["value"] - row["low"]], [row["high"] - row["value"]]], fmt="o",
                      color=_BLUE, capsize=3)  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    return figure


def calibration_figure(rows: Sequence[Mapping[str, float]]) -> Figure:
    """How often a drafted token was kept, over the drafter's own confidence in it, with Wilson intervals."""
    figure, axes = _figure("Calibration of the drafter", "the drafter's confidence in a token (mean of the bin)",
                           "share kept, of tokens whose predecessors were kept")  # fmt: skip
    at = [row["confidence"] for row in rows]
    spread = [[row["value"] - row["low"] for row in rows], [row["high"] - row["value"] for row in rows]]
    axes.plot([0, 1], [0, 1], ":", color=_GREY, label="calibrated")
    axes.errorbar(at, [row["value"] for row in rows], yerr=spread, fmt="o", color=_BLUE, capsize=3,
                  label="kept, Wilson 95 %; every token weighs the same")  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, loc="upper left")
    return figure


def speedup_figure(
    expected: Mapping[str, Mapping[str, float]], measured: Mapping[str, Mapping[str, float]] | None = None
) -> Figure:
    """Expected speed-up over block length for each batch size, and what was measured where there is a measurement."""
    figure, axes = _figure("Speed-up against plain decoding", "block length (drafted tokens verified in a round)",
                           "speed-up, plain decoding = 1")  # fmt: skip
    colours = (_BLUE, _ORANGE, _GREEN, _GREY)
    for index, (batch, row) in enumerate(expected.items()):
        colour = colours[index % len(colours)]
        at = sorted(row, key=int)
        axes.plot(
            [int(key) for key in at], [row[key] for key in at], "--", color=colour, label=f"expected, batch {batch}"
        )
        if measured and batch in measured:
            seen = sorted(measured[batch], key=int)
            axes.plot([int(key) for key in seen], [measured[batch][key] for key in seen], "o", color=colour,
                      label=f"measured, batch {batch}")  # fmt: skip
    axes.axhline(1.0, color=_GREY, linewidth=1)
    note = "tokens of a round over its time; the target's own token included"
    axes.legend(fontsize=8, title=note, title_fontsize=8)
    return figure


def png(figure: Figure, dpi: int = 130) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def data_uri(figure: Figure) -> str:
    """The figure as a data URI for a page without a network."""
    return "data:image/png;base64," + base64.b64encode(png(figure)).decode("ascii")
