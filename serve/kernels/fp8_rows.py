"""Rows as 8-bit floats (e4m3) with a scale each, and the library's product of such rows.

The specification of ``serve.kernels.triton.fp8_rows``, and what runs on a CPU. A row of activations and a row of a
matrix (an output channel) are coded alike, from the row alone. Knows matrices, no layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.elementwise import rms_norm

FP8 = torch.float8_e4m3fn
TOP = 448.0
"""The largest number of the format."""
LEAST_SCALE = 1e-30
"""A row of smaller numbers than this stands for is zeros: the scale's reciprocal would not be finite."""
MULTIPLE = 16
"""The library's product wants depths and outputs that are multiples of this."""


def code_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] float -> codes [T, K] FP8, scale [T] float32: x ~ code * scale. The scale of a row with a value that is
    not finite is a NaN."""
    x = x.float()
    scale = x.abs().amax(1) / TOP + (x * 0).sum(1)
    codes = x * (1.0 / torch.where(scale < LEAST_SCALE, 1.0, scale))[:, None]
    return codes.clamp_(-TOP, TOP).nan_to_num_(0.0).to(FP8), scale


def code_gated(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up [T, 2 * I] -> codes and scale of silu(gate) * up, formed in float32."""
    gate, up = gate_up.float().chunk(2, 1)
    return code_rows(F.silu(gate) * up)


def code_norm(residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual [T, D] float32 -> codes and scale of rms_norm(residual) * weight."""
    return code_rows(rms_norm(residual, weight, eps))


def product(codes: Tensor, scale: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    """codes [T, K] and weight [N, K] FP8 (K and N multiples of MULTIPLE), scale [T] and factor [N] float32, one a row
    -> [T, N] bfloat16. On a CPU by what the codes stand for."""
    if codes.device.type == "cuda":
        return torch._scaled_mm(
            codes,
            weight.t(),
            scale_a=scale[:, None],
            scale_b=factor[None],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    return (codes.float() @ weight.float().t() * scale[:, None] * factor).bfloat16()


def fault(device: torch.device) -> str | None:
    """Why the library has no such product on this card; None where it has. Tried on a small one."""
    rows = torch.eye(2 * MULTIPLE, 4 * MULTIPLE, device=device)
    try:
        got = product(*code_rows(rows), *code_rows(rows))
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None if torch.equal(got.float(), rows @ rows.t()) else "its product of a small matrix is wrong"
