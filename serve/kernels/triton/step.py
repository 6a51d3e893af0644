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
ANCHOR = -1
"""A row's token: the newest token of its sequence."""


def drafted_token(place: int) -> int:
    """A row's token: the drafted one at ``place`` of the flat drafts."""
    return -2 - place


@dataclass(frozen=True)
class StepRows:
    """Rows as a pass takes them, all [T] int64: token_ids, positions, slots, visible (see FlatBatch)."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    visible: Tensor


@dataclass(frozen=True)
class StepState:
    """What a pass leaves for the next one, by place of the sequence in it: anchor and start [S] int32."""

    anchor: Tensor
    start: Tensor


def prepare_rows(
    rows: Tensor, tables: Tensor, state: StepState, drafts: Tensor, out: StepRows, page_size: int, scratch_page: int
) -> None:
    """rows [T, ROW_FIELDS] int32, tables [any, pages] int32, drafts [any] int64 -> ``out``, in place."""
    source.prepare_rows[(rows.shape[0],)](
        rows,
        tables,
        state.anchor,
        state.start,
        drafts,
        out.token_ids,
        out.positions,
        out.slots,
        out.visible,
        tables.stride(0),
        scratch_page,
        FIELDS=ROW_FIELDS,
        PAGE=page_size,
        **launch_options(out.slots.device, 1),
    )


def settle_rows(
    sequences: Tensor, rows: StepRows, best: Tensor, values: Tensor, state: StepState, result: Tensor, longest: int
) -> None:
    """sequences [T, SEQUENCE_FIELDS] int32, best [T] int64, values [T] float32 -> ``state``, and result [3, T] int32:
    each row's best token, each sequence's kept count, whether each row's logit is finite. longest: most drafted tokens
    of a sequence."""
    count = sequences.shape[0]
    source.settle_rows[(count,)](
        sequences,
        rows.token_ids,
        rows.positions,
        best,
        values,
        state.anchor,
        state.start,
        result,
        count,
        BLOCK=power_of_two(longest + 1),
        **launch_options(best.device, 1),
    )


def append_rows(taps: Tensor, rows: StepRows, window: Tensor, kept_taps: Tensor, kept_places: Tensor) -> None:
    """The first window[1] rows of taps [T, width] float32 and of ``rows`` go behind the first window[0] of kept_taps
    [any, width] and kept_places [2, any] int64 (positions, slots). window [2] int32."""
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
    rows: Tensor, tables: Tensor, state: StepState, drafts: Tensor, out: StepRows, page_size: int, scratch_page: int
) -> None:
    """Specification of ``prepare_rows``."""
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
    waiting, used = window.tolist()
    kept_taps[waiting : waiting + used] = taps[:used]
    kept_places[:, waiting : waiting + used] = torch.stack([rows.positions, rows.slots])[:, :used]


def settle_rows_eager(
    sequences: Tensor, rows: StepRows, best: Tensor, values: Tensor, state: StepState, result: Tensor, longest: int
) -> None:
    """Specification of ``settle_rows``."""
    first, drafted = sequences.long().unbind(1)
    column = torch.arange(longest, device=sequences.device)
    inside = column < drafted[:, None]
    at = (first[:, None] + column).clamp_max(len(best) - 1)
    agrees = inside & (rows.token_ids[(at + 1).clamp_max(len(best) - 1)] == best[at])
    kept = agrees.long().cumprod(1).sum(1)
    result[0], result[1], result[2] = best, kept, values.abs() < torch.inf
    state.anchor[: len(best)] = best[first + kept].int()
    state.start[: len(best)] = (rows.positions[first] + kept + 1).int()
