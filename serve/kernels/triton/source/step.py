"""Device code around a step whose lengths only the device knows: where each row goes before the pass, what was kept
after it. Knows no layers.

A sequence's state between two passes is its newest token (anchor) and that token's position (start); a row says where
to read them: from the state the last pass left, or from the row itself.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next, await_inputs


@triton.jit
def card_time():
    """Nanoseconds of the card's clock."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["rows", "table_stride", "scratch_page", "moment", "moments"])
def prepare_rows(
    packed_ptr, table_ptr, anchor_ptr, start_ptr, draft_ptr,
    token_ptr, position_ptr, slot_ptr, visible_ptr, kept_ptr, window_ptr, time_ptr,
    rows, table_stride, scratch_page, moment, moments,
    FIELDS: tl.constexpr, KEPT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row. packed, which may be the host's memory: FIELDS numbers a row, then KEPT a row that are copied
    to kept_ptr, then WINDOW that are copied to window_ptr. Fields of a row: state (place of its sequence in the last
    pass, or -1), start (where state is -1), offset behind the start, reach (how far behind the start it sees), table,
    end (positions that have pages), token: one that is >= 0, -1 for the anchor, -2 - i for draft i. A row at or behind
    its end goes to the scratch page and sees nothing. The last of WINDOW is the turn, whose time ``moment`` of its
    ``moments`` is now. ASM: not interpreted."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0)
    # All that may come from the host is asked for before any of it is used.
    field = packed_ptr + row * FIELDS
    state = tl.load(field)
    start = tl.load(field + 1)
    offset = tl.load(field + 2)
    reach = tl.load(field + 3)
    table = tl.load(field + 4)
    end = tl.load(field + 5)
    token = tl.load(field + 6)
    i = tl.arange(0, BLOCK)
    own = i < KEPT
    last = (row == 0) & (i >= KEPT) & (i < KEPT + WINDOW)
    copied = tl.load(packed_ptr + rows * FIELDS + tl.where(own, row * KEPT, (rows - 1) * KEPT) + i, mask=own | last)
    if ASM:
        turn = tl.load(packed_ptr + rows * (FIELDS + KEPT) + WINDOW - 1, mask=row == 0, other=0)
        tl.store(time_ptr + turn * moments + moment, card_time(), mask=row == 0)
    start = tl.where(state >= 0, tl.load(start_ptr + tl.maximum(state, 0)), start)
    position = start + offset
    seen = tl.minimum(start + reach, end)
    inside = position < end
    position = tl.where(inside, position, 0)
    page = tl.load(table_ptr + table * table_stride + position // PAGE, mask=inside, other=scratch_page)
    anchor = tl.load(anchor_ptr + tl.maximum(state, 0))
    drafted = tl.load(draft_ptr + tl.maximum(-2 - token, 0))
    token = tl.where(token == -1, anchor, tl.where(token < -1, drafted, token))
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(position_ptr + row, position.to(tl.int64))
    tl.store(slot_ptr + row, page.to(tl.int64) * PAGE + position % PAGE)
    tl.store(visible_ptr + row, tl.where(inside, seen, 0).to(tl.int64))
    tl.store(kept_ptr + row * KEPT + i, copied, mask=own)
    tl.store(window_ptr + i - KEPT, copied, mask=last)


@triton.jit(do_not_specialize=["rows", "result_stride", "moments"])
def settle_rows(
    sequence_ptr, token_ptr, position_ptr, best_ptr, value_ptr, anchor_ptr, start_ptr, result_ptr, turn_ptr, time_ptr,
    rows, result_stride, moments, BLOCK: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program i: row i's best token and whether its logit is finite into result [3, rows] (lines 0 and 2); and for
    sequence i, given by its first row and how many drafted tokens follow it, how many of them the target agreed with
    (line 1), its new anchor and start. The result of this turn starts turn * result_stride numbers behind result_ptr,
    in what may be the host's memory; the last of the turn's ``moments`` times is now. ASM: not interpreted."""
    admit_next(PDL)
    await_inputs(PDL)
    i = tl.program_id(0)
    value = tl.load(value_ptr + i)
    turn = tl.load(turn_ptr)
    result_ptr += turn * result_stride
    tl.store(result_ptr + i, tl.load(best_ptr + i).to(tl.int32))
    tl.store(result_ptr + 2 * rows + i, (tl.abs(value) < float("inf")).to(tl.int32))
    first = tl.load(sequence_ptr + 2 * i)
    drafted = tl.load(sequence_ptr + 2 * i + 1)
    column = tl.arange(0, BLOCK)
    counts = column < drafted
    draft = tl.load(token_ptr + first + 1 + column, mask=counts, other=-1)
    best = tl.load(best_ptr + first + column, mask=counts, other=-2)
    kept = tl.min(tl.where(counts & (draft == best), BLOCK, column), axis=0)
    tl.store(result_ptr + rows + i, kept)
    tl.store(anchor_ptr + i, tl.load(best_ptr + first + kept).to(tl.int32))
    tl.store(start_ptr + i, (tl.load(position_ptr + first) + kept + 1).to(tl.int32))
    if ASM:
        tl.store(time_ptr + turn * moments + moments - 1, card_time(), mask=i == 0)


@triton.jit(do_not_specialize=["width"])
def append_rows(
    tap_ptr, position_ptr, slot_ptr, window_ptr, kept_tap_ptr, kept_position_ptr, kept_slot_ptr,
    width, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of a row's taps, behind the rows that wait already; the first one of a row takes its
    position and slot along. window: how many wait, how many rows of this pass are no padding."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0)
    if row < tl.load(window_ptr + 1):
        place = (tl.load(window_ptr) + row).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        taps = tl.load(tap_ptr + row.to(tl.int64) * width + column, mask=mask)
        tl.store(kept_tap_ptr + place * width + column, taps, mask=mask)
        if tl.program_id(1) == 0:
            tl.store(kept_position_ptr + place, tl.load(position_ptr + row))
            tl.store(kept_slot_ptr + place, tl.load(slot_ptr + row))
