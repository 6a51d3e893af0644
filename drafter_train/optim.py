"""Optimisers and the learning-rate curve.

AdamW for everything, or Muon for matrices (momentum, orthogonalised by a Newton-Schulz iteration; Jordan et al. 2024)
with AdamW for the norm weights. Muon's step is scaled by 0.2 sqrt(max(rows, columns)) so that its learning rate means
what AdamW's does. This file knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from drafter_train.recipe import TrainConfig
from serve.drafter.dflash import DFlashModel


def lr_factor(progress: float, warmup: float, final: float) -> float:
    """Linear warm-up over the first ``warmup`` of the run, then a cosine down to ``final``; progress from 0 to 1."""
    if progress < warmup:
        return max(progress, 1e-3 * warmup) / warmup
    rest = min(1.0, (progress - warmup) / max(1e-9, 1 - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * rest))


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of matrices [n, R, C] towards one with a quintic Newton-Schulz iteration (bf16)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).to(update.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum over 2-D parameters; equal shapes are stepped together."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
                for parameter in parameters:
                    if not self.state[parameter]:
                        self.state[parameter]["momentum"] = torch.zeros_like(parameter)
                momenta = [self.state[parameter]["momentum"] for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
                steps = orthogonalise(torch.stack(updates)).unbind(0)
                if group["weight_decay"]:
                    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, steps, alpha=-0.2 * math.sqrt(max(shape)) * group["lr"])


def build_optimizers(model: DFlashModel, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """One AdamW, or Muon for the matrices and AdamW for the rest. Each group keeps its peak rate in ``peak_lr``."""
    fused = next(model.parameters()).device.type == "cuda"
    betas = (config.betas[0], config.betas[1])

    def adamw(parameters: list[Any], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=lr, betas=betas, weight_decay=config.weight_decay, fused=fused, eps=1e-8
        )

    if config.optimizer == "adamw":
        optimizers = [adamw(list(model.parameters()), config.lr)]
    else:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        optimizers = [Muon(matrices, config.lr, weight_decay=config.weight_decay), adamw(others, config.adam_lr)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_lr(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
