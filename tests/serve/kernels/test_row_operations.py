"""Norm, rotary and gated activation: right, and the same bits for a row wherever it lies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.elementwise import interleave_halves, rms_norm, rotate_, silu_mul


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [64, 100, 576, 1536, 2561])
@pytest.mark.parametrize("rows", [2, 7, 33, 256])
def test_rows_keep_their_bits(rows: int, width: int, threads: None) -> None:
    x, weight = torch.randn(rows, 2 * width) * 3, torch.rand(width)
    normed = rms_norm(x[:, :width], weight, 1e-5)
    assert torch.equal(normed, torch.cat([rms_norm(row[None, :width], weight, 1e-5) for row in x]))
    activated = silu_mul(x.clone())
    assert torch.equal(activated, torch.cat([silu_mul(row[None].clone()) for row in x]))


def test_norm_of_a_zero_row_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-6), torch.zeros(2, 64))


def test_norm_and_activation_are_what_they_say() -> None:
    x, weight = torch.randn(5, 96), torch.rand(96)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (96,), weight, 1e-3))
    torch.testing.assert_close(rms_norm(x, None, 1e-3), F.rms_norm(x, (96,), None, 1e-3))
    torch.testing.assert_close(silu_mul(x.clone()), F.silu(x[:, :48]) * x[:, 48:])


def rotate_half_apart(heads: Tensor, angles: Tensor) -> Tensor:
    """The usual formulation: element i turns with element i + D / 2."""
    first, second = heads.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize("dim", [2, 6, 24, 64])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_rotation_of_interleaved_pairs_is_rotation_of_halves(rows: int, dim: int) -> None:
    heads, angles = torch.randn(rows, 5, dim), torch.randn(rows, dim // 2)
    want = rotate_half_apart(heads, angles)

    def interleaved(x: Tensor) -> Tensor:
        return interleave_halves(x.permute(1, 2, 0).reshape(5 * dim, rows), dim).view(5, dim, rows).permute(2, 0, 1)

    got = interleaved(heads).contiguous()
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    rotate_(got, turn)
    torch.testing.assert_close(got, interleaved(want))
    single = interleaved(heads).contiguous()
    for i in range(rows):
        rotate_(single[i : i + 1], turn[i : i + 1])
    assert torch.equal(single, got)
