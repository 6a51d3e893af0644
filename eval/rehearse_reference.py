"""What a rehearsal is judged against: the naive reference's answers to the gate's questions, and its speed here.

Measured once for a model, a machine and sizes, and kept in one JSON file, since it takes longer than the rehearsal. It
knows no archive and no sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.client import TokenizerCounter
from eval.gate import Kept, Question, build_set
from eval.json_report import write_report
from eval.paired import measure_side, measured_baseline
from eval.scenarios import Baseline, Shapes
from eval.servers import naive_server


@dataclass(frozen=True)
class Reference:
    """``kept``: questions with the reference's letters; ``baseline``: its speed; ``made_for``: what both hold for."""

    kept: tuple[Kept, ...]
    baseline: Baseline
    made_for: dict[str, Any]

    def save(self, path: Path) -> None:
        rows = [{**asdict(item.question), "expected": item.expected} for item in self.kept]
        report = {"made_for": self.made_for, "baseline": asdict(self.baseline), "questions": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_report(path, report)


def purpose(model_dir: Path, questions: Sequence[Question], shapes: Shapes) -> dict[str, Any]:
    """What a reference has to match to be used again: model, questions and sizes."""
    asked = json.dumps([asdict(question) for question in questions])
    files = b"".join((model_dir / name).read_bytes() for name in ("config.json", "tokenizer.json"))
    weights = sorted((path.name, path.stat().st_size) for path in model_dir.glob("*.safetensors"))
    return {
        "model": hashlib.sha256(files + repr(weights).encode()).hexdigest()[:16],
        "questions": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "sizes": shapes.label(),
    }


def load_reference(path: Path, made_for: dict[str, Any]) -> Reference:
    """A saved reference. ValueError when it was made for something else."""
    report = json.loads(path.read_text(encoding="utf-8"))
    for name, value in made_for.items():
        if report["made_for"].get(name) != value:
            raise ValueError(f"{path} was made for {name} {report['made_for'].get(name)!r}, not {value!r}; remove it")
    kept = []
    for row in report["questions"]:
        expected = row.pop("expected")
        kept.append(Kept(Question(**{**row, "choices": tuple(row["choices"])}), expected))
    return Reference(tuple(kept), Baseline(**report["baseline"]), report["made_for"])


def measure_reference(
    model_dir: Path, questions: Sequence[Question], examples: Sequence[Question], shapes: Shapes, seed: int
) -> Reference:
    """Start the naive server, ask it everything, measure the three scenarios without caps.

    Raises ServerFailed, RuntimeError (a request failed) or ValueError (it answers no question consistently).
    """
    with naive_server(model_dir) as server:
        kept = asyncio.run(build_set(server.url, questions, examples))
        if not kept:
            raise ValueError("the reference answers no question consistently; give other --questions")
        run = measure_side(server.url, shapes, TokenizerCounter(model_dir), seed, ignore_eos=False)
    failed = [item for item in run if item.value is None]
    if failed:
        raise RuntimeError(f"the reference gave no number for {failed[0].name}: {failed[0].details.get('errors')}")
    speed = measured_baseline([run], shapes)
    baseline = Baseline(
        tpot=float(speed["tpot"]),
        ttft=float(speed["ttft"]),
        throughput=float(speed["throughput"]),
        source="naive reference, measured on this machine",
    )
    return Reference(tuple(kept), baseline, purpose(model_dir, questions, shapes))
