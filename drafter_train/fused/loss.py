"""Triton kernels of the head loss: statistics of each logits row, then its gradient written over the logits.

Two passes over the logits instead of some forty. This file knows no weighting; the caller turns label probabilities
into row weights between the passes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _statistics(logits, labels, log_norm, label_logit, best, vocab, CEILING: tl.constexpr, BLOCK: tl.constexpr):
    """The softmax is shifted by the label's logit, so one exponential a value is enough: the sum holds the label's one,
    and a value more than CEILING above the label counts as if it were CEILING above (the loss is that large anyway)."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * vocab
    columns = tl.arange(0, BLOCK)
    label = tl.load(base + tl.load(labels + row)).to(tl.float32)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        values = tl.load(base + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, values)
        total += tl.exp(tl.minimum(values - label, CEILING))
    tl.store(log_norm + row, label + tl.log(tl.sum(total, axis=0)))
    tl.store(best + row, tl.max(top, axis=0))
    tl.store(label_logit + row, label)


@triton.jit
def _gradient(logits, labels, log_norm, weights, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * vocab
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    weight = tl.load(weights + row)
    values = tl.load(base + columns, mask=inside, other=float("-inf")).to(tl.float32)
    slope = tl.exp(values - tl.load(log_norm + row)) - (columns == tl.load(labels + row)).to(tl.float32)
    tl.store(base + columns, (slope * weight).to(logits.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, V] dense, labels [R] int64 -> log of the softmax denominator, the label's logit and the largest
    logit, each float32 [R]."""
    rows, vocab = logits.shape
    outputs = [torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(3)]
    _statistics[(rows,)](logits, labels, *outputs, vocab, CEILING=60.0, BLOCK=min(BLOCK, triton.next_power_of_2(vocab)))
    return outputs[0], outputs[1], outputs[2]


def gradient_(logits: Tensor, labels: Tensor, log_norm: Tensor, weights: Tensor) -> Tensor:
    """Overwrite logits [R, V] with weights [R] * (softmax - one_hot(labels)); weights float32."""
    rows, vocab = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _gradient[(rows, triton.cdiv(vocab, block))](logits, labels, log_norm, weights, vocab, BLOCK=block)
    return logits
