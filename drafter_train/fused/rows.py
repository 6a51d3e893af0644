"""Triton kernels for what a training step does row by row: RMS norm, head norm with rotation, silu * up.

Each is one pass over memory instead of the six to ten of its eager form, forward and backward. Statistics are float32,
results have the input's dtype. This file knows no layer; attention and the loss have their own files.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512


@triton.jit
def _norm_forward(x, weight, out, rows, x_stride, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (index[:, None] < rows) & (columns[None] < D)
    places = index[:, None].to(tl.int64)
    values = tl.load(x + places * x_stride + columns[None], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / D + eps)
    result = values * rstd[:, None] * scale[None]
    tl.store(out + places * D + columns[None], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    x, weight, grad, grad_x, partial, rows, x_stride, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    columns = tl.arange(0, BLOCK_D)
    scale = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        index = start + tl.arange(0, ROWS)
        inside = (index[:, None] < rows) & (columns[None] < D)
        places = index[:, None].to(tl.int64)
        values = tl.load(x + places * x_stride + columns[None], mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + places * D + columns[None], mask=inside, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / D + eps)
        normed = values * rstd[:, None]
        total += tl.sum(slope * normed, axis=0)
        scaled = slope * scale[None]
        mean = tl.sum(scaled * normed, axis=1) / D
        result = (scaled - normed * mean[:, None]) * rstd[:, None]
        tl.store(grad_x + places * D + columns[None], result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * D + columns, total, mask=columns < D)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        flat = x.reshape(-1, width)
        out = torch.empty_like(flat)
        block = triton.next_power_of_2(width)
        count = max(1, 4096 // block)
        _norm_forward[(triton.cdiv(flat.shape[0], count),)](
            flat, weight, out, flat.shape[0], flat.stride(0), eps, D=width, BLOCK_D=block, ROWS=count
        )
        ctx.save_for_backward(flat, weight)
        ctx.eps, ctx.shape = eps, x.shape
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        flat, weight = ctx.saved_tensors
        width = flat.shape[-1]
        block = triton.next_power_of_2(width)
        count = max(1, 4096 // block)
        programs = min(PROGRAMS, triton.cdiv(flat.shape[0], count))
        grad_x = torch.empty_like(flat)
        partial = torch.empty(programs, width, device=flat.device, dtype=torch.float32)
        _norm_backward[(programs,)](
            flat,
            weight,
            grad.reshape(-1, width).contiguous(),
            grad_x,
            partial,
            flat.shape[0],
            flat.stride(0),
            ctx.eps,
            D=width,
            BLOCK_D=block,
            ROWS=count,
        )
        return grad_x.view(ctx.shape), partial.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] -> x / rms(x) * weight in x's dtype; x's last dimension must be dense."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


@triton.jit
def _turn_forward(
    x,
    weight,
    cos,
    sin,
    out,
    rows,
    heads,
    x_stride,
    period,
    eps,
    NORM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    half: tl.constexpr = D // 2
    columns = tl.arange(0, half)
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (index < rows * heads)[:, None]
    row = (index // heads)[:, None].to(tl.int64)
    source = x + row * x_stride + (index % heads)[:, None] * D + columns[None]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        rstd = 1.0 / tl.sqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D + eps)
        first = first * rstd[:, None] * tl.load(weight + columns)[None]
        second = second * rstd[:, None] * tl.load(weight + half + columns)[None]
    c = tl.load(cos + row % period * D + columns[None], mask=inside, other=0.0)
    s = tl.load(sin + row % period * D + columns[None], mask=inside, other=0.0)
    target = out + index[:, None].to(tl.int64) * D + columns[None]
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_backward(
    x, weight, cos, sin, grad, grad_x, partial, rows, heads, x_stride, period, eps, D: tl.constexpr, ROWS: tl.constexpr
):
    half: tl.constexpr = D // 2
    columns = tl.arange(0, half)
    scale_a, scale_b = tl.load(weight + columns)[None], tl.load(weight + half + columns)[None]
    total_a = tl.zeros((half,), dtype=tl.float32)
    total_b = tl.zeros((half,), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows * heads, tl.num_programs(0) * ROWS):
        index = start + tl.arange(0, ROWS)
        inside = (index < rows * heads)[:, None]
        row = (index // heads)[:, None].to(tl.int64)
        source = x + row * x_stride + (index % heads)[:, None] * D + columns[None]
        a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + row % period * D + columns[None], mask=inside, other=0.0)
        s = tl.load(sin + row % period * D + columns[None], mask=inside, other=0.0)
        place = index[:, None].to(tl.int64) * D + columns[None]
        turned_a = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        turned_b = tl.load(grad + place + half, mask=inside, other=0.0).to(tl.float32)
        slope_a = turned_a * c + turned_b * s
        slope_b = turned_b * c - turned_a * s
        rstd = 1.0 / tl.sqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)
        a, b = a * rstd[:, None], b * rstd[:, None]
        total_a += tl.sum(slope_a * a, axis=0)
        total_b += tl.sum(slope_b * b, axis=0)
        slope_a, slope_b = slope_a * scale_a, slope_b * scale_b
        mean = ((tl.sum(slope_a * a, axis=1) + tl.sum(slope_b * b, axis=1)) / D)[:, None]
        tl.store(grad_x + place, ((slope_a - a * mean) * rstd[:, None]).to(grad_x.dtype.element_ty), mask=inside)
        tl.store(grad_x + place + half, ((slope_b - b * mean) * rstd[:, None]).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * D + columns, total_a)
    tl.store(partial + tl.program_id(0) * D + half + columns, total_b)


class _NormTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        num_seqs, rows, heads, dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _turn_forward[(triton.cdiv(num_seqs * rows * heads, 64),)](
            x,
            weight,
            cos,
            sin,
            out,
            num_seqs * rows,
            heads,
            x.stride(1),
            cos.numel() // dim,
            eps,
            NORM=True,
            D=dim,
            ROWS=64,
        )
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        num_seqs, rows, heads, dim = x.shape
        programs = min(2 * PROGRAMS, triton.cdiv(num_seqs * rows * heads, 64))
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = torch.empty(programs, dim, device=x.device, dtype=torch.float32)
        _turn_backward[(programs,)](
            x,
            weight,
            cos,
            sin,
            grad.contiguous(),
            grad_x,
            partial,
            num_seqs * rows,
            heads,
            x.stride(1),
            cos.numel() // dim,
            ctx.eps,
            D=dim,
            ROWS=64,
        )
        return grad_x, partial.sum(0).to(weight.dtype), None, None, None


def _check_rows(x: Tensor) -> None:
    """The kernels step from sequence to sequence by rows * row stride and through a row's heads densely."""
    if x.stride(0) != x.shape[1] * x.stride(1) or x.stride(2) != x.shape[3] or x.stride(3) != 1:
        raise ValueError(f"rows must be evenly spaced with dense heads, got strides {x.stride()} of {tuple(x.shape)}")


