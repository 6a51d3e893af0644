"""Launches the kernels around a step whose lengths only the device knows. Twins: ``prepare_rows_eager`` and
``settle_rows_eager``, which say the same in torch. Knows no layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve.kernels.triton.card import launch_options
from serve.kernels.triton.rows import power_of_two
from serve.kernels.triton.source import step as source
from serve.kernels.triton.tiles import APPEND_BLOCK

ROW_FIELDS = 7
"""state, start, offset, reach, table, end, token (see source/step.py)."""
SEQUENCE_FIELDS = 2
"""First row, drafted tokens behind it."""
SPAN_FIELDS = 3
"""First row, end row and the place of the first row among a kernel's rows (see Spans)."""
WINDOW_FIELDS = 3
"""Behind the fields of a pass: how many rows wait for the drafter, how many come from this pass to wait, and whose turn
it is to be answered."""
DRAFT, VERIFY, DONE = range(3)
"""Moments of a step: its draft pass begins, the pass behind it begins, and ends."""
MOMENTS = 3
ANCHOR = -1
"""A row's token: the newest token of its sequence."""


def drafted_token(place: int) -> int:
    """A row's token: the one at ``place`` of the rows of the draft pass."""
    return -2 - place


@dataclass(frozen=True)
class StepRows:
    """Rows as a pass takes them, all [T] int64: token_ids, positions, slots, visible (see FlatBatch)."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    visible: Tensor


@dataclass(frozen=True)
class StepFields:
    """What the other kernels of a pass read of what the host packed: sequences [T, SEQUENCE_FIELDS] and spans [T,
    SPAN_FIELDS] in one buffer, window [WINDOW_FIELDS], all int32."""

    kept: Tensor
    window: Tensor

    @property
    def sequences(self) -> Tensor:
        return self.kept[: self._rows * SEQUENCE_FIELDS].view(-1, SEQUENCE_FIELDS)

    @property
    def spans(self) -> Tensor:
        return self.kept[self._rows * SEQUENCE_FIELDS :].view(-1, SPAN_FIELDS)

    @property
    def _rows(self) -> int:
        return len(self.kept) // (SEQUENCE_FIELDS + SPAN_FIELDS)


@dataclass(frozen=True)
class StepAnswers:
    """What the host is told of a pass, on the device or in pinned host memory, a line a turn: results [turns, any]
    int32, of which a pass of T rows takes the start as [3, T]: each row's best token, each sequence's kept count,
    whether each row's logit is finite; times [turns, MOMENTS] int64 nanoseconds, which a card alone writes."""

    results: Tensor
    times: Tensor


@dataclass(frozen=True)
class StepState:
    """What a pass leaves for the next one, by place of the sequence in it: anchor and start [S] int32."""

    anchor: Tensor
    start: Tensor


def prepare_rows(
    packed: Tensor,
    tables: Tensor,
    state: StepState,
    drafts: Tensor,
    out: StepRows,
    fields: StepFields,
    answers: StepAnswers,
    moment: int,
    page_size: int,
    scratch_page: int,
) -> None:
    """packed [any] int32, on the device or in pinned host memory: rows [T, ROW_FIELDS], then what ``fields`` takes a
    copy of; tables [any, pages] int32, drafts [any] int32 -> ``out`` and ``fields``, in place. moment: which of the
    turn's times it is."""
    rows, kept = out.slots.shape[0], SEQUENCE_FIELDS + SPAN_FIELDS
    source.prepare_rows[(rows,)](
        packed,
        tables,
        state.anchor,
        state.start,
        drafts,
        out.token_ids,
        out.positions,
        out.slots,
        out.visible,
        fields.kept,
        fields.window,
        answers.times,
        rows,
        tables.stride(0),
        scratch_page,
        moment,
        MOMENTS,
        FIELDS=ROW_FIELDS,
        KEPT=kept,
        WINDOW=WINDOW_FIELDS,
        PAGE=page_size,
        BLOCK=power_of_two(kept + WINDOW_FIELDS),
        ASM=out.slots.device.type == "cuda",
        **launch_options(out.slots.device, 1),
    )


