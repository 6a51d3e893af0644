"""Where the time of an engine's steps goes: the host's own microseconds in each part of a step, and the device's beside
them.

The parts are methods of one engine, wrapped while it is watched; a part's time is without that of the parts it calls.
Waiting for the device is a part too, so a step whose wait is near nothing is bound by the host. Reading a clock twice
adds some tenths of a microsecond to every call. Knows the engine's parts by name; no requests and no report.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from serve.engine.engine import Engine

STEP = "other"
"""What of a step is in no part."""


@dataclass
class StepParts:
    """Seconds and calls by part, and the device's seconds of the steps that were read from graphs."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    launches: int = 0

    def line(self) -> str:
        """Microseconds a step, the dearest part first, and the device's for each launch that was read."""
        steps = max(1, self.calls[STEP])
        dearest = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {1e6 * spent / steps:.0f}" for name, spent in dearest)
        told = f"{1e6 * sum(self.seconds.values()) / steps:.0f} us a step ({parts})"
        if self.launches:
            device = (1e6 * spent / self.launches for spent in (self.draft_seconds, self.verify_seconds))
            told += "; device, gaps included, draft {:.0f}, verify {:.0f}".format(*device)
        return told


@contextmanager
def watched(engine: Engine) -> Iterator[StepParts]:
    """The parts of the steps that ``engine`` takes inside the block."""
    found = StepParts()
    drafting: Any = engine._drafting
    places: list[tuple[Any, str, str]] = [
        (engine, "step", STEP),
        (engine.scheduler, "plan", "plan"),
        (engine.scheduler, "runs_ahead", "plan"),
        (drafting, "choose", "choose"),
        (drafting, "renew", "choose"),
        (drafting, "_guesses", "search"),
        (drafting, "_look_up", "search"),
        (engine.controller, "plan", "lengths"),
        (engine.controller, "observe", "learn"),
        (engine.controller, "observe_cost", "learn"),
        (engine, "_settle_alone", "settle"),
        (engine, "_launch_prompts", "prefill"),
        (engine.runner, "forward", "eager pass"),
    ]
    graphs: Any = None
    if engine.runner.ahead is not None:
        graphs = engine.runner.ahead.graphs
        places += [(graphs, "launch", "launch"), (graphs, "read", "read and wait")]
    inside: list[float] = []  # seconds spent in parts called by the parts that are open

    def timed(call: Any, name: str) -> Any:
        def inner(*given: Any, **named: Any) -> Any:
            inside.append(0.0)
            started = time.perf_counter()
            try:
                result = call(*given, **named)
            finally:
                took = time.perf_counter() - started
                found.seconds[name] += took - inside.pop()
                found.calls[name] += 1
                if inside:
                    inside[-1] += took
            if name == "read and wait":
                found.draft_seconds += result.draft_seconds
                found.verify_seconds += result.verify_seconds
                found.launches += 1
            return result

        return inner

    for owner, method, name in places:
        setattr(owner, method, timed(getattr(owner, method), name))
    try:
        yield found
    finally:
        for owner, method, _ in places:
            delattr(owner, method)
