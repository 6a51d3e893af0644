"""The GPU kernels: Triton sources, and the calls that launch them on tensors.

``source/`` holds device code and nothing else; the modules here hold launchers, one per operation, each with the
shapes it takes and the eager function that is its specification. Importing this package imports no Triton and touches
no driver: ask ``installed()`` first, then import the launchers you need.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from serve.kernels.triton.turing import SelfTest


def installed() -> bool:
    """True when a Triton package is there to import (a CPU-only box may have none)."""
    return find_spec("triton") is not None


def self_test(device: torch.device) -> SelfTest:
    """Whether these kernels serve on a CUDA device, with one line for the log. Compiles a probe on Turing."""
    from serve.kernels.triton.card import capability
    from serve.kernels.triton.turing import SelfTest
    from serve.kernels.triton.turing import self_test as probe

    if not installed():
        return SelfTest(False, "triton kernels off: no triton package; using cuBLAS and SDPA")
    return probe(capability(device))
