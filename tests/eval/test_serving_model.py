"""The predicted closed loop: by hand where it can be, its limits where not, and steps beside those of a real card."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.kernel_model import KERNEL_CARDS, KernelTimes
from eval.roofline import Roofline
from eval.serving_model import Closed, Host, KernelStepTimes, RooflineTimes, Served, serve, served_lines
from eval.shapes import intermediate_size, load_card, load_shape

NO_HOST = Host(0.0, 0.0, 0.0, 0.0, delay=0.0)
MEASURED = {
    1: (2.856, 323.2, 27.5),
    4: (2.902, 1257.8, 33.2),
    8: (2.983, 2371.4, 47.8),
    16: (3.145, 4170.8, 81.2),
    32: (3.613, 6775.0, 135.0),
    64: (4.526, 9853.4, 277.4),
    128: (7.881, 9860.2, 533.4),
}
"""Mean milliseconds a token, tokens/s, and median milliseconds to the first token, by streams: a sweep of 284-token
prompts and 128-token answers, 5 s a point, up to eight client processes, Qwen3-4B shapes in bf16, no graphs of prompts,
one H200, 2026-11-30. Three host times were fitted to it."""
KERNELS_THEN = replace(KERNEL_CARDS["h200"], matrix_us=2.6, small_us=2.0, attention_us=7.5, lane_us=7.5, kv_share=0.7)
"""The sweep's: products of few rows started later than those of today, and one row attended as many do."""


@dataclass(frozen=True)
class Fixed:
    """A decode step of ``step`` seconds whatever it holds; a prompt row takes ``row``."""

    step: float = 0.01
    row: float = 0.0001

    def decode(self, sequences: int, context: float) -> float:
        return self.step

    def prompt(self, rows: int, length: int) -> float:
        return rows * self.row


def closed(streams: int = 1, prompt: int = 100, output: int = 11, seconds: float = 1e9, **changes: int) -> Closed:
    limits = {"batch_tokens": 8192, "most": 1024, **changes}
    return Closed(streams, prompt, output, seconds, **limits)


def test_one_stream_by_hand() -> None:
    # 1 ms in the front, 10 ms of prompt, 10 steps of 10 ms, and 1 ms of the front for each event.
    found = serve(closed(), Fixed(), Host(0.0, 0.0, 0.001, 0.001, delay=0.0))
    assert found.ttft == pytest.approx(0.012)
    assert found.tpot == pytest.approx(0.01)
    assert found.tokens_per_second == pytest.approx(11 / (0.012 + 0.1), rel=0.02)


def test_a_pass_with_prompt_rows_is_as_long_as_the_host_takes_to_start_it() -> None:
    found = serve(closed(), Fixed(), Host(0.05, 0.0, 0.0, 0.0, delay=0.0))
    assert found.ttft == pytest.approx(0.05)
    assert found.host_share == pytest.approx(0.04 / 0.15, rel=0.01)
    assert serve(closed(prompt=1000), Fixed(), Host(0.05, 0.0, 0.0, 0.0, delay=0.0)).ttft == pytest.approx(0.1)


def test_a_delay_is_each_requests_own() -> None:
    near, far = (serve(closed(streams=4), Fixed(), Host(0.0, 0.0, 0.0, 0.0, delay=delay)) for delay in (0.0, 0.03))
    assert far.ttft_p99 == pytest.approx(near.ttft_p99 + 0.03)
    assert far.tpot == pytest.approx(near.tpot)


def test_a_pass_of_few_prompt_rows_is_a_graph_that_no_host_starts() -> None:
    host = Host(0.05, 0.0, 0.0, 0.0, graph_rows=200, delay=0.0)
    assert serve(closed(prompt=200), Fixed(), host).ttft == pytest.approx(0.02)
    assert serve(closed(prompt=201), Fixed(), host).ttft == pytest.approx(0.05)


