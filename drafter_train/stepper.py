"""Forward and backward of one batch: the plain way, and on CUDA in fused kernels, recorded as graphs, with kept taps.

The plain way is the specification. A CUDA device gets the fused kernels after they have agreed with it on the run's own
first batch, and each shape of batch is recorded as two CUDA graphs (the target's taps; the drafter, its loss and all
gradients) the second time it comes. This file knows no optimiser and no schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafter_train.blocks import Blocks, cut_blocks, dense_mask, draft_hidden, embed_blocks, flex_attend
from drafter_train.corpus import Batch
from drafter_train.loss import LossSums, Teacher, Weighting, head_loss, teacher_of
from drafter_train.progress import say
from drafter_train.recipe import Recipe
from drafter_train.tapcache import TapCache
from drafter_train.target import Target
from serve.drafter.dflash import DFlashModel

# What bf16 leaves open, relative: the fused target's taps against the plain one's; the fused loss and gradient against
# float32. A drafter that has learned its data has small gradients, much of which is rounding in any step of bf16: the
# fused one may then be somewhat worse than the plain one.
TAPS_TOLERANCE, LOSS_TOLERANCE, GRADIENT_TOLERANCE, WORSE_THAN_PLAIN = 0.05, 0.01, 0.1, 1.5


def flatten_gradients(model: nn.Module) -> Tensor:
    """Give every parameter a gradient that is a view of one float32 buffer, which is returned (zero)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def before_labels(teacher: Teacher | None, blocks: Blocks) -> Teacher | None:
    """From what the target says after every token [S, W, T] to what it says where labels [S * N, B - 1] come next."""
    if teacher is None:
        return None
    count, shape = teacher.ids.shape[-1], blocks.labels.flatten(0, 1).shape
    before = blocks.positions[..., :-1].clamp(max=teacher.ids.shape[1] - 1).flatten(1)
    before = before[..., None].expand(-1, -1, count)
    return teacher.map(lambda t: t.gather(1, before).view(*shape, count))


@dataclass
class _Recorded:
    """Buffers of one batch shape and the graphs that read and write them."""

    batch: Batch
    taps: Tensor
    teacher: Teacher | None
    target: torch.cuda.CUDAGraph | None
    drafts: dict[str, tuple[torch.cuda.CUDAGraph, LossSums]]


