"""One self-contained HTML page per sweep, readable on a phone and without a network, and the same charts as PNG files.

It only arranges numbers that were judged elsewhere.
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eval.judged import conclusion_lines
from eval.plots import data_uri, gauges_figure, png, speedup_figure, throughput_figure, ttft_figure

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
h1, h2 { line-height: 1.2; }
img { max-width: 100%; height: auto; background: #fff; }
.wide { overflow-x: auto; }
.chart { width: 100%; max-width: 42rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8886; padding: .3rem .6rem; text-align: right; white-space: nowrap; }
.warn { border-left: .3rem solid #c8641b; padding-left: .7rem; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole HTML document; ``parts`` are already HTML."""
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{html.escape(title)}</title>'
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraph(text: str, warn: bool = False) -> str:
    return f"<p{' class=warn' if warn else ''}>{html.escape(text)}</p>"


def picture(figure: Figure, alt: str) -> str:
    """A chart as wide as the screen; charts are drawn narrow, so that their words can be read on a phone."""
    return f'<img class="chart" alt="{html.escape(alt)}" src="{data_uri(figure)}">'


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """A table whose columns are the keys of the first row."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def warnings(lints: Mapping[str, Sequence[str]]) -> list[str]:
    """Each kind of warning once, with the points it is of: "short point: 5 s is under 180 s (all points)"."""
    found: dict[str, dict[str, list[str]]] = {}
    for point, faults in lints.items():
        for fault in faults:
            kind, _, text = fault.partition(": ")
            points = found.setdefault(kind, {}).setdefault(text, [])
            if point not in points:
                points.append(point)
    lines = []
    for kind, texts in found.items():
        parts = [
            f"{text} ({'all points' if len(points) == len(lints) else ', '.join(_short(name) for name in points)})"
            for text, points in texts.items()
        ]
        lines.append(f"{kind}: {'; '.join(parts)}" if any(texts) else f"{kind} {parts[0].strip()}")
    return lines


def _short(point: str) -> str:
    """ "sweep_c8.json" as "c8"."""
    return point.removeprefix("sweep_").removesuffix(".json")


def score_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The score as a table: predicted, measured, error."""
    return [
        {
            "what": str(row["what"]),
            "predicted": f"{row['predicted']:.4g}",
            "measured": "-" if row["measured"] is None else f"{row['measured']:.4g}",
            "error": "-" if row["error_percent"] is None else f"{row['error_percent']:+.1f} %",
        }
        for row in rows
    ]


def _milliseconds(value: Mapping[str, float] | None, which: str) -> str:
    return f"{value[which] * 1000:.1f}" if value else "-"


def _row(item: Mapping[str, Any]) -> dict[str, str]:
    law = item.get("little")
    return {
        "mode": item["mode"],
        "load": f"{item['load']:g}",
        "tok/s": f"{item['tokens_per_second']:.1f}",
        "done": str(item["completed"]),
        "TTFT p50 ms": _milliseconds(item.get("ttft"), "p50"),
        "TTFT p99 ms": _milliseconds(item.get("ttft"), "p99"),
        "TPOT p50 ms": _milliseconds(item.get("tpot"), "p50"),
        "TPOT p99 ms": _milliseconds(item.get("tpot"), "p99"),
        "L = XW": f"{law['product']:.2f}" if law else "-",
        "from cache": "-" if item["hit_rate"] is None else f"{item['hit_rate']:.1%}",
        "tau": "-" if item["acceptance_length"] is None else f"{item['acceptance_length']:.2f}",
        "errors": str(item["errors"] + item["empty"]),
    }


def write_sweep_report(
    folder: Path,
    run: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    prediction: Mapping[str, Any] | None,
) -> Path:
    """Writes report.html and the charts as PNG into ``folder``; returns the page."""
    predicted = prediction["predictions"] if prediction else None
    closed = [item for item in result["summaries"] if item["mode"] == "closed"]
    label = " (QUICK RUN)" if result["quick"] else ""
    figures: dict[str, tuple[Figure, str]] = {}
    if closed:
        knee = predicted["ttft_knee"] if predicted else None
        figures["throughput"] = throughput_figure(closed, predicted, "Throughput" + label), "throughput by concurrency"
        served = predicted.get("served") if predicted else None
        figures["ttft"] = ttft_figure(closed, knee, served), "time to first token by concurrency"
        inside = [point for point in points if point["mode"] == "closed"]
        if any(point["gauges"]["running"] for point in inside):
            figures["server"] = gauges_figure(inside), "running, waiting and KV use"
    if predicted and "speculation" in predicted:
        figures["speedup"] = speedup_figure(predicted["speculation"]["speedup"]), "expected speed-up by block length"
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run["started"]))
    parts = [heading(f"Sweep of {run['model']}{label}", 1), paragraph(f"{run['url']}, started {started}")]
    if result["quick"]:
        parts.append(
            paragraph("Quick run: points are short. Find faults with it; do not quote its numbers.", warn=True)
        )
    parts += [picture(figure, alt) for figure, alt in figures.values()]
    parts += [heading("Points"), table([_row(item) for item in result["summaries"]])]
    told = [
        *warnings(result["lints"]),
        *(f"prediction not valid: {one}" for one in result.get("prediction_faults", ())),
    ]
    parts += [heading("Can it be trusted?"), *(paragraph(text, warn=True) for text in told)]
    parts.append(paragraph("No warnings.") if not told else "")
    parts += [heading("In words"), *(paragraph(line.strip()) for line in conclusion_lines(dict(result)))]
    if "score" in result:
        parts += [heading("Predicted and measured"), table(score_rows(result["score"]))]
    for name, (figure, _) in figures.items():
        (folder / f"{name}.png").write_bytes(png(figure))
    path = folder / "report.html"
    path.write_text(page(f"Sweep of {run['model']}", parts), encoding="utf-8")
    return path