def settle_rows(
    fields: StepFields,
    rows: StepRows,
    best: Tensor,
    values: Tensor,
    state: StepState,
    answers: StepAnswers,
    longest: int,
) -> None:
    """best [T] int64, values [T] float32 -> ``state``, and the turn's line of ``answers``. longest: most drafted tokens
    of a sequence."""
    count = best.shape[0]
    source.settle_rows[(count,)](
        fields.sequences,
        rows.token_ids,
        rows.positions,
        best,
        values,
        state.anchor,
        state.start,
        answers.results,
        fields.window[WINDOW_FIELDS - 1 :],
        answers.times,
        count,
        answers.results.stride(0),
        MOMENTS,
        BLOCK=power_of_two(longest + 1),
        ASM=best.device.type == "cuda",
        **launch_options(best.device, 1),
    )


def append_rows(taps: Tensor, rows: StepRows, window: Tensor, kept_taps: Tensor, kept_places: Tensor) -> None:
    """The first window[1] rows of taps [T, width] float32 and of ``rows`` go behind the first window[0] of kept_taps
    [any, width] and kept_places [2, any] int64 (positions, slots). window [at least 2] int32."""
    count, width = taps.shape
    source.append_rows[(count, -(-width // APPEND_BLOCK))](
        taps,
        rows.positions,
        rows.slots,
        window,
        kept_taps,
        kept_places[0],
        kept_places[1],
        width,
        BLOCK=APPEND_BLOCK,
        **launch_options(taps.device, 4),
    )


def prepare_rows_eager(
    packed: Tensor,
    tables: Tensor,
    state: StepState,
    drafts: Tensor,
    out: StepRows,
    fields: StepFields,
    answers: StepAnswers,
    moment: int,
    page_size: int,
    scratch_page: int,
) -> None:
    """Specification of ``prepare_rows``, without the time."""
    packed, count = packed.to(out.slots.device), out.slots.shape[0]
    rows = packed[: count * ROW_FIELDS].view(count, ROW_FIELDS)
    fields.kept.copy_(packed[count * ROW_FIELDS : -WINDOW_FIELDS])
    fields.window.copy_(packed[-WINDOW_FIELDS:])
    place, start, offset, reach, table, end, token = rows.long().unbind(1)
    known = place < 0
    start = torch.where(known, start, state.start.long()[place.clamp_min(0)])
    position = start + offset
    inside = position < end
    position = torch.where(inside, position, 0)
    page = torch.where(inside, tables.long()[table, position // page_size], scratch_page)
    anchor = state.anchor.long()[place.clamp_min(0)]
    drafted = drafts[(-2 - token).clamp_min(0)]
    out.token_ids.copy_(torch.where(token == ANCHOR, anchor, torch.where(token < ANCHOR, drafted, token)))
    out.positions.copy_(position)
    out.slots.copy_(page * page_size + position % page_size)
    out.visible.copy_(torch.where(inside, torch.minimum(start + reach, end), 0))


def append_rows_eager(taps: Tensor, rows: StepRows, window: Tensor, kept_taps: Tensor, kept_places: Tensor) -> None:
    """Specification of ``append_rows``."""
    waiting, used = window[:2].tolist()
    kept_taps[waiting : waiting + used] = taps[:used]
    kept_places[:, waiting : waiting + used] = torch.stack([rows.positions, rows.slots])[:, :used]


def settle_rows_eager(
    fields: StepFields,
    rows: StepRows,
    best: Tensor,
    values: Tensor,
    state: StepState,
    answers: StepAnswers,
    longest: int,
) -> None:
    """Specification of ``settle_rows``, without the time."""
    first, drafted = fields.sequences.long().unbind(1)
    column = torch.arange(longest, device=best.device)
    inside = column < drafted[:, None]
    at = (first[:, None] + column).clamp_max(len(best) - 1)
    agrees = inside & (rows.token_ids[(at + 1).clamp_max(len(best) - 1)] == best[at])
    kept = agrees.long().cumprod(1).sum(1)
    result = answers.results[int(fields.window[-1]), : 3 * len(best)].view(3, -1)
    result[0], result[1], result[2] = best, kept, values.abs() < torch.inf
    state.anchor[: len(best)] = best[first + kept].int()
    state.start[: len(best)] = (rows.positions[first] + kept + 1).int()
