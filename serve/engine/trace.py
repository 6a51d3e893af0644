"""One JSON line per finished request: enough to analyse acceptance later and to train on served text.

A full disk or a read-only folder costs the trace and never the service: the first failure is one warning, then tracing
stops. This file knows what is written, not who reads it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from serve.engine.sequence import Sequence

log = logging.getLogger(__name__)


class TraceWriter:
    """Appends to ``trace-<pid>.jsonl`` in ``folder``; None as folder switches it off."""

    def __init__(self, folder: str | None) -> None:
        self._path = Path(folder) / f"trace-{os.getpid()}.jsonl" if folder else None

    def write(self, sequence: Sequence, finish_reason: str, final: dict[str, Any]) -> None:
        if self._path is None:
            return
        line = {
            "id": sequence.id,
            "time": time.time(),
            "finish_reason": finish_reason,
            "prompt_ids": list(sequence.prompt_ids),
            "output_ids": sequence.token_ids[sequence.num_prompt :],
            "temperature": sequence.params.temperature,
            "seed": sequence.params.seed,
            "preemptions": sequence.preemptions,
            "rounds": [[r.source, r.drafted, r.accepted] for r in sequence.rounds],
            **{key: value for key, value in final.items() if key != "speculation"},
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            log.warning("trace switched off: cannot write %s: %s", self._path, error)
            self._path = None
