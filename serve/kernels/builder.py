"""Whose kernels run the matrices on a device: Triton's or C's where they work, else torch's own. Knows no models."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from serve.kernels import triton
from serve.kernels.linear import DENSE_DTYPES, LinearBuilder
from serve.kernels.native.ops import NativeLibrary

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """builder packs the matrices; activation_dtype is what K/V is kept in; triton: its forward runs the layers."""

    builder: LinearBuilder
    activation_dtype: torch.dtype
    triton: bool = False


def choose_kernels(
    weights: str, device: torch.device, native: NativeLibrary | None = None, *, blocks: bool = True
) -> Kernels:
    """Decides and, on CUDA, says so in one log line. native: the C layers' library where a CPU has one; blocks: as
    ``TritonLinearBuilder`` has it. Raises ValueError for int8 or int4 on a CUDA device where the Triton kernels do not
    work or multiply wrongly."""
    if device.type == "cpu":
        return Kernels(LinearBuilder(weights, device, native), torch.float32)
    if weights != "fp32":
        test = triton.self_test(device)
        log.info(test.line)
        if test.ok:
            from serve.kernels.triton.linear import TritonLinearBuilder

            builder = TritonLinearBuilder(weights, device, blocks=blocks)
            if weights not in DENSE_DTYPES:
                builder.check()
            return Kernels(builder, builder.activation_dtype, triton=True)
        if weights not in DENSE_DTYPES:
            raise ValueError(f"weights {weights!r} on CUDA need the Triton kernels; {test.line}")
    return Kernels(LinearBuilder(weights, device), DENSE_DTYPES[weights])
