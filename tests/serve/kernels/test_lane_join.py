"""The join of a program's warps through shared memory, which only a card has: here an array stands for it, and every
thread's addresses are looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from serve.kernels.triton.source import lane_attention as source

WARPS = 8
THREADS = 32 * WARPS


@triton.jit  # type: ignore[untyped-decorator]
def join_both(sum_ptr, stat_ptr, out_ptr, scale, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """sum [4, 8, threads] and stat [4, threads] joined both ways into out [2, 8, threads]."""
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    at = sum_ptr + tl.arange(0, 8)[:, None, None] * (32 * WARPS) + thread
    c0 = tl.load(at)
    c1 = tl.load(at + 8 * 32 * WARPS)
    c2 = tl.load(at + 16 * 32 * WARPS)
    c3 = tl.load(at + 24 * 32 * WARPS)
    p0 = tl.load(stat_ptr + thread)
    p1 = tl.load(stat_ptr + 32 * WARPS + thread)
    n0 = tl.load(stat_ptr + 64 * WARPS + thread)
    n1 = tl.load(stat_ptr + 96 * WARPS + thread)
    ours = source.join_warps(thread * 0, thread, c0, c1, c2, c3, p0, p1, n0, n1, scale, WARPS)
    wanted = source.join_in_order(c0, c1, c2, c3, p0, p1, n0, n1, scale, WARPS)
    for i in tl.static_range(8):
        tl.store(out_ptr + i * (32 * WARPS) + thread, ours[i])
        tl.store(out_ptr + (8 + i) * (32 * WARPS) + thread, wanted[i])


class SharedMemory:
    """Words of four bytes. Between two meetings of all threads a place is written once, or always the same."""

    def __init__(self, size: int) -> None:
        self.words = np.full(size // 4, np.nan, dtype=np.float32)

    def keep(self, at: Any, *values: Any) -> None:
        shape = np.broadcast_shapes(at.handle.data.shape, *(value.handle.data.shape for value in values))
        places = np.broadcast_to(at.handle.data, shape).ravel()
        assert not (places % 16).any()
        for word, value in enumerate(values):
            given = np.broadcast_to(value.handle.data, shape).ravel()
            self.words[places // 4 + word] = given
            assert np.array_equal(self.words[places // 4 + word], given)

    def kept(self, at: Any) -> tuple[Any, ...]:
        found = [self.words[at.handle.data // 4 + word] for word in range(4)]
        assert not any(np.isnan(words).any() for words in found)
        return tuple(
            tl.core.tensor(_handle(words, at), tl.block_type(tl.float32, list(words.shape))) for words in found
        )


def _handle(words: np.ndarray[Any, Any], like: Any) -> Any:
    return type(like.handle)(words, tl.float32)


def test_warps_are_joined_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    shared = SharedMemory(source.JOIN_BYTES.value * WARPS)
    monkeypatch.setattr(source, "keep_sums", shared.keep)
    monkeypatch.setattr(source, "kept_sums", shared.kept)
    for name in ("meet", "meet_warp"):
        monkeypatch.setattr(source, name, lambda: None)
    sums = torch.randn(4, 8, THREADS, generator=generator)
    # Threads of a warp with the same t have the same rows; the first two warps and one row of the last saw nothing.
    stats = torch.randn(4, WARPS, 1, 4, generator=generator)
    stats[:2, :2] = -torch.inf
    stats[0, -1, :, 2] = -torch.inf
    stats[2:] = stats[2:].abs()
    out = torch.full((2, 8, THREADS), torch.nan)
    join_both[(1,)](sums, stats.expand(4, WARPS, 8, 4).reshape(4, THREADS).contiguous(), out, 0.7, WARPS=WARPS)
    assert torch.isfinite(out[:, :4]).all()
    torch.testing.assert_close(out[0], out[1], rtol=1e-5, atol=1e-6)
    assert len(set(out[0, 0].tolist())) == THREADS
