"""A child process of the benchmark that measures in-process: transformers' ``generate`` and the engine's step cost.

One JSON command a line on stdin, one JSON answer a line on stdout, so that the parent can alternate it with servers.
It knows no HTTP and keeps no results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


class TransformersWorker:
    """``generate`` in fp32, greedy, one request at a time."""

    def __init__(self, model_dir: str, threads: int) -> None:
        from eval.naive import NaiveModel

        self._naive = NaiveModel(model_dir, "cpu", "fp32", threads)

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Prompts one after the other -> tokens, seconds in all, and the pure decode rate (first token excluded)."""
        tokens, decode_tokens, decode_seconds = 0, 0, 0.0
        start = time.perf_counter()
        for messages in command["chats"]:
            stamps = _Stamps()
            made = self._naive.generate(self._naive.prompt_ids(messages), command["max_tokens"], 0.0, False, stamps)
            tokens += made
            decode_tokens += made - 1
            decode_seconds += stamps.times[-1] - stamps.times[0]
        return {
            "tokens": tokens,
            "seconds": time.perf_counter() - start,
            "decode_tokens_per_second": decode_tokens / decode_seconds if decode_tokens else 0.0,
        }


class _Stamps:
    """A streamer that notes when each token arrived (the prompt is put first and is not a token)."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to flush."""


class StepCostWorker:
    """Time of one target forward over 1 row and over more rows of one sequence, at a given context length."""

    def __init__(self, model_dir: str, threads: int, weights: str) -> None:
        from eval.engine_probe import EngineProbe

        self._probe = EngineProbe(model_dir, threads, weights)

    def step_cost(self, command: dict[str, Any]) -> dict[str, Any]:
        """Median seconds for each row count, the counts alternated so that noise is shared."""
        rows: list[int] = command["rows"]
        times: dict[int, list[float]] = {count: [] for count in rows}
        for _ in range(command["repeats"]):
            for count in rows:
                times[count].append(self._probe.seconds(count, command["context"]))
        return {"seconds": {str(count): median(values) for count, values in times.items()}}


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    # Libraries print; answers keep a stream of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]
    if setup["role"] == "transformers":
        handlers = {"generate": TransformersWorker(setup["model_dir"], setup["threads"]).generate}
    else:
        handlers = {"step_cost": StepCostWorker(setup["model_dir"], setup["threads"], setup["weights"]).step_cost}
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(handlers[command["do"]](command)), file=answers, flush=True)


if __name__ == "__main__":
    main()
