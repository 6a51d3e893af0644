"""Cross-entropy through the target's frozen lm_head, chunk by chunk, with a weight per block position.

The logits of a batch do not fit in memory and, the head being frozen, need not: each chunk's logits yield at once the
gradient of the hidden states, and are dropped. Weights: ``decay`` is exp(-(k-1)/gamma); ``dpace`` weighs position j by
the chance that acceptance gets at least that far, sum over m >= j of prod_{i<=m} ((1-alpha) q_i + alpha), with q_i the
drafter's probability of label i (arXiv 2605.18810), held constant for the gradient. With a teacher the label is mixed
with the target's own next-token distribution, cut to its likeliest tokens: they hold nearly all of it, and a short list
can be kept for every token and added to a gradient that is there already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weighting:
    """How the positions of a block count."""

    kind: str = "dpace"
    alpha: float = 0.5
    gamma: float = 4.0

    def weights(self, label_probs: Tensor, valid: Tensor) -> Tensor:
        """label_probs, valid [M, K] -> weights [M, K], zero where not valid, no gradient."""
        if self.kind == "decay":
            steps = torch.arange(valid.shape[1], device=valid.device, dtype=torch.float32)
            return torch.exp(-steps / self.gamma) * valid
        reach = ((1 - self.alpha) * label_probs + self.alpha).cumprod(dim=1) * valid
        return reach.flip(1).cumsum(1).flip(1) * valid


@dataclass(frozen=True)
class LossSums:
    """Sums over rows; divide ``loss`` by ``weight`` for the mean. ``loss`` carries the gradient. ``correct`` and
    ``count`` [K] are per block position; ``blocks`` counts blocks with at least one label, ``accepted`` their leading
    correct positions."""

    loss: Tensor
    weight: Tensor
    correct: Tensor
    count: Tensor
    accepted: Tensor
    blocks: Tensor


@dataclass(frozen=True)
class Teacher:
    """The target's distribution over its T likeliest tokens: ids int32 and probs, both [..., T]; probs add up to 1."""

    ids: Tensor
    probs: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Teacher:
        """The same change to both tensors."""
        return Teacher(change(self.ids), change(self.probs))


@torch.no_grad()
def teacher_of(states: Tensor, head: Tensor, count: int, rows: int) -> Teacher:
    """What the target says after each of its final states [..., H], as ``count`` tokens each, probs in the states'
    dtype. ``rows`` bounds the rows whose logits exist at a time."""
    flat = states.flatten(0, -2)
    best = [(part.to(head.dtype) @ head.T).topk(count, dim=-1) for part in torch.split(flat, rows)]
    shape = (*states.shape[:-1], count)
    return Teacher(
        torch.cat([one.indices for one in best]).int().view(shape),
        torch.cat([one.values.float().softmax(-1) for one in best]).to(states.dtype).view(shape),
    )


