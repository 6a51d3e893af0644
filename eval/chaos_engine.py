"""Faults that no signal can make: a server whose engine process has one built in. The engine itself has no such hook.

``python -m eval.chaos_engine server FAULT -- ARGUMENTS`` is ``python -m serve ARGUMENTS`` with that engine. Faults of
the drafter act always; a step fails only while it runs a request with the seed ``POISON_SEED``. It knows where to put
a fault, not what should come of it.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

POISON_SEED = 666

Method = Callable[..., Any]


def drafter_raises(armed: Event) -> None:
    """Every draft ends in an exception that nobody expects."""

    def propose(original: Method, drafter: Any, requests: Sequence[Any]) -> Any:
        raise IndexError("list index out of range")

    _replace("propose", propose, armed)


def drafter_nan(armed: Event) -> None:
    """The drafter's arithmetic gives NaN."""

    def forward(original: Method, drafter: Any, *args: Any) -> Any:
        return original(drafter, *args) * float("nan")

    _replace("forward", forward, armed)
    _replace("_residual", forward, armed)  # what a drafter in C computes instead


def drafter_garbage(armed: Event) -> None:
    """Token ids far outside the vocabulary."""

    def propose(original: Method, drafter: Any, requests: Sequence[Any]) -> Any:
        return [[1 << 40] * request.max_length for request in requests]

    _replace("propose", propose, armed)


def drafter_wrong(armed: Event) -> None:
    """Token ids of the vocabulary that are hardly ever what the model would say."""

    def propose(original: Method, drafter: Any, requests: Sequence[Any]) -> Any:
        return [[7 + (31 * len(request.token_ids)) % 200] * request.max_length for request in requests]

    _replace("propose", propose, armed)


def observer_raises(armed: Event) -> None:
    """The drafter fails while it reads the target's hidden states, in the middle of the target's pass."""

    def observe(original: Method, drafter: Any, *args: Any) -> Any:
        raise ValueError("taps of another shape")

    _replace("observe", observe, armed)


def step_hangs(armed: Event) -> None:
    """A step with the poisoned request does not come back."""
    _in_poisoned_steps(lambda: time.sleep(3600))


def step_crashes(armed: Event) -> None:
    """A step with the poisoned request reads address 0, as a broken kernel would."""
    _in_poisoned_steps(lambda: ctypes.string_at(0))


FAULTS: dict[str, Callable[[Event], None]] = {
    "drafter-raises": drafter_raises,
    "drafter-nan": drafter_nan,
    "drafter-garbage": drafter_garbage,
    "drafter-wrong": drafter_wrong,
    "observer-raises": observer_raises,
    "step-hangs": step_hangs,
    "step-crashes": step_crashes,
}


def _replace(name: str, function: Callable[..., Any], armed: Event) -> None:
    """Put ``function(original, drafter, ...)`` for a method of every kind of block drafter, once ``armed``."""
    from serve.drafter.block import BlockDrafter

    def faulty(original: Method) -> Method:
        def method(*args: Any) -> Any:
            return function(original, *args) if armed.is_set() else original(*args)

        return method

    for kind in (BlockDrafter, *BlockDrafter.__subclasses__()):
        if name in vars(kind):
            setattr(kind, name, faulty(getattr(kind, name)))


def _arm_with_first_request() -> Event:
    """An event that is set when the engine gets its first request: what measures at the start meets no fault."""
    from serve.engine.engine import Engine

    armed = Event()
    add: Method = Engine.add

    def arming(*args: Any) -> Any:
        armed.set()
        return add(*args)

    setattr(Engine, "add", arming)  # noqa: B010 - an assignment would not pass the type check
    return armed


def _in_poisoned_steps(act: Callable[[], object]) -> None:
    from serve.engine.engine import Engine

    step: Method = Engine.step

    def poisoned(engine: Engine) -> Any:
        if any(sequence.params.seed == POISON_SEED for sequence in engine.scheduler.running):
            act()
        return step(engine)

    setattr(Engine, "step", poisoned)  # noqa: B010 - an assignment would not pass the type check


def main(arguments: Sequence[str]) -> int:
    """``server FAULT -- ...`` or, started by that server, ``engine FAULT --fd N``."""
    role, fault, *rest = arguments
    if role == "server":
        from serve.api.server import run_server
        from serve.config import parse_config

        return run_server(parse_config(rest[1:]), [sys.executable, "-m", "eval.chaos_engine", "engine", fault])
    from serve.engine import __main__ as engine

    FAULTS[fault](_arm_with_first_request())
    sys.argv = [sys.argv[0], *rest]
    return engine.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
