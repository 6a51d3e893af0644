"""Where a prompt's and a burst's time goes in the engine: by the clock, and on the device kernel by kernel.

The device is idle wherever no kernel runs: such gaps are named by the kernels around them. Knows the engine; no HTTP
and no report.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from eval.device_http import prompt_ids
from serve.engine.engine import Engine
from serve.protocol import SamplingParams

LEAST_GAP_MS = 0.02
SHOWN = 8


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel (or a copy) on the device: ms from the first one's start."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Gap:
    """Time in which nothing ran, between the end of one kernel and the start of another."""

    before: str
    after: str
    ms: float


def answered(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[float]]:
    """Milliseconds until all prompts, added at once, have ``tokens`` tokens each; and of each step."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for number, ids in enumerate(prompts):
        engine.add(str(number), ids, params)
    steps = []
    while engine.has_work:
        begun = time.perf_counter()
        failed = [output.error for output in engine.step() if output.finish_reason == "error"]
        if failed:
            raise RuntimeError(f"a prompt failed: {failed[0]}")
        steps.append((time.perf_counter() - begun) * 1e3)
    return (time.perf_counter() - started) * 1e3, steps


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` random prompts of ``length`` tokens."""
    return [prompt_ids(length, 1000 * seed + index) for index in range(count)]


def kernels_of(work: Callable[[], object]) -> list[Kernel]:
    """What ran on the device during ``work``, in order of their starts."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    results = recorded.profiler.kineto_results.events()
    found = [
        (event.start_ns(), event.duration_ns(), event.name())
        for event in results
        if event.device_type() == torch._C._autograd.DeviceType.CUDA
    ]
    if not found:
        raise RuntimeError("the profiler saw no kernel")
    found.sort()
    first = found[0][0]
    return [Kernel(name, (at - first) / 1e6, (at - first + took) / 1e6) for at, took, name in found]


def gaps_of(kernels: Sequence[Kernel]) -> list[Gap]:
    """Every time in which nothing ran, in order."""
    gaps = []
    last = kernels[0]
    for kernel in kernels[1:]:
        if kernel.start > last.end:
            gaps.append(Gap(last.name, kernel.name, kernel.start - last.end))
        if kernel.end > last.end:
            last = kernel
    return gaps


def timeline(title: str, work: Callable[[], object]) -> list[str]:
    """Span, idle time and its largest parts, and the dearest kernels of ``work``, as lines of text. Kernels that start
    while others end count twice in their own sums, and once in the span."""
    kernels = kernels_of(work)
    gaps = gaps_of(kernels)
    span = max(kernel.end for kernel in kernels)
    idle = sum(gap.ms for gap in gaps)
    long = [gap for gap in gaps if gap.ms >= LEAST_GAP_MS]
    lines = [
        f"{title}: {span:.2f} ms from the first kernel to the last, idle {idle:.2f} ms, of which "
        f"{sum(gap.ms for gap in long):.2f} ms in {len(long)} gaps of {LEAST_GAP_MS * 1e3:.0f} us or more"
    ]
    places: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for gap in gaps:
        places[gap.before, gap.after] += gap.ms  # type: ignore[assignment]
        counts[gap.before, gap.after] += 1
    for (before, after), ms in places.most_common(SHOWN):
        lines.append(f"  idle {ms:8.3f} ms {counts[before, after]:6} x {before[:40]} -> {after[:40]}")
    busy: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for kernel in kernels:
        busy[kernel.name] += kernel.end - kernel.start  # type: ignore[assignment]
        runs[kernel.name] += 1
    for name, ms in busy.most_common(2 * SHOWN):
        lines.append(f"  busy {ms:8.3f} ms {runs[name]:6} x {name[:80]}")
    return lines
