"""Device code of programmatic dependent launch (Hopper on): a kernel may start while the one before it still runs.

Every kernel calls ``await_inputs`` before it touches memory that another kernel writes or reads, so the order of the
stream holds: a kernel is done only after the one before it was. What is older than the step's embedding may be read
before: ``embed_rows`` lets others in only behind its own wait, so all that was written before it is there. Such loads
go past the L1, which may hold an older step's. Knows no kernels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Waits until all earlier kernels are done and their writes are seen. Without PDL nothing."""
    if PDL:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def admit_next(PDL: tl.constexpr):
    """Lets the next kernel's programs take free room once all of this kernel's have come here. A kernel of few
    programs says so at once; one that fills the card near its end, lest the next one's programs crowd where room
    happens to come free first (but for streams that leave room: ``GemmTile.early``)."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def admit_next_when(now, PDL: tl.constexpr):
    """As ``admit_next``, where ``now``, a scalar, holds; the first time counts."""
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p griddepcontrol.launch_dependents; mov.b32 $0, 0; }", "=r,r",
            [now.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def fetch_ahead(base_ptr, offset, first, last, BYTES: tl.constexpr):
    """Brings BYTES of each row (from element ``first``, none past ``last``) into the L2: a hint, so that constant data
    streams while earlier kernels end. offset [rows] in elements."""
    WIDTH: tl.constexpr = base_ptr.dtype.element_ty.primitive_bitwidth // 8
    LINE: tl.constexpr = 128 // WIDTH
    place = tl.minimum(first + tl.arange(0, BYTES // 128) * LINE, last - 1)
    lines = (base_ptr + offset[:, None] + place[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )
