"""How many cases a fuzz test tries: few in a test run, ``FORETOKEN_FUZZ_CASES`` of them in a long one."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

ENVIRONMENT_NAME = "FORETOKEN_FUZZ_CASES"


def cases(few: int) -> int:
    """``few``, unless the long run asks for another count."""
    return int(os.environ.get(ENVIRONMENT_NAME) or few)


def fuzz(few: int, **changes: object) -> settings:
    """Settings of a fuzz test: derandomised in a test run, so that a green one stays green; random in a long one."""
    long = ENVIRONMENT_NAME in os.environ
    values: dict[str, object] = {
        "max_examples": cases(few),
        "deadline": None,
        "database": None,
        "derandomize": not long,
        "suppress_health_check": list(HealthCheck),
        "phases": (Phase.explicit, Phase.generate, Phase.shrink),
        **changes,
    }
    return settings(**values)  # type: ignore[arg-type]
