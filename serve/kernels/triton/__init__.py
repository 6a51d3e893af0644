"""The GPU kernels: Triton sources, and the calls that launch them on tensors.

``source/`` holds device code and nothing else; the modules here hold launchers, one per operation, each with the
shapes it takes and the eager function that is its specification. Importing this package imports no Triton and touches
no driver: ask ``installed()`` first, then import the launchers you need.
"""

from __future__ import annotations

from importlib.util import find_spec


def installed() -> bool:
    """True when a Triton package is there to import (a CPU-only box may have none)."""
    return find_spec("triton") is not None
