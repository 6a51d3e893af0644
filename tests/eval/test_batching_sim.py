from __future__ import annotations

import pytest

from eval.batching_sim import Job, compare, continuous_batching, main, make_jobs, static_batching


def test_static_batching_holds_a_short_answer_until_the_longest_is_done() -> None:
    jobs = [Job(0.0, 0, 20), Job(0.0, 0, 2000)]
    held = static_batching(jobs, 2, 1e9)
    assert held.steps == 2000
    assert held.mean_latency == 2000
    assert held.waste == pytest.approx(1 - 2020 / 4000)
    free = continuous_batching(jobs, 2, 1e9, chunked=True)
    assert free.mean_latency == pytest.approx((20 + 2000) / 2)


def test_a_newcomer_joins_between_two_steps() -> None:
    jobs = [Job(0.0, 0, 100), Job(10.0, 0, 5)]
    assert continuous_batching(jobs, 2, 1e9, chunked=True).mean_latency == pytest.approx((100 + 5) / 2)
    assert static_batching(jobs, 2, 1e9).mean_latency == pytest.approx((100 + 95) / 2)


def test_prefill_that_stops_decoding_stalls_what_chunked_prefill_does_not() -> None:
    jobs = [Job(0.0, 0, 50), Job(5.0, 40, 5)]
    stopped = continuous_batching(jobs, 2, 10.0, chunked=False)
    chunked = continuous_batching(jobs, 2, 10.0, chunked=True)
    assert stopped.stall == pytest.approx(4 / stopped.steps)
    assert chunked.stall == 0
    assert stopped.steps == chunked.steps + 4


def test_policies_are_ordered_under_load_and_lose_no_token() -> None:
    jobs = make_jobs(200, 0.1, seed=3)
    static, stopping, chunked = compare(jobs, 16, 200.0)
    assert chunked.tokens_per_step >= stopping.tokens_per_step > static.tokens_per_step
    assert chunked.mean_latency <= stopping.mean_latency < static.mean_latency
    total = sum(job.output for job in jobs)
    for outcome in (static, stopping, chunked):
        assert outcome.tokens_per_step * outcome.steps == pytest.approx(total)
    assert main(["--jobs", "20"]) == 0
