"""The predicted closed loop: by hand where it can be, its limits where not, and steps beside those of a real card."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.kernel_model import KERNEL_CARDS, KernelTimes
from eval.roofline import Roofline
from eval.serving_model import Closed, Host, KernelStepTimes, RooflineTimes, Served, serve, served_lines
from eval.shapes import intermediate_size, load_card, load_shape

NO_HOST = Host(0.0, 0.0, 0.0, 0.0)
MEASURED = {
    1: (2.776, 329.3),
    4: (2.954, 1194.7),
    8: (3.021, 2315.0),
    16: (3.218, 3952.3),
    32: (4.037, 5458.7),
    64: (5.335, 8588.3),
}
"""Mean milliseconds a token and tokens/s by streams: a sweep of 284-token prompts and 128-token answers, 3 s a point,
Qwen3-4B shapes in bf16, one H200, 2026-11-30. The point of 32 holds 0.4 s in which a kernel was compiled."""


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
    found = serve(closed(), Fixed(), Host(0.0, 0.0, 0.001, 0.001))
    assert found.ttft == pytest.approx(0.012)
    assert found.tpot == pytest.approx(0.01)
    assert found.tokens_per_second == pytest.approx(11 / (0.012 + 0.1), rel=0.02)


def test_a_pass_with_prompt_rows_is_as_long_as_the_host_takes_to_start_it() -> None:
    found = serve(closed(), Fixed(), Host(0.05, 0.0, 0.0, 0.0))
    assert found.ttft == pytest.approx(0.05)
    assert found.host_share == pytest.approx(0.04 / 0.15, rel=0.01)
    assert serve(closed(prompt=1000), Fixed(), Host(0.05, 0.0, 0.0, 0.0)).ttft == pytest.approx(0.1)


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
    found = serve(closed(streams=64, prompt=1), Fixed(step=0.001), Host(0.0, 0.0, 0.0, 0.001))
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
    found = serve(load, Fixed(), Host(passes, 0.0, request, event))
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
    found = [serve(closed(streams=8, prompt=200, output=40), times, Host(p, 0.0, 0.002, 1e-5)) for p in (0.0, 0.3, 0.9)]
    assert [row.ttft for row in found] == sorted(row.ttft for row in found)
    assert found[2].tokens_per_second < found[0].tokens_per_second


@pytest.mark.parametrize("streams", sorted(MEASURED))
def test_a_sweep_of_the_card_is_met(streams: int) -> None:
    kernels = KernelTimes(load_shape("qwen3-4b"), intermediate_size("qwen3-4b"), "bf16", KERNEL_CARDS["h200"])
    found: Served = serve(Closed(streams, 284, 128, 3.0, 8192, 128), KernelStepTimes(kernels), Host())
    tpot, rate = MEASURED[streams]
    assert found.tpot * 1e3 == pytest.approx(tpot, rel=0.15)
    assert found.tokens_per_second == pytest.approx(rate, rel=0.3 if streams >= 32 else 0.15)
    assert f"{found.tpot * 1e3:.2f}" in served_lines({str(streams): found.to_json()})[1]
