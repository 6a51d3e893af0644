"""The phases of a rehearsal as they happen and afterwards: live on a terminal, lines elsewhere, JSON, one HTML page.

It knows names, times and outcomes; not what a phase does.
"""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval.json_report import write_report


@dataclass
class Phase:
    """One phase. ``cap`` is the most seconds it may take, None for no cap; ``times_itself``: the phase sees to its cap
    alone. ``started`` counts from the beginning. ``state``: waiting, running, ok, FAILED or skipped."""

    name: str
    title: str
    cap: float | None = None
    times_itself: bool = False
    state: str = "waiting"
    started: float = 0.0
    seconds: float = 0.0
    detail: str = ""
    faults: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def fail(self, fault: str) -> None:
        self.faults.append(fault)


class Stopped(Exception):
    """A phase failed and the following ones make no sense."""


class Timeline:
    """Runs phases in order and keeps what became of them."""

    def __init__(self, phases: Sequence[Phase], heading: str) -> None:
        self.heading = heading
        self.phases = list(phases)
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self._began = time.monotonic()
        self._live: Any = None

    @property
    def passed(self) -> bool:
        return all(phase.state in ("ok", "skipped") for phase in self.phases)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            if self._live is None:
                print(f"           note: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a phase. Faults, an exception or a passed cap fail it, and ``Stopped`` ends the rehearsal."""
        phase = next(item for item in self.phases if item.name == name)
        phase.state, phase.started = "running", time.monotonic() - self._began
        self._show(phase)
        try:
            yield phase
        except Exception as error:
            phase.fail(str(error) or type(error).__name__)
        except BaseException as error:
            phase.fail("interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else repr(error))
            raise
        finally:
            phase.seconds = time.monotonic() - self._began - phase.started
            if phase.cap is not None and phase.seconds > phase.cap and not phase.times_itself:
                phase.fail(f"took {phase.seconds:.0f} s, cap {phase.cap:.0f} s")
            phase.state = "FAILED" if phase.faults else "ok"
            self._show(phase)
        if phase.faults:
            raise Stopped(phase.name)

    def skip(self, name: str, why: str) -> None:
        phase = next(item for item in self.phases if item.name == name)
        phase.state, phase.detail, phase.started = "skipped", why, time.monotonic() - self._began
        self._show(phase)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """A table that is redrawn, where standard error is a terminal and rich is installed; else plain lines."""
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            Console = None  # type: ignore[misc,assignment]
        if Console is None or not sys.stderr.isatty():
            yield
            return
        with Live(get_renderable=self._rich_table, console=Console(stderr=True), refresh_per_second=4) as self._live:
            try:
                yield
            finally:
                self._live.refresh()
                self._live = None

    def _show(self, phase: Phase) -> None:
        if self._live is not None:
            self._live.refresh()
            return
        if phase.state == "running":
            print(f"{_clock(phase.started)} {phase.title} ...", file=sys.stderr, flush=True)
        else:
            print(f"           {_outcome(phase)}", file=sys.stderr, flush=True)

    def _rich_table(self) -> Any:
        from rich.table import Table

        table = Table(title=self.heading, title_justify="left")
        for column in ("phase", "state", "seconds", "cap", "what"):
            table.add_column(column, justify="right" if column in ("seconds", "cap") else "left")
        colours = {"ok": "green", "FAILED": "bold red", "running": "yellow"}
        for phase in self.phases:
            running = phase.state == "running"
            seconds = time.monotonic() - self._began - phase.started if running else phase.seconds
            shown = "" if phase.state in ("waiting", "skipped") else f"{seconds:.1f}"
            what = "; ".join(phase.faults) or phase.detail
            colour = colours.get(phase.state, "dim")
            cap = "" if phase.cap is None else f"{phase.cap:.0f}"
            table.add_row(phase.title, f"[{colour}]{phase.state}[/]", shown, cap, what)
        return table

    def text(self) -> str:
        """The whole timeline as a text table."""
        lines = [f"{'at':>7} {'seconds':>8} {'cap':>5}  {'state':8} {'phase':14} what"]
        for phase in self.phases:
            cap = "-" if phase.cap is None else f"{phase.cap:.0f}"
            row = f"{_clock(phase.started)} {phase.seconds:8.1f} {cap:>5}  {phase.state:8} {phase.title:14}"
            lines.append(f"{row} {phase.detail}".rstrip())
            lines += [f"{'':24}! {fault}" for fault in phase.faults]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "heading": self.heading,
            "passed": self.passed,
            **self.facts,
            "phases": [asdict(phase) for phase in self.phases],
            "notes": self.notes,
        }

    def write(self, folder: Path) -> None:
        """timeline.json and timeline.html (one file, nothing loaded from elsewhere)."""
        folder.mkdir(parents=True, exist_ok=True)
        write_report(folder / "timeline.json", self.to_json())
        (folder / "timeline.html").write_text(self.html(), encoding="utf-8")

    def html(self) -> str:
        """The timeline as a page: a bar for each phase on one time axis, and the table."""
        end = max((phase.started + phase.seconds for phase in self.phases), default=0.0) or 1.0
        rows = "".join(_html_row(phase, end) for phase in self.phases)
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        verdict = "passed" if self.passed else "FAILED"
        facts = " &middot; ".join(
            f"{html.escape(name)}: {html.escape(str(value))}"
            for name, value in self.facts.items()
            if isinstance(value, str | int | float)
        )
        return _PAGE.format(heading=html.escape(self.heading), verdict=verdict, rows=rows, notes=notes, facts=facts)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:4d}:{int(seconds) % 60:02d}"


def _outcome(phase: Phase) -> str:
    what = "; ".join(phase.faults) or phase.detail
    return f"{phase.state} {phase.seconds:.1f} s   {what}" if phase.state != "skipped" else f"skipped   {what}"


def _html_row(phase: Phase, end: float) -> str:
    left, width = 100 * phase.started / end, max(0.3, 100 * phase.seconds / end)
    cap = "" if phase.cap is None else f"{phase.cap:.0f}"
    what = html.escape("; ".join(phase.faults) or phase.detail)
    bar = f'<i class="{phase.state}" style="left:{left:.2f}%;width:{width:.2f}%"></i>' if phase.seconds else ""
    return (
        f"<tr><td>{html.escape(phase.title)}</td><td class={phase.state}>{phase.state}</td>"
        f"<td>{phase.seconds:.1f}</td><td>{cap}</td><td class=bar>{bar}</td><td>{what}</td></tr>\n"
    )


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{heading}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; vertical-align: top; }}
.bar {{ position: relative; width: 30%; }}
.bar i {{ position: absolute; top: .5rem; height: .8rem; background: #3a7; }}
.bar i.FAILED {{ background: #c33; }}
td.ok {{ color: #287a52; }}
td.FAILED {{ color: #c33; font-weight: bold; }}
td.skipped, td.waiting {{ color: #777; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd; }} }}
</style>
<h1>{heading}: {verdict}</h1>
<p>{facts}</p>
<table><tr><th>phase<th>state<th>seconds<th>cap<th>when<th>what</tr>
{rows}</table>
<ul>{notes}</ul>
</html>
"""
