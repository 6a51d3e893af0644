"""What a second card brings: random weights of real shapes on one card and on two, beside what was predicted.

    python -m eval.device_tp --tokenizer-dir D [--shapes qwen3-4b,qwen3-32b] [--parts link,one,two,drafter,server]
        [--predictions FILE,...] [--json FILE]

link     exchanges between the cards alone, in a CUDA graph: the floor of what a split model pays
one      every shape whole, each on a card of its own and all at the same time
two      every shape over all cards (--ranks)
drafter  a drafter's pass if its layers were split; ``two`` has that of a whole one on every card
server   the real server on a small model: ids of several ranks against one in fp32 and bf16, and the loss of a rank

Times are milliseconds of kernels at 1,024 positions. --predictions: files of ``eval.predict --tp --json``, in the order
of the shapes. Results are written after every part. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.device_tp_server import server_facts
from eval.json_report import write_report
from eval.random_model import TOKENIZER_FILES
from eval.shapes import shape_config

PARTS = ("link", "one", "two", "drafter", "server")
ENGINES = 2
"""Engines that a rank makes of one model at most, one after the other: each has a socket of its own."""
LINES = {
    "1x1": "1 stream",
    "8x1": "8 streams",
    "32x1": "32 streams",
    "1x16": "verify of 16 rows",
    "whole draft": "round of 16, whole drafter",
    "prompt 4096": "prompt of 4,096",
}
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
SECONDS = 200.0
"""Longest that one part may take: a rank that waits for a lost one must not take the rest with it."""


class PartFailed(RuntimeError):
    """A rank ended badly or too late; the message has the end of its log."""


class Group:
    """The ranks of one part as processes."""

    def __init__(self, options: argparse.Namespace, part: str, folder: Path, cards: Sequence[int]) -> None:
        self._result = folder / f"{part}-{cards[0]}-{len(cards)}.json"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in found()
        self._processes: list[subprocess.Popen[bytes]] = []
        store = os.memfd_create("ranks")
        pairs = [socket.socketpair() for _ in range(ENGINES)] if len(cards) == 2 else []
        visible = {**os.environ, **ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))}
        for rank in range(len(cards)):
            ends = [pair[rank].fileno() for pair in pairs]
            command = [sys.executable, "-m", "eval.device_tp_rank", "--part", part, "--rank", str(rank)]
            command += ["--ranks", str(len(cards)), "--device", options.device, "--weights", options.weights]
            command += ["--model-dir", str(folder), "--json", str(self._result), "--store", str(store)]
            command += ["--sockets", ",".join(map(str, ends))]
            self._processes.append(
                subprocess.Popen(
                    command, env=visible, pass_fds=(store, *ends), stdout=self._log, stderr=subprocess.STDOUT
                )
            )
        for end in (end for pair in pairs for end in pair):
            end.close()
        os.close(store)

    def found(self) -> dict[str, Any]:
        """What rank 0 wrote. Raises PartFailed."""
        deadline = time.monotonic() + SECONDS
        try:
            waiting = list(self._processes)
            while waiting and time.monotonic() < deadline:
                waiting = [process for process in waiting if process.poll() is None]
                if any(process.returncode for process in self._processes):
                    break
                time.sleep(0.05)
            codes = [process.poll() for process in self._processes]
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        self._log.close()
        if any(codes) or None in codes:
            raise PartFailed(f"ranks ended with {codes}\n{log[-3000:]}")
        result: dict[str, Any] = json.loads(self._result.read_text())
        return result


class Bench:
    """Everything measured so far."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options = options
        self._folders = {shape: _folder(shape, options.tokenizer_dir, scratch) for shape in options.shapes}
        self._scratch = scratch
        self.report: dict[str, Any] = {"shapes": list(options.shapes), "ranks": options.ranks, "faults": {}}
        for name in ("link", "one", "two", "drafter"):
            self.report[name] = {}
        self.report["predicted"] = dict(zip(options.shapes, map(_prediction, options.predictions), strict=False))

    def run(self, part: str) -> None:
        """One part, for every shape; what fails is noted."""
        cards = list(range(self._options.ranks))
        if part == "server":
            self._try(part, "small", lambda: server_facts(self._options, self._scratch))
            return
        kind = {"link": "link", "one": "model", "two": "model", "drafter": "drafter"}[part]
        if part == "one":
            groups = {
                shape: Group(self._options, kind, self._folders[shape], [card])
                for card, shape in enumerate(self._options.shapes)
            }
            for shape, group in groups.items():
                self._try(part, shape, group.found)
            return
        for shape, folder in self._folders.items():
            self._try(part, shape, lambda folder=folder: Group(self._options, kind, folder, cards).found())

    def _try(self, part: str, shape: str, work: Any) -> None:
        started = time.monotonic()
        try:
            self.report.setdefault(part, {})[shape] = work()
        except Exception as error:  # the other parts still tell something
            self.report["faults"][f"{part} {shape}"] = f"{type(error).__name__}: {error}"[:4000]
        print(f"{part} {shape}: {time.monotonic() - started:.0f} s", flush=True)