def chunk_terms(
    logits: Tensor,
    teacher: Teacher | None,
    labels: Tensor,
    valid: Tensor,
    kind: str,
    alpha: float,
    gamma: float,
    kl_weight: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [M, K, V]; teacher [M, K, T]; labels, valid [M, K] -> loss sum, weight sum, gradient of the loss sum by
    the logits [M, K, V] in their dtype, and correct [M, K]."""
    wide = logits.float()
    label_logits = wide.gather(-1, labels[..., None])[..., 0]
    log_norm = wide.logsumexp(-1)
    nll = log_norm - label_logits
    correct = (label_logits >= wide.amax(-1)) & valid
    weights = Weighting(kind, alpha, gamma).weights(torch.exp(-nll), valid)
    grad = torch.exp(wide - log_norm[..., None])
    hot = torch.arange(wide.shape[-1], device=wide.device) == labels[..., None]
    if teacher is not None:
        ids, probs = teacher.ids.long(), teacher.probs.float()
        nll = (1 - kl_weight) * nll + kl_weight * (log_norm - (probs * wide.gather(-1, ids)).sum(-1))
        grad = (grad - (1 - kl_weight) * hot).scatter_add(-1, ids, -kl_weight * probs)
    else:
        grad = grad - hot.float()
    grad = (grad * weights[..., None]).to(logits.dtype)
    return (nll * weights).sum(), weights.sum(), grad, correct


def _fused_terms(
    logits: Tensor, teacher: Teacher | None, labels: Tensor, valid: Tensor, weighting: Weighting, kl_weight: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``chunk_terms`` in two passes over the logits; overwrites them with their gradient."""
    from drafter_train.fused.loss import gradient_, statistics

    flat, names = logits.view(-1, logits.shape[-1]), labels.reshape(-1)
    log_norm, label_logit, best = (t.view(labels.shape) for t in statistics(flat, names))
    nll = log_norm - label_logit
    weights = weighting.weights(torch.exp(-nll), valid).contiguous()
    if teacher is not None:
        ids, probs = teacher.ids.long(), teacher.probs.float()
        nll = (1 - kl_weight) * nll + kl_weight * (log_norm - (probs * logits.gather(-1, ids).float()).sum(-1))
    gradient_(flat, names, log_norm.view(-1), weights.view(-1))
    if teacher is not None:
        # From the label to the teacher's tokens: what the label keeps is one sum, so that no rounding adds up there.
        same = ids == labels[..., None]
        moved = torch.cat((1 - (probs * same).sum(-1, keepdim=True), -probs.masked_fill(same, 0.0)), dim=-1)
        places = torch.cat((labels[..., None], ids), dim=-1)
        logits.scatter_add_(-1, places, (moved * kl_weight * weights[..., None]).to(logits.dtype))
    return (nll * weights).sum(), weights.sum(), logits, (label_logit >= best) & valid


class _HeadLoss(torch.autograd.Function):
    """Loss sum with the hidden states' gradient computed on the way forward (no logits are kept)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        valid: Tensor,
        teacher: Teacher | None,
        weighting: Weighting,
        kl_weight: float,
        rows: int,
        fused: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss = torch.zeros((), device=hidden.device)
        weight = torch.zeros((), device=hidden.device)
        correct = torch.empty_like(valid)
        blocks, size, width = hidden.shape
        gradient = torch.empty(blocks, size, width, device=hidden.device, dtype=hidden.dtype)
        chunks = max(1, -(-blocks * size // rows))
        step = max(1, -(-blocks // chunks))
        for start in range(0, blocks, step):
            part = slice(start, start + step)
            # One matrix, not one per block: strided [M, K, H] would become M small products, eighteen times slower.
            logits = (hidden[part].reshape(-1, width).to(head.dtype) @ head.T).view(-1, size, head.shape[0])
            mine = None if teacher is None else Teacher(teacher.ids[part], teacher.probs[part])
            if fused:
                sums = _fused_terms(logits, mine, labels[part], valid[part], weighting, kl_weight)
            else:
                sums = chunk_terms(
                    logits,
                    mine,
                    labels[part],
                    valid[part],
                    weighting.kind,
                    weighting.alpha,
                    weighting.gamma,
                    kl_weight,
                )
            loss += sums[0]
            weight += sums[1]
            gradient[part] = (sums[2].view(-1, head.shape[0]) @ head).view(-1, size, width).to(gradient.dtype)
            correct[part] = sums[3]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight, correct)
        return loss, weight, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_loss.to(gradient.dtype), *[None] * 8)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    valid: Tensor,
    weighting: Weighting,
    *,
    teacher: Teacher | None = None,
    kl_weight: float = 0.0,
    rows: int = 8192,
    fused: bool = False,
) -> LossSums:
    """hidden [M, K, H] of the drafted positions, head [V, H], labels and valid [M, K], teacher [M, K, T] what the
    target says one position before each label; ``kl_weight`` of the label is its. ``rows`` bounds the rows whose logits
    exist at a time; ``fused`` does the row operations in Triton kernels."""
    with torch.autocast(hidden.device.type, enabled=False):
        loss, weight, correct = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, head, labels, valid, teacher, weighting, kl_weight, rows, fused
        )
    leading = correct.long().cumprod(dim=1).sum(1)
    return LossSums(
        loss=loss,
        weight=weight,
        correct=correct.sum(0),
        count=valid.sum(0),
        accepted=leading.sum(),
        blocks=valid[:, 0].sum(),
    )
