"""``python -m eval.ablate``: every optimisation switched off in turn, what was predicted beside what was measured.

The full server runs all the time; for each switch a second server starts without it, and both are measured in turn, the
order flipped every pair, so that slow minutes fall on both. A prediction is written and hashed before its measurement.
Results go to ``--json`` after every row: the same command goes on where it stopped, Ctrl-C keeps finished rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from eval.ablate_pass import SMALL, Pass, Sizes, measure_server
from eval.ablate_switches import MEASURES, SWITCHES, Facts, Switch, arguments_of, predict
from eval.client import TokenizerCounter
from eval.json_report import write_report
from eval.options import model_folder, new_file
from eval.score import seal
from eval.servers import ROOT, ManagedServer, end_on_sigterm
from eval.stats import geometric_mean_interval
from verify.costs import CostTable

DEFAULT_MODEL = ROOT / "models" / "smollm2-135m-instruct"
DEFAULT_DRAFTER = ROOT / "drafter_train" / "releases" / "smollm2-135m-instruct"


def start(args: argparse.Namespace, name: str, extra: Sequence[str], environ: dict[str, str]) -> ManagedServer:
    """A server of the model with its drafter, and with ``extra`` arguments and variables."""
    command = [sys.executable, "-m", "serve", "--model-dir", str(args.model_dir), "--port", "{port}"]
    if args.drafter_dir is not None:
        command += ["--drafter-dir", str(args.drafter_dir)]
    clean = {"DRAFTER_BYO_DIR": "", "MODEL_DIR": "", "PORT": ""}
    return ManagedServer([*command, *args.serve_arg, *extra], name, {**clean, **environ})


def facts_of(url: str, model_dir: Path, sizes: Sizes, first: Pass) -> Facts:
    """What the full server says of itself, with its first pass."""
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        engine = client.get("/version").json()["engine"]
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return Facts(
        costs=CostTable.from_json(engine["costs"]),
        engine=engine,
        values=first.values,
        tau=first.tau,
        drafted=first.drafted,
        burst=sizes.burst,
        long_tokens=sizes.long_tokens,
        layers=int(config["num_hidden_layers"]),
    )


def seed_of(switch: Switch, pair: int) -> int:
    """A seed that no other row or pair has: the full server must not know the prompts from an earlier row."""
    return 1 + 100 * [item.name for item in SWITCHES].index(switch.name) + pair


def ratios(without: Pass, full: Pass) -> dict[str, float]:
    """Time without over time with, for each measure."""
    found = {}
    for name, (_, _, more) in MEASURES.items():
        off, on = without.values[name], full.values[name]
        found[name] = on / off if more else off / on
    return found


class Ablation:
    """The rows so far and the servers behind them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sizes = SMALL if args.small else Sizes()
        self.counter = TokenizerCounter(args.model_dir)
        self.report: dict[str, Any] = {"settings": self._settings(), "rows": {}}
        if args.json.is_file():
            self._take_up()

    def _settings(self) -> dict[str, Any]:
        """What rows must have in common to stand in one table."""
        return {
            "model": str(self.args.model_dir),
            "drafter": str(self.args.drafter_dir),
            "serve_arg": self.args.serve_arg,
            "pairs": self.args.pairs,
            "sizes": asdict(self.sizes),
        }

    def _take_up(self) -> None:
        old = json.loads(self.args.json.read_text(encoding="utf-8"))
        if old["settings"] != self.report["settings"]:
            raise ValueError(f"{self.args.json} holds rows of other settings ({old['settings']}); give another --json")
        self.report = old
        say(f"{self.args.json}: {len(old['rows'])} rows are done already")

    def run(self) -> None:
        """Every switch that is not done yet."""
        names = self.args.only or [switch.name for switch in SWITCHES]
        waiting = [switch for switch in SWITCHES if switch.name in names and switch.name not in self.report["rows"]]
        if not waiting:
            return
        say("starting the full server")
        with start(self.args, "full", (), {}) as full:
            measure_server(full.url, SMALL, self.counter, -1)
            say("first pass: what predictions are made from")
            first = measure_server(full.url, self.sizes, self.counter, 0)
            facts = facts_of(full.url, self.args.model_dir, self.sizes, first)
            self.report["full"] = {"engine": facts.engine, "first_pass": asdict(first)}
            for switch in waiting:
                why = switch.needs(facts)
                if why:
                    self._keep(switch, {"skipped": why})
                    say(f"{switch.name}: skipped, {why}")
                else:
                    self._row(switch, facts, full.url)

    def _row(self, switch: Switch, facts: Facts, full: str) -> None:
        arguments = arguments_of(switch, facts)
        sealed = seal({"switch": switch.name, "reason": switch.reason}, predict(switch, facts))
        off = " ".join([*(f"{key}={value}" for key, value in switch.environ.items()), *arguments])
        say(f"{switch.name}: off with {off}")
        pairs: list[dict[str, float]] = []
        passes: list[dict[str, Any]] = []
        with start(self.args, switch.name, arguments, switch.environ) as server:
            measure_server(server.url, SMALL, self.counter, -1)
            for index in range(self.args.pairs):
                sides = {"full": full, "without": server.url}
                order = list(sides) if index % 2 == 0 else list(sides)[::-1]
                done = {
                    side: measure_server(sides[side], self.sizes, self.counter, seed_of(switch, index))
                    for side in order
                }
                pairs.append(ratios(done["without"], done["full"]))
                passes.append({side: asdict(one) for side, one in done.items()})
        measured = {name: geometric_mean_interval([pair[name] for pair in pairs]).to_json() for name in MEASURES}
        self._keep(switch, {"off": off, "prediction": sealed, "measured": measured, "passes": passes})

    def _keep(self, switch: Switch, row: dict[str, Any]) -> None:
        self.report["rows"][switch.name] = row
        self.report["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.args.json.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.args.json.with_name(self.args.json.name + ".part")
        write_report(unfinished, self.report)
        os.replace(unfinished, self.args.json)


def table(report: dict[str, Any]) -> str:
    """Prediction / measurement for each switch and measure, then the reasons."""
    lines = ["time without it / time with it (2.00: twice as slow without it): predicted, measured", ""]
    lines.append(f"{'':18}" + "".join(f"{name:>16}" for name in MEASURES))
    notes = []
    for name, row in report["rows"].items():
        if "skipped" in row:
            lines.append(f"{name:18}  not measured: {row['skipped']}")
            continue
        predicted, measured = row["prediction"]["predictions"], row["measured"]
        cells = "".join(f"{predicted[key]:9.2f} {measured[key]['value']:6.2f}" for key in MEASURES)
        lines.append(f"{name:18}{cells}")
        notes.append(f"{name}: {row['off']}; {row['prediction']['inputs']['reason']}")
    lines += ["", *(f"{name}: {title} ({unit})" for name, (title, unit, _) in MEASURES.items()), "", *notes]
    return "\n".join(lines)


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds the table only."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.ablate", description=__doc__)
    parser.add_argument(
        "--model-dir", type=model_folder, default=str(DEFAULT_MODEL), help=f"default: {DEFAULT_MODEL.name}"
    )
    parser.add_argument("--drafter-dir", type=Path, help="block drafter (default model: its released one)")
    parser.add_argument("--no-drafter", action="store_true", help="serve the default model without its drafter")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of passes for each switch (default: 3)")
    parser.add_argument("--only", nargs="+", choices=[switch.name for switch in SWITCHES], help="these switches only")
    parser.add_argument("--small", action="store_true", help="tiny passes: to see that it works, not for numbers")
    parser.add_argument("--serve-arg", action="append", default=[], help="argument for every server (repeatable)")
    parser.add_argument(
        "--json",
        type=new_file,
        default=ROOT / "runs" / "ablation.json",
        help="results; finished rows are kept and reused",
    )
    args = parser.parse_args(argv)
    args.model_dir = args.model_dir.absolute()
    if args.drafter_dir is None and args.model_dir == DEFAULT_MODEL and not args.no_drafter:
        args.drafter_dir = DEFAULT_DRAFTER
    if args.drafter_dir is not None:
        args.drafter_dir = args.drafter_dir.absolute()
    if not 1 <= args.pairs <= 100:
        parser.error(f"--pairs must be 1 to 100, got {args.pairs}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    end_on_sigterm()
    load = os.getloadavg()[0]
    code = 0
    try:
        ablation = Ablation(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        ablation.run()
    except KeyboardInterrupt:
        say("interrupted: finished rows are kept, the same command goes on from there")
        code = 130
    if ablation.report["rows"]:
        print(table(ablation.report))
        print(f"sizes: {'small' if args.small else 'usual'}, {args.pairs} pairs; {args.json}")
    if load > 0.5 * (os.cpu_count() or 1):
        print(f"WARNING: load average {load:.1f} before the run: repeat on a quiet machine")
    return code


if __name__ == "__main__":
    sys.exit(main())