def test_prompts_beyond_a_steps_rows_wait_for_the_next() -> None:
    found = serve(closed(streams=4, batch_tokens=200), Fixed(), NO_HOST)
    assert found.ttft_p99 > found.ttft_p50
    assert serve(closed(streams=4, prompt=150, batch_tokens=100), Fixed(), NO_HOST).tokens_per_second > 0


def test_no_more_sequences_run_than_may() -> None:
    wide, narrow = (serve(closed(streams=8, most=most), Fixed(), NO_HOST) for most in (8, 2))
    # Eight prompts take 80 ms and their answers 100; two take 20 and 100.
    assert wide.tokens_per_second == pytest.approx(8 * 11 / 0.18, rel=0.01)
    assert narrow.tokens_per_second == pytest.approx(2 * 11 / 0.12, rel=0.01)
    assert narrow.ttft > 3 * wide.ttft


def test_a_slow_front_bounds_the_rate() -> None:
    found = serve(closed(streams=64, prompt=1), Fixed(step=0.001), Host(0.0, 0.0, 0.0, 0.001, delay=0.0))
    assert 900 < found.tokens_per_second <= 1000
    assert found.front > 0.9


def test_a_short_window_counts_only_what_was_delivered_in_it() -> None:
    found = serve(closed(seconds=0.055), Fixed(), NO_HOST)
    assert found.tokens_per_second == pytest.approx(5 / 0.055, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(
    streams=st.integers(1, 40),
    prompt=st.integers(1, 400),
    output=st.integers(1, 30),
    rows=st.integers(1, 300),
    most=st.integers(1, 40),
    request=st.floats(0, 0.01),
    event=st.floats(0, 0.001),
    passes=st.floats(0, 0.1),
)
def test_time_is_accounted_for_and_no_limit_is_passed(
    streams: int, prompt: int, output: int, rows: int, most: int, request: float, event: float, passes: float
) -> None:
    load = Closed(streams, prompt, output, 20.0, max(rows, most), most)
    found = serve(load, Fixed(), Host(passes, 0.0, request, event, delay=0.0))
    shares = found.decode_share + found.prompt_share + found.host_share + found.idle_share
    assert shares == pytest.approx(1.0, abs=1e-6)
    assert found.ttft_p50 <= found.ttft_p99
    assert found.ttft_p50 >= request + prompt * 0.0001 - 1e-9
    at_most = max(1.0, 0.01 / found.seconds) * streams * output / (prompt * 0.0001 + (output - 1) * 0.01)
    assert found.tokens_per_second <= at_most * 1.25 + 1
    if event:
        assert found.tokens_per_second * event <= 1.001


def test_more_host_time_never_makes_it_faster() -> None:
    shape = load_shape("qwen3-4b")
    times = RooflineTimes(Roofline(shape, load_card("t4")))
    found = [
        serve(closed(streams=8, prompt=200, output=40), times, Host(p, 0.0, 0.002, 1e-5, delay=0.0))
        for p in (0.0, 0.3, 0.9)
    ]
    assert [row.ttft for row in found] == sorted(row.ttft for row in found)
    assert found[2].tokens_per_second < found[0].tokens_per_second


@pytest.mark.parametrize("streams", sorted(MEASURED))
def test_a_sweep_of_the_card_is_met(streams: int) -> None:
    kernels = KernelTimes(load_shape("qwen3-4b"), intermediate_size("qwen3-4b"), "bf16", KERNELS_THEN)
    found: Served = serve(Closed(streams, 284, 128, 5.0, 8192, 128), KernelStepTimes(kernels), Host())
    tpot, rate, ttft = MEASURED[streams]
    assert found.tpot * 1e3 == pytest.approx(tpot, rel=0.10 if streams <= 64 else 0.30)
    assert found.tokens_per_second == pytest.approx(rate, rel=0.10)
    if streams <= 32:  # beyond it passes of many short prompts take longer than the kernel model says
        assert found.ttft_p50 * 1e3 == pytest.approx(ttft, rel=0.15)
    assert f"{found.tpot * 1e3:.2f}" in served_lines({str(streams): found.to_json()})[1]