class Stepper:
    """Adds the gradients of a batch's loss sum to the parameters. ``gradients`` is ``flatten_gradients``' buffer."""

    def __init__(
        self, recipe: Recipe, model: DFlashModel, target: Target, gradients: Tensor, cache: TapCache | None = None
    ) -> None:
        train = recipe.train
        self.recipe, self.model, self.target, self.cache = recipe, model, target, cache
        self.flex = train.attention == "flex" or (
            train.attention == "auto" and target.device.type == "cuda" and recipe.data.max_length > 2048
        )
        self._gradients = gradients
        self._fused: Any = None
        self._wants_fused = train.fused and target.device.type == "cuda" and target.dtype == torch.bfloat16
        self._shapes: dict[tuple[int, ...], _Recorded] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._pool: Any = None

    @property
    def fused(self) -> bool:
        """Whether the fused kernels are in use (they are tried at the first batch)."""
        return self._fused is not None

    def __call__(self, batch: Batch, weighting: Weighting, rows: Tensor | None = None) -> LossSums:
        """``batch`` may be on the host. ``rows`` [S, W] are its places in the tap cache (see ``TapCache.rows``), when
        there is one."""
        if self._wants_fused and self._fused is None:
            self._try_fused(batch.to(self.target.device), weighting)
        if self._fused is None:
            return self._plain(batch.to(self.target.device), weighting)
        return self._recorded(batch, weighting, rows)

    def _plain(self, batch: Batch, weighting: Weighting, exact: bool = False) -> LossSums:
        """``exact``: the drafter and its loss in float32 (the target's states are what they are)."""
        config, train = self.model.config, self.recipe.train
        width = batch.ids.shape[1]
        blocks = cut_blocks(batch, config.block_size, config.mask_token_id)
        taps, teacher = self._read_target(batch.ids)
        mask = None if self.flex else dense_mask(batch.anchors, config.block_size, width)
        attend = flex_attend(batch.anchors, config.block_size, width) if self.flex else None
        embeds = embed_blocks(blocks, self.target.embedding)
        head, bf16 = self.target.lm_head, self.target.dtype == torch.bfloat16 and not exact
        if exact:
            taps, embeds, head = taps.float(), embeds.float(), head.float()
        with torch.autocast(batch.ids.device.type, dtype=torch.bfloat16, enabled=bf16):
            hidden = draft_hidden(self.model, embeds, taps, blocks.positions, mask, attend)
        sums = head_loss(
            hidden[:, :, 1:].flatten(0, 1),
            head,
            blocks.labels.flatten(0, 1),
            blocks.valid.flatten(0, 1),
            weighting,
            teacher=before_labels(teacher, blocks),
            kl_weight=train.kl_weight,
            rows=min(train.head_rows, 2048) if exact else train.head_rows,
        )
        sums.loss.backward()  # type: ignore[no-untyped-call]
        return sums

    def _read_target(self, ids: Tensor) -> tuple[Tensor, Teacher | None]:
        """Taps of ids [S, W], and what the target says after each of them where the recipe wants to know."""
        train = self.recipe.train
        taps, final = self.target.hidden_states(ids, self.model.config.target_layer_ids)
        if train.kl_weight == 0:
            return taps, None
        return taps, teacher_of(final, self.target.lm_head, train.kl_top, train.head_rows)

    def _draft(self, batch: Batch, taps: Tensor, teacher: Teacher | None, weighting: Weighting) -> LossSums:
        config = self.model.config
        blocks = cut_blocks(batch, config.block_size, config.mask_token_id)
        embeds = embed_blocks(blocks, self.target.embedding)
        hidden = self._fused.fused_draft_hidden(self.model, embeds, taps, blocks.positions, batch.anchors)
        sums = head_loss(
            hidden[:, :, 1:].flatten(0, 1),
            self.target.lm_head,
            blocks.labels.flatten(0, 1),
            blocks.valid.flatten(0, 1),
            weighting,
            teacher=before_labels(teacher, blocks),
            kl_weight=self.recipe.train.kl_weight,
            rows=self.recipe.train.head_rows,
            fused=True,
        )
        sums.loss.backward()  # type: ignore[no-untyped-call]
        return sums

    def _try_fused(self, batch: Batch, weighting: Weighting) -> None:
        """Use the fused kernels if they give this batch's taps, loss and gradients; say so when they do not."""
        self._wants_fused = False
        try:
            from drafter_train.fused import attention, forward
        except ImportError as error:
            say(f"fused kernels are not available ({error}): training goes on without them, slower")
            return
        if not attention.fits(self.model.config.block_size, self.model.config.head_dim):
            say(f"no fused kernels for block_size {self.model.config.block_size}: training goes on without them")
            return
        few = batch.rows(0, 4)
        layer_ids = self.model.config.target_layer_ids
        taps, teacher = self._read_target(few.ids)
        exact, expected = self._gradient_of(lambda: self._plain(few, weighting, exact=True))
        _, plain = self._gradient_of(lambda: self._plain(few, weighting))
        plain_error = _distance(plain, expected)
        self._fused, layer = forward, self.target.layer
        self.target.layer = forward.fused_causal_layer
        try:
            inside = torch.arange(few.ids.shape[1], device=few.ids.device) < few.lengths[:, None]
            taps_error = _distance(self.target.hidden_states(few.ids, layer_ids)[0][inside], taps[inside])
            sums, gradient = self._gradient_of(lambda: self._draft(few, taps, teacher, weighting))
            loss, fused_error = abs(sums / exact - 1), _distance(gradient, expected)
            allowed = max(GRADIENT_TOLERANCE, WORSE_THAN_PLAIN * plain_error)
            facts = (
                f"taps within {taps_error:.2%} of the plain target's, loss within {loss:.2%} of float32, gradient "
                f"within {fused_error:.2%} (plain step: {plain_error:.2%})"
            )
            if not (taps_error < TAPS_TOLERANCE and loss < LOSS_TOLERANCE and fused_error < allowed):
                raise ArithmeticError(facts)
            say(f"fused kernels agree: {facts}")
        except Exception as fault:  # a compiler's many kinds of error: the plain step can do all of this
            say(f"fused kernels are not used: {type(fault).__name__}: {str(fault)[:300]}")
            self._fused, self.target.layer = None, layer
        self._gradients.zero_()

    def _gradient_of(self, step: Callable[[], LossSums]) -> tuple[float, Tensor]:
        """The loss sum of one step and the gradients it leaves, apart from what was there."""
        self._gradients.zero_()
        sums = step()
        return float(sums.loss.detach()), self._gradients.clone()

    def _recorded(self, batch: Batch, weighting: Weighting, rows: Tensor | None) -> LossSums:
        device = self.target.device
        shape = (*batch.ids.shape, batch.anchors.shape[1])
        if (shape, weighting.kind) not in self._seen:
            # The first time also compiles what this shape needs; it runs as it is.
            self._seen.add((shape, weighting.kind))
            here = batch.to(device)
            return self._draft(here, *self._read_target(here.ids), weighting)
        entry = self._shapes.get(shape)
        if entry is None:
            here = batch.to(device)
            size = len(self.model.config.target_layer_ids) * self.model.config.hidden_size
            taps = torch.empty(*batch.ids.shape, size, device=device, dtype=self.target.dtype)
            teacher = None
            if self.recipe.train.kl_weight > 0:
                best = (*batch.ids.shape, self.recipe.train.kl_top)
                teacher = Teacher(torch.zeros(best, device=device, dtype=torch.int32), taps.new_empty(best))
            entry = self._shapes[shape] = _Recorded(here, taps, teacher, None, {})
        else:
            entry.batch.copy_(batch)
        places = None if rows is None else rows.pin_memory().to(device, non_blocking=True)
        known = self.cache is not None and rows is not None and self.cache.knows(rows)
        if known and self.cache is not None and places is not None:
            self.cache.read(places, entry.taps, entry.teacher)
        else:
            self._replay_target(entry)
            if self.cache is not None and rows is not None and places is not None:
                self.cache.write(rows, places, entry.taps, entry.teacher)
        recorded = entry.drafts.get(weighting.kind)
        if recorded is None:
            kept = self._gradients.clone()
            graph, sums = self._record(lambda: self._draft(entry.batch, entry.taps, entry.teacher, weighting))
            self._gradients.copy_(kept)
            recorded = entry.drafts[weighting.kind] = (graph, sums)
        recorded[0].replay()
        return recorded[1]

    def _replay_target(self, entry: _Recorded) -> None:
        if entry.target is None:

            def run() -> None:
                taps, teacher = self._read_target(entry.batch.ids)
                entry.taps.copy_(taps)
                if teacher is not None and entry.teacher is not None:
                    entry.teacher.ids.copy_(teacher.ids)
                    entry.teacher.probs.copy_(teacher.probs)

            entry.target, _ = self._record(run)
        entry.target.replay()

    def _record(self, run: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
        """``run`` as a graph; all graphs share one memory pool, for they never run at the same time. Recorded on the
        stream that the trainer works on: autograd joins the streams of a gradient's earlier uses, and the default
        stream must not become part of a recording."""
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = run()
        return graph, result