def norm_turn(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [S, R, heads, D] -> each head normed, times weight [D] (float32), rotated by float32 tables [S or 1, R, D]."""
    _check_rows(x)
    out: Tensor = _NormTurn.apply(x, weight, cos, sin, eps)
    return out


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation alone, without a gradient: x [S, R, heads, D], tables [S or 1, R, D] float32."""
    _check_rows(x)
    num_seqs, rows, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _turn_forward[(triton.cdiv(num_seqs * rows * heads, 64),)](
        x, cos, cos, sin, out, num_seqs * rows, heads, x.stride(1), cos.numel() // dim, 0.0, NORM=False, D=dim, ROWS=64
    )
    return out


@triton.jit
def _gate_forward(gate, up, out, rows, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(gate + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(gate, up, grad, grad_gate, grad_up, rows, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(gate + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    by_gate = slope * u * (sigmoid + silu * (1 - sigmoid))
    tl.store(grad_gate + row * width + columns, by_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + row * width + columns, (slope * silu).to(grad_up.dtype.element_ty), mask=inside)


class _SiluTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        width = gate.shape[-1]
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        block = min(1024, triton.next_power_of_2(width))
        rows = gate.numel() // width
        _gate_forward[(rows, triton.cdiv(width, block))](gate, up, out, rows, gate.stride(-2), width, BLOCK=block)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        width = gate.shape[-1]
        grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grad_up = torch.empty_like(grad_gate)
        block = min(1024, triton.next_power_of_2(width))
        rows = gate.numel() // width
        _gate_backward[(rows, triton.cdiv(width, block))](
            gate, up, grad.contiguous(), grad_gate, grad_up, rows, gate.stride(-2), width, BLOCK=block
        )
        return grad_gate, grad_up


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for equally strided [S, R, I] (halves of one projection, or two dense tensors)."""
    if gate.stride() != up.stride() or gate.stride(-1) != 1:
        raise ValueError(f"gate and up must have the same strides, got {gate.stride()} and {up.stride()}")
    out: Tensor = _SiluTimes.apply(gate, up)
    return out
