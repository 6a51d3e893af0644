"""Row kernels against their eager twins: add + RMS norm, head norm + rotary + K/V write, context write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from serve.kernels.elementwise import rms_norm, rotate_
from serve.kernels.kv_cache import KVCache, write_kv, write_rows
from serve.kernels.triton.pack import in_blocks, pack_int8
from serve.kernels.triton.rows import ContextWriter, add_rms_norm, embed_rows, qkv_write
from serve.kernels.triton.tiles import NORM_WIDTH
from serve.model.rope import RopeConfig, RotaryTable

if TYPE_CHECKING:
    from tests.serve.kernels.conftest import Place

EPS = 1e-6
HALF_ERROR = 5e-3
FLOAT_ERROR = 1e-6


def turn_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, RotaryTable]:
    rotary = RotaryTable(RopeConfig(), head_dim, device)
    rotary.reserve(length)
    turns = torch.view_as_real(rotary.rows(torch.arange(length, device=device))[:, 0])
    return turns.reshape(length, head_dim).contiguous(), rotary


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_add_and_norm(splits: int, place: Place, relative_error: Callable[..., float]) -> None:
    rows, width = (48, 2560) if place.real else (3, 72)
    residual = place.randn(rows, width, dtype=torch.float32)
    weight = place.randn(width, dtype=torch.float32)
    delta = place.randn(splits, rows, width, dtype=torch.float32) if splits else None
    want = residual + (0 if delta is None else delta.sum(0))
    taps = place.randn(rows, 2 * width)
    normed = add_rms_norm(residual, delta, weight, EPS, place.dtype, taps[:, width:] if splits else None)
    assert relative_error(residual, want) < FLOAT_ERROR
    assert relative_error(normed, rms_norm(want, weight, EPS)) < HALF_ERROR
    if splits:
        assert torch.equal(taps[:, width:], residual.to(place.dtype))


def test_add_takes_16_bit_rows(place: Place, relative_error: Callable[..., float]) -> None:
    residual = place.randn(2, 40, dtype=torch.float32)
    delta = place.randn(2, 40)
    want = residual + delta.float()
    add_rms_norm(residual, delta, torch.ones(40, device=place.device), EPS, place.dtype)
    assert relative_error(residual, want) < FLOAT_ERROR


def test_norm_stays_finite_for_huge_residuals(place: Place) -> None:
    residual = place.randn(2, 64, dtype=torch.float32, scale=1e8)
    normed = add_rms_norm(residual, None, torch.ones(64, device=place.device), EPS, place.dtype)
    assert normed.isfinite().all()


def test_a_normed_row_has_the_same_bits_in_any_batch(place: Place) -> None:
    width = 2560 if place.real else 72
    residual = place.randn(64, width, dtype=torch.float32)
    delta = place.randn(4, 64, width, dtype=torch.float32)
    weight = torch.ones(width, device=place.device)
    want = add_rms_norm(residual.clone(), delta, weight, EPS, place.dtype)
    for count in (1, 7, 33):
        part = add_rms_norm(residual[:count].clone(), delta[:, :count].contiguous(), weight, EPS, place.dtype)
        assert torch.equal(part, want[:count])


def test_norms_of_narrow_and_wide_rows(place: Place, relative_error: Callable[..., float]) -> None:
    for width in (64, 576, 4096, 8192, NORM_WIDTH) if place.real else (64, 260):
        residual = place.randn(40, width, dtype=torch.float32)[: 40 if place.real else 2]
        few, weight = residual[:2].clone(), place.randn(width, dtype=torch.float32)
        delta = place.randn(2, *residual.shape, dtype=torch.float32)
        want = residual + delta.sum(0)
        normed = add_rms_norm(residual, delta, weight, EPS, place.dtype)
        assert relative_error(residual, want) < FLOAT_ERROR
        assert relative_error(normed, rms_norm(want, weight, EPS)) < HALF_ERROR
        again = add_rms_norm(few, delta[:, :2].contiguous(), weight, EPS, place.dtype)
        assert torch.equal(few, residual[:2])
        assert torch.equal(again, normed[:2])


@pytest.mark.parametrize("width", [6, NORM_WIDTH + 4])
def test_norms_refuse_other_widths(width: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 4 numbers, at most {NORM_WIDTH}; got {width}"):
        add_rms_norm(torch.zeros(1, width), None, torch.ones(width), EPS, torch.float16)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("normed", [True, False])
def test_qkv_write(normed: bool, splits: int, place: Place, relative_error: Callable[..., float]) -> None:
    heads, kv_heads, head_dim, rows = (32, 8, 128, 40) if place.real else (6, 2, 16, 4)
    device = place.device
    every = heads + 2 * kv_heads
    parts = place.randn(splits, rows, every * head_dim, dtype=torch.float32)
    qk_norm = place.randn(heads + kv_heads, head_dim, dtype=torch.float32) if normed else None
    turns, rotary = turn_table(300, head_dim, device)
    positions = torch.randint(0, 300, (rows,), generator=torch.Generator().manual_seed(2)).to(device)
    slots = torch.randperm(5 * 16, generator=torch.Generator().manual_seed(3))[:rows].to(device)
    cache = KVCache(2, 5, 16, kv_heads, head_dim, dtype=place.dtype, device=device)

    packed = parts.sum(0).view(rows, every, head_dim)
    turned = packed[:, : heads + kv_heads].clone()
    if qk_norm is not None:
        turned = torch.nn.functional.rms_norm(turned, (head_dim,), None, EPS) * qk_norm
    rotate_(turned, rotary.rows(positions))
    kv = torch.stack((turned[:, heads:], packed[:, heads + kv_heads :]), 1)
    write_kv(cache.layers[0], write_rows(slots, kv_heads, 16), kv)

    q = qkv_write(
        parts if splits > 1 else parts[0], qk_norm, turns, positions, slots, cache.layers[1], heads, EPS, place.dtype
    )
    assert relative_error(q, turned[:, :heads]) < HALF_ERROR
    assert relative_error(cache.layers[1], cache.layers[0]) < HALF_ERROR
    assert torch.equal(cache.layers[1][:, :, 1], cache.layers[0][:, :, 1]) or splits > 1


def test_qkv_write_in_codes(place: Place) -> None:
    heads, kv_heads, head_dim, rows = (32, 8, 128, 40) if place.real else (6, 2, 16, 4)
    device = place.device
    qkv = place.randn(rows, (heads + 2 * kv_heads) * head_dim, dtype=torch.float32)
    qkv[1] = 0
    turns, rotary = turn_table(40, head_dim, device)
    positions, slots = torch.arange(rows, device=device), torch.arange(20, 20 + rows, device=device)
    want, got = (KVCache(1, 4, 16, kv_heads, head_dim, dtype=torch.int8, device=device) for _ in range(2))
    packed = qkv.view(rows, -1, head_dim).clone()
    rotate_(packed[:, : heads + kv_heads], rotary.rows(positions))
    kv = torch.unflatten(packed[:, heads:], 1, (2, kv_heads))
    write_kv(want.layers[0], write_rows(slots, kv_heads, 16), kv, want.scale(0))
    qkv_write(qkv, None, turns, positions, slots, got.layers[0], heads, EPS, place.dtype, got.scale(0))
    assert torch.allclose(got.scales[0], want.scales[0], rtol=1e-5, atol=0)
    # The card's division is a bit off: a code at the border of two may be its neighbour.
    apart = (got.layers[0].int() - want.layers[0].int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


def test_values_of_a_bias_free_16_bit_projection_are_stored_as_they_are(place: Place) -> None:
    device = place.device
    qkv = place.randn(1, 4 * 16)
    cache = KVCache(1, 2, 16, 1, 16, dtype=place.dtype, device=device)
    turns, _ = turn_table(4, 16, device)
    place_of_row = torch.tensor([17], device=device)
    qkv_write(qkv, None, turns, torch.tensor([0], device=device), place_of_row, cache.layers[0], 2, EPS, place.dtype)
    assert torch.equal(cache.layers[0][1, 0, 1, 1], qkv[0, 48:])
    assert torch.equal(cache.layers[0][1, 0, 0, 1], qkv[0, 32:48])
    assert cache.layers[0].count_nonzero() == 32


def test_context_write_fills_every_drafter_layer(place: Place, relative_error: Callable[..., float]) -> None:
    layers, kv_heads, head_dim, rows = (5, 8, 128, 17) if place.real else (3, 2, 16, 4)
    device = place.device
    kv = place.randn(rows, layers, 2, kv_heads, head_dim)
    k_norm = place.randn(layers, head_dim, dtype=torch.float32)
    turns, rotary = turn_table(100, head_dim, device)
    positions = torch.arange(20, 20 + rows, device=device)
    slots = torch.arange(30, 30 + rows, device=device)
    want = KVCache(layers, 4, 16, kv_heads, head_dim, dtype=place.dtype, device=device)
    got = KVCache(layers, 4, 16, kv_heads, head_dim, dtype=place.dtype, device=device)
    for index in range(layers):
        keys = rms_norm(kv[:, index, 0].float(), k_norm[index], EPS)
        rotate_(keys, rotary.rows(positions))
        pair = torch.stack((keys, kv[:, index, 1].float()), 1)
        write_kv(want.layers[index], write_rows(slots, kv_heads, 16), pair)
    ContextWriter(got.layers, k_norm, EPS)(kv, turns, positions, slots)
    for one, other in zip(got.layers, want.layers, strict=True):
        assert relative_error(one, other) < HALF_ERROR
        assert torch.equal(one[:, :, 1], other[:, :, 1])


def test_context_write_refuses_caches_of_different_shapes() -> None:
    with pytest.raises(ValueError, match="one shape"):
        ContextWriter([torch.zeros(2, 1, 2, 16, 8), torch.zeros(3, 1, 2, 16, 8)], None, EPS)


def test_embed_rows(place: Place) -> None:
    width = 2560 if place.real else 128
    ids = torch.tensor([5, 0, 303, 5], device=place.device)
    table = place.randn(304, width)
    assert torch.equal(embed_rows(table, None, ids), table[ids].float())
    packed = pack_int8(place.randn(304, width, dtype=torch.float32), place.dtype)
    assert packed.scale is not None
    want = packed.data[ids].float() * packed.scale[ids, None]
    for one in (packed, in_blocks(packed)):
        assert torch.equal(embed_rows(one.data, one.scale, ids), want)