def _prediction(file: Path) -> dict[str, Any]:
    """The 16-bit lines of a prediction: of one card, of several, and the exchange in it."""
    found = json.loads(file.read_text())["predictions"]
    return {"one": found["kernels_one_card"][0], "two": found["kernels"][0], "exchange": found["exchange"][0]}


def _folder(shape: str, tokenizer_dir: Path, scratch: Path) -> Path:
    """A folder with the shape's config.json and the tokenizer, and no weights."""
    folder = scratch / shape.replace("/", "_")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape_config(shape)))
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            (folder / name).symlink_to((tokenizer_dir / name).resolve())
    return folder


def table(report: dict[str, Any]) -> list[str]:
    """The report as lines of text: measured / predicted ms, and what the second card brings."""
    lines = []
    for shape in report["shapes"]:
        one, two = report["one"].get(shape, {}), report["two"].get(shape, {})
        predicted = report["predicted"].get(shape, {"one": {}, "two": {}, "exchange": {}})
        lines.append(f"{shape}: measured / predicted ms{'':11}{'one card':>18}{'two':>18}{'speed-up':>16}")
        for name, title in LINES.items():
            wanted = (predicted["one"].get("round 1x16" if name == "whole draft" else name), predicted["two"].get(name))
            cells = [_cell(found.get(name), want) for found, want in zip((one, two), wanted, strict=True)]
            ratios = _ratio(one.get(name), two.get(name)), _ratio(*wanted)
            lines.append(f"  {title:38}{cells[0]:>18}{cells[1]:>18}{_cell(*ratios):>16}")
        lines += [f"  {where}: {_rest(found)}" for where, found in (("one", one), ("two", two)) if found]
        for part in ("drafter", "link"):
            if found := report[part].get(shape):
                lines.append(f"  {part}: {_rest(found)}")
    if "server" in report:
        lines.append(f"server: {json.dumps(report['server'])}")
    return lines + [f"!{part}: {fault}" for part, fault in report["faults"].items()]


def _rest(found: dict[str, Any]) -> str:
    shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if name not in LINES and name != "first ids")


def _cell(value: float | None, predicted: float | None) -> str:
    return " / ".join("-" if number is None else f"{number:.2f}" for number in (value, predicted))


def _ratio(one: float | None, two: float | None) -> float | None:
    return one / two if one is not None and two is not None else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.device_tp", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer-dir", type=Path, required=True)
    parser.add_argument("--shapes", default="qwen3-4b,qwen3-32b", help="known names or config.json files")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which of {', '.join(PARTS)}")
    parser.add_argument("--predictions", default="", help="files of eval.predict --json, one a shape")
    parser.add_argument("--ranks", type=int, default=2, choices=(2,), help="cards of the split")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    options.shapes = [shape for shape in options.shapes.split(",") if shape]
    options.predictions = [Path(file) for file in options.predictions.split(",") if file]
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: unknown {', '.join(unknown)}; known: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options, Path(scratch))
        for part in parts:
            bench.run(part)
            if options.json is not None:
                write_report(options.json, bench.report)
        print("\n".join(table(bench.report)), flush=True)
    return 1 if bench.report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
