"""The shift of the gated product holds for the worst input the weights allow, in every format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from serve.kernels.triton.pack import PackedWeight, dequantize, pack_dense, pack_int4, pack_int8
from serve.kernels.triton.shift import MAX_SHIFT, gated_shift

LARGEST = torch.finfo(torch.float16).max
PACKERS: dict[str, Callable[[Tensor, torch.dtype], PackedWeight]] = {
    "dense": pack_dense,
    "int8": pack_int8,
    "int8 g128": lambda weight, dtype: pack_int8(weight, dtype, 128),
    "int4": lambda weight, dtype: pack_int4(weight, dtype, 64),
}


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_no_normed_row_leaves_the_range(kind: str, scale: float) -> None:
    depth, width = 128, 2100  # more rows than one part
    norm = random(depth).abs() + 0.5
    packed = PACKERS[kind](random(2 * width, depth, scale=scale), torch.float16)
    bias = random(2 * width)
    shift = gated_shift(packed, bias, norm)
    assert shift < MAX_SHIFT
    weight = dequantize(packed) * norm
    # The rows that excite a feature's gate, its up, and both, at the length a normed row has.
    for feature in (0, 7, width - 1):
        for direction in (weight[feature], weight[width + feature], weight[feature] + weight[width + feature]):
            row = direction / direction.norm() * depth**0.5
            gate, up = (weight @ row + bias).chunk(2)
            worst = (torch.nn.functional.silu(gate) * up).abs().max()
            assert float(worst) / 2**shift <= LARGEST


def test_a_shift_is_no_larger_than_it_must_be() -> None:
    weight = torch.zeros(2, 64)
    weight[:, 0] = 1.0  # gate and up are both 8 at most: their product is 64
    packed = pack_dense(weight, torch.float16)
    assert gated_shift(packed, None, torch.ones(64)) == 0
    assert gated_shift(packed, None, torch.full((64,), 64.0)) == 3  # 512 * 512 is a little more than 4 * 65504
    assert gated_shift(packed, None, torch.full((64,), 1e6)) == MAX_SHIFT
    assert gated_shift(pack_dense(weight * 0, torch.float16), None, torch.ones(64)) == 0
