"""Every worked number of the capacity exercise and of the roofline note, to four digits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from eval import capacity
from eval.kv_capacity import (
    Hardware,
    Lengths,
    Plan,
    fixed_link,
    kv_pool,
    kv_read_crossover,
    lengths,
    overflow,
    parse_length,
)
from eval.roofline import (
    Roofline,
    acceptance_length,
    decompose_step,
    expected_speedup,
    live_context,
    speculative_speedup,
    ttft_knee,
    verify_cost,
)
from eval.shapes import Card, dense, load_card, load_shape, shape_from_config

EIGHT = dense("8B", 8.03e9, layers=32, kv_heads=8, head_dim=128)
LARGE = dense("405B", 405e9, layers=126, kv_heads=8, head_dim=128, hidden=16384)
H100 = Hardware(usable=68e9, bandwidth=0.7 * 3.35e12)
QWEN8 = dense("Qwen3-8B", 8.19e9, layers=36, kv_heads=8, head_dim=128)


def four(value: float) -> object:
    return pytest.approx(value, rel=5e-4)


@pytest.mark.parametrize(
    ("kv_format", "kv_heads", "per_token", "per_request", "tokens", "gib_tokens", "blocks", "longest", "paged"),
    [
        ("fp16", 8, 131_072, 4.295e9, 403_900, 444_407, 25_243, (12, 13), (161, 177)),
        ("fp16", 32, 524_288, 17.18e9, 100_975, 111_101, 6_310, (3, 3), (40, 44)),
        ("fp8", 8, 65_536, 2.147e9, 807_800, 888_815, 50_487, (24, 27), (323, 355)),
        ("fp8", 32, 262_144, 8.59e9, 201_950, 222_203, 12_621, (6, 6), (80, 88)),
    ],
)
def test_part_one_of_the_exercise(
    kv_format: str,
    kv_heads: int,
    per_token: int,
    per_request: float,
    tokens: int,
    gib_tokens: int,
    blocks: int,
    longest: tuple[int, int],
    paged: tuple[int, int],
) -> None:
    model = EIGHT.with_kv(kv_format, kv_heads)
    assert model.kv_bytes_per_token == per_token
    assert model.kv_bytes_per_token * 32_768 == four(per_request)
    pool, gib = kv_pool(model, 80e9), kv_pool(model, 80 * 2**30)
    assert pool.bytes == four(52.94e9)
    assert gib.bytes == four(58.25e9)
    assert pool.tokens == four(tokens)
    assert gib.tokens == four(gib_tokens)
    assert abs(pool.blocks - blocks) <= 1
    assert (int(pool.requests(32_768)), int(gib.requests(32_768))) == longest
    assert (int(pool.requests(2500)), int(gib.requests(2500))) == paged


def test_weights_blocks_and_crossover_of_part_one() -> None:
    assert EIGHT.weight_bytes == four(16.06e9)
    assert EIGHT.weight_bytes / 2**30 == four(14.96)
    assert kv_pool(EIGHT, 80 * 2**30).blocks == 27_775
    assert kv_pool(EIGHT, 80e9).requests(32_768) == four(12.33)
    assert kv_pool(EIGHT, 80e9).requests(2500) == four(161.56)
    assert kv_pool(EIGHT, 80e9).requests_in_blocks(2500) == 160
    assert kv_pool(EIGHT, 80 * 2**30).requests_in_blocks(2500) == 176
    assert kv_pool(EIGHT.with_kv("fp8"), 80e9).requests_in_blocks(2500) == 321
    assert kv_read_crossover(EIGHT) == 122_528
    assert kv_read_crossover(EIGHT.with_kv("fp16", 32)) == four(30_632)
    assert kv_read_crossover(EIGHT.with_kv("fp8")) == four(245_056)
    assert kv_read_crossover(EIGHT.with_kv("fp8", 32)) == four(61_264)


def test_a_full_pool_sets_the_step_time() -> None:
    read = EIGHT.weight_bytes + kv_pool(EIGHT, 80e9).bytes
    assert read == four(69.0e9)
    assert read / (0.7 * 3.35e12) == four(29.42e-3)
    assert read / (0.7 * 2.039e12) == four(48.34e-3)


def test_weights_that_do_not_fit_are_refused_with_the_figures() -> None:
    with pytest.raises(ValueError, match=r"810\.00 GB .* exceed 72\.00 GB"):
        kv_pool(LARGE, 80e9)


@pytest.mark.parametrize(
    ("weights", "tensor", "pipeline", "pool", "per_card", "tokens", "at_8192", "at_8000", "fp8_8192", "fp8_8000"),
    [
        ("fp8", 8, 1, 139e9, 64_512, 269_329, 32, 33, 65, 67),
        ("fp16", 8, 2, 278e9, 32_256, 538_659, 65, 67, 131, 134),
        ("fp16", 16, 1, 278e9, 64_512, 269_329, 32, 33, 65, 67),
    ],
)
def test_plans_of_part_two(
    weights: str,
    tensor: int,
    pipeline: int,
    pool: float,
    per_card: int,
    tokens: int,
    at_8192: int,
    at_8000: int,
    fp8_8192: int,
    fp8_8000: int,
) -> None:
    plan = Plan("", tensor, pipeline, LARGE.with_weights(weights), H100)
    assert plan.weights_per_card == four(50.625e9)
    assert plan.free_per_card == four(17.375e9)
    assert plan.pool_bytes == four(pool)
    assert plan.kv_bytes_per_token_per_card == per_card
    assert plan.tokens == tokens
    assert (plan.concurrency(8192), plan.concurrency(8000)) == (at_8192, at_8000)
    small = Plan("", tensor, pipeline, LARGE.with_weights(weights).with_kv("fp8"), H100)
    assert (small.concurrency(8192), small.concurrency(8000)) == (fp8_8192, fp8_8000)


def test_weights_kv_and_request_of_part_two() -> None:
    assert LARGE.weight_bytes == four(810e9)
    assert LARGE.with_weights("fp8").weight_bytes == four(405e9)
    assert LARGE.kv_bytes_per_token == 516_096
    assert LARGE.with_kv("fp8").kv_bytes_per_token == 258_048
    assert LARGE.kv_bytes_per_token * 8192 == four(4.228e9)
    assert LARGE.kv_bytes_per_token * 8192 / 2**30 == four(3.938)
    assert LARGE.with_kv("fp8").kv_bytes_per_token * 8192 == four(2.114e9)
    assert LARGE.kv_bytes_per_token * 8000 == four(4.129e9)
    assert not Plan("", 8, 1, LARGE, H100).fits
    assert Plan("", 8, 1, LARGE, H100).weights_per_card == four(101.25e9)
    assert kv_read_crossover(LARGE.with_weights("fp8")) == 784_738


def test_times_of_part_two() -> None:
    one = Plan("", 8, 1, LARGE.with_weights("fp8"), H100)
    piped, wide = Plan("", 8, 2, LARGE, H100), Plan("", 16, 1, LARGE, H100)
    assert one.weight_seconds == four(21.59e-3)
    assert (piped.stage_weight_seconds, piped.weight_seconds) == (four(21.59e-3), four(43.18e-3))
    assert wide.weight_seconds == four(21.59e-3)
    assert one.kv_seconds(32, 8192) == four(7.212e-3)
    assert one.weight_seconds + one.kv_seconds(32, 8192) == four(28.80e-3)
    assert piped.weight_seconds + piped.kv_seconds(32, 8192) == four(50.39e-3)
    assert wide.weight_seconds + wide.kv_seconds(32, 8192) == four(28.80e-3)
    assert one.allreduces == 252
    assert one.collective_seconds() == four(2.52e-3)
    networks = [replace(H100, network=fixed_link("network", latency * 1e-6)) for latency in (20, 30, 50)]
    assert [replace(wide, hardware=hardware).collective_seconds() for hardware in networks] == [
        four(5.04e-3),
        four(7.56e-3),
        four(12.6e-3),
    ]
    assert one.headroom_tokens(0.040) == four(669_255)
    assert piped.headroom_tokens(0.040) < 0
    peak = Hardware(usable=68e9, bandwidth=3.35e12)
    assert Plan("", 8, 1, LARGE.with_weights("fp8"), peak).weight_seconds == four(15.11e-3)
    assert Plan("", 8, 2, LARGE, peak).weight_seconds == four(30.22e-3)


def test_more_ranks_than_kv_heads_store_each_head_more_than_once() -> None:
    wide = Plan("", 16, 1, LARGE, H100)
    assert (wide.kv_heads_per_card, wide.kv_copies, wide.crosses_nodes) == (1, 2.0, True)
    assert Plan("", 4, 1, LARGE, H100).kv_copies == 1.0


@pytest.mark.parametrize(
    ("bandwidth", "ridge", "ceiling", "no_knee", "asymptote", "at_1k", "per_user"),
    [
        (1935e9, 161.2, 118.13, 689, 13_123, (117.1, 1653, 4802, 7037, 9171), (103.3, 75.0, 55.0)),
        (2039e9, 153.0, 124.48, 726, 13_828, (123.4, 1742, 5060, 7415, 9664), (108.9, 79.1, 57.9)),
    ],
)
def test_roofline_of_the_note(
    bandwidth: float,
    ridge: float,
    ceiling: float,
    no_knee: float,
    asymptote: float,
    at_1k: tuple[float, ...],
    per_user: tuple[float, ...],
) -> None:
    card = Card("a100", "A100", 80e9, bandwidth, 312e12, "")
    line = Roofline(QWEN8, card)
    # The note rounds KV to 0.147 GB per 1k tokens; 996.907 tokens of 147,456 bytes are exactly that.
    rounded = 0.147e9 / 147_456
    assert QWEN8.kv_bytes_per_token == 147_456
    assert card.ridge == four(ridge)
    assert line.naive_knee() == four(ridge)
    assert line.batch_one_ceiling() == four(ceiling)
    assert line.half_saturation(1000) == four(111.1)
    assert line.half_saturation(rounded) == four(111.4)
    assert 111 <= line.intensity_asymptote(1000) <= 112
    assert line.knee(1000) is None
    assert line.no_knee_context() == pytest.approx(no_knee, abs=0.6)
    assert line.asymptote(1000) == four(asymptote)
    assert line.compute_roof() == four(19_048)
    assert [line.throughput(batch, rounded) for batch in (1, 16, 64, 128, 256)] == [four(value) for value in at_1k]
    assert [line.throughput(batch, rounded) / batch for batch in (16, 64, 128)] == [
        pytest.approx(value, abs=0.05) for value in per_user
    ]


def test_curves_at_the_mean_live_context_and_at_8k() -> None:
    sxm = Roofline(QWEN8, load_card("a100-sxm"))
    pcie = Roofline(QWEN8, load_card("a100-pcie"))
    assert live_context(1000, 1000) == 1500
    assert [sxm.throughput(batch, 1500) for batch in (16, 32, 64, 128)] == [four(v) for v in (1638, 2781, 4274, 5840)]
    steps = [sxm.step_seconds(batch, 1500) * 1000 for batch in (16, 32, 64, 128)]
    assert steps == [four(value) for value in (9.77, 11.50, 14.98, 21.92)]
    assert pcie.half_saturation(8000) == pytest.approx(13.9, abs=0.05)
    assert (pcie.asymptote(8000), sxm.asymptote(8000)) == (four(1640), four(1728))
    assert [pcie.throughput(batch, 8000) for batch in (16, 64, 128)] == [four(v) for v in (878, 1348, 1480)]
    assert [sxm.throughput(batch, 8000) for batch in (16, 64, 128)] == [four(v) for v in (925, 1420, 1559)]
    measured = (1139.6, 1763.3, 2504.6, 3088.2)
    shares = [value / sxm.throughput(batch, 1500) for value, batch in zip(measured, (16, 32, 64, 128), strict=True)]
    assert shares == [pytest.approx(value, abs=0.005) for value in (0.70, 0.63, 0.59, 0.53)]
    assert 0.75 * sxm.batch_one_ceiling() == four(93.36)
    assert 88.4 / sxm.batch_one_ceiling() == four(0.7101)


def test_kv_pool_of_the_note_from_its_stated_inputs() -> None:
    pool = kv_pool(QWEN8, 80e9)
    assert pool.bytes == four(52.62e9)
    assert (pool.tokens, pool.blocks) == (356_852, 22_303)
    assert int(pool.requests(2000)) == 178
    right = kv_pool(QWEN8, 80 * 2**30, overhead=0.4e9)
    assert (right.tokens, right.blocks) == (four(410_491), 25_655)
    assert 410_240 // 2000 == 205
    assert pool.tokens / 410_240 - 1 == pytest.approx(-0.130, abs=5e-4)
    assert right.tokens / 410_240 - 1 == pytest.approx(0.0006, abs=1e-4)


def test_ttft_knee_of_the_note() -> None:
    prefill = 2 * 8.2e9 * 1000 / 312e12
    assert prefill == four(52.56e-3)
    assert ttft_knee(prefill, 0.078) == 4


def test_our_target_on_a_t4() -> None:
    model = load_shape("qwen3-4b")
    assert (model.parameters, model.head_parameters) == (4_022_468_096, 388_956_160)
    t4 = load_card("t4")
    full, small = Roofline(model, t4), Roofline(model.with_weights("int4"), t4)
    head8 = Roofline(model.with_weights("int4", "int8"), t4)
    assert t4.ridge == four(203.1)
    assert full.model.weight_bytes == four(8.045e9)
    assert small.model.weight_bytes == pytest.approx(2.67e9, rel=2e-3)
    assert head8.model.weight_bytes == pytest.approx(2.28e9, rel=2e-3)
    assert 1 / full.batch_one_ceiling() == four(25.14e-3)
    assert 1 / small.batch_one_ceiling() == four(8.330e-3)
    assert 1 / head8.batch_one_ceiling() == four(7.114e-3)
    assert full.prefill_flops(4096) == pytest.approx(34.7e12, rel=1e-3)
    assert full.prefill_seconds(4096) == pytest.approx(0.53, abs=0.005)
    assert full.prefill_seconds(4096, 25 / 65) == pytest.approx(1.39, abs=0.005)
    assert (full.throughput(32, 1024), small.throughput(32, 1024)) == (four(795.2), four(1366))
    fits = {(fmt, size): kv_pool(model.with_weights(fmt), t4.memory, 0.9, 0.8e9 + size).tokens
            for fmt, size in (("fp16", 1e9), ("int4", 1e9), ("int4", 2.5e9))}  # fmt: skip
    assert list(fits.values()) == [four(28_655), four(65_136), four(54_964)]


def test_speculation_figures() -> None:
    assert [acceptance_length(0.8, k) for k in (3, 7, 15)] == [four(2.952), four(4.161), four(4.859)]
    assert acceptance_length(0.6, 15) == four(2.499)
    assert acceptance_length(0.9, 15) == four(8.147)
    assert acceptance_length(1.0, 7) == 8
    speedups = [speculative_speedup(acceptance_length(a, k), d, v)
                for a, k, d, v in ((0.8, 15, 0.12, 1.10), (0.7, 7, 0.12, 1.05), (0.5, 15, 0.30, 1.60))]  # fmt: skip
    assert speedups == [pytest.approx(value, abs=0.006) for value in (3.98, 2.68, 1.05)]
    assert expected_speedup(0.8, 0, 0.1, 0.01) == 1.0
    assert expected_speedup(0.8, 7, 0.12, 0.05, batch_rows_free=8) == four(4.161 / 1.12)


def test_verifying_is_free_until_compute_takes_over() -> None:
    line = Roofline(load_shape("qwen3-4b"), load_card("h200"))
    assert verify_cost(line, 1, 15, 1000) == 1.0
    assert verify_cost(line, 64, 15, 1000) > 1.2


def test_untied_input_embedding_is_held_but_not_read() -> None:
    shape = load_shape("qwen3-8b")
    assert shape.parameters == four(8.19e9)
    assert shape.weight_bytes - shape.read_bytes == 151_936 * 4096 * 2
    assert shape.with_weights("int4").read_bytes < shape.with_weights("int4").weight_bytes


def test_unknown_family_card_and_shape_are_named() -> None:
    with pytest.raises(ValueError, match="'mamba'"):
        shape_from_config({"model_type": "mamba"})
    with pytest.raises(ValueError, match="known: t4"):
        load_card("gtx")
    with pytest.raises(ValueError, match="known: qwen3-4b"):
        load_shape("gpt-9")


def test_decomposition_adds_up_to_the_measured_step() -> None:
    parts = decompose_step(0.0249, Roofline(QWEN8, load_card("a100-sxm")), 64, 1000, 1000)
    assert parts["weights"] + parts["kv"] + parts["prefill"] + parts["rest"] == pytest.approx(parts["measured"])
    assert parts["weights"] + parts["kv"] == four(14.98e-3)


def test_overflow_of_constant_lengths_is_a_step() -> None:
    sizes = Lengths([1000], [1], "")
    result = overflow(10_000, sizes, block=1, draws=50)
    assert result.probability[8] == 0.0
    assert result.probability[10] == 1.0
    assert result.concurrency(0.01) in (9, 10)


def test_a_skewed_distribution_holds_far_fewer_than_its_median_says() -> None:
    pool = kv_pool(EIGHT, 80e9).tokens
    sizes = lengths("lognormal:1800:1.2", "lognormal:700:1.0", 32_768, seed=3)
    result = overflow(pool, sizes, seed=3, draws=400)
    assert result.mean_context > 1.3 * result.median_context
    assert result.concurrency(0.01) < 0.75 * pool / result.median_context
    assert list(result.probability) == sorted(result.probability)
    assert not math.isnan(result.probability[-1])


def test_prompt_and_output_share_the_longest_request() -> None:
    sizes = lengths("uniform:1:150", "uniform:1:150", 100, seed=1, count=500)
    both = [prompt + output for prompt, output in zip(sizes.prompt, sizes.output, strict=True)]
    assert max(both) == 100
    assert min(*sizes.prompt, *sizes.output) >= 1
    assert f"{both.count(100) / 500:.1%} of them end there" in sizes.text
    short = lengths("constant:30", "constant:20", 100)
    assert (set(short.prompt), set(short.output)) == ({30}, {20})
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        lengths("constant:1", "constant:1", 1)


@pytest.mark.parametrize("spec", ["normal:3", "lognormal:5", "constant:a"])
def test_bad_length_specification_is_refused(spec: str) -> None:
    import numpy as np

    with pytest.raises(ValueError, match=r"must be|could not convert"):
        parse_length(spec, np.random.default_rng(0), 4, 10)


def test_the_exercise_is_answered_with_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert capacity.main(["--exercise"]) == 0
    text = capsys.readouterr().out
    assert text.count("ASSUMPTIONS") == 2
    for figure in ("131,072 B/token", "403,900 tokens", "12 requests with the maximum", "at most 161", "122,528 tokens",
                   "UPPER BOUND", "269,329 tokens", "538,659 tokens", "stored 2 times", "RECOMMENDATION"):  # fmt: skip
        assert figure in text
    capacity.main(["--exercise", "--gib"])
    assert "444,407 tokens" in capsys.readouterr().out


def test_the_planner_takes_distributions_and_prints_what_it_assumes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    lengths = ["--prompt-lengths", "constant:3000", "--output-lengths", "constant:1000"]
    assert capacity.main(["--card", "t4", "--weights", "int4", "--context", "8192", *lengths, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "ASSUMPTIONS: card 15.63 GB, 90% usable" in text
    plan = json.loads(out.read_text())
    assert 0 < plan["concurrency"] <= plan["tokens"] / plan["mean_context"]
    assert plan["mean_context"] == pytest.approx(3516, abs=10)
    with pytest.raises(SystemExit):
        capacity.main(["--card", "t4", "--prompt-lengths", "weird:1"])
    assert "lognormal:MEDIAN:SIGMA" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_said_not_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert capacity.main(["--model", "llama3-405b", "--card", "h100", "--tp", "8"]) == 0
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--card", "nope"], "no card 'nope'; known: t4"),
        (["--model", "nope"], "no shape 'nope'; known: qwen3-4b"),
        (["--tp", "0"], "--tp: must be at least 1, got 0"),
        (["--tp", "two"], "--tp: must be a whole number, got 'two'"),
        (["--tp", "3"], "--tp 3 does not divide num_attention_heads 32"),
        (["--pp", "99"], "--pp 99 is more stages than num_hidden_layers 36"),
        (["--utilisation", "nan"], "--utilisation: must be above 0 and at most 1, got nan"),
        (["--utilisation", "-0.5"], "--utilisation: must be above 0 and at most 1"),
        (["--overhead-gb", "inf"], "--overhead-gb: must be at least 0 and finite"),
        (["--risk", "1.5"], "--risk: must be between 0 and 1"),
        (["--page", "0"], "--page: must be at least 1"),
        (["--seed", "-1"], "--seed: must be at least 0"),
        (["--custom-card", "x:nan:1:2"], "--custom-card: MEMORY_GB must be a number above 0, got 'nan'"),
        (["--custom-card", "x:1:2:0"], "--custom-card: TFLOPS must be a number above 0, got '0'"),
        (["--prompt-lengths", "constant:nan"], "N must be a number from 1 to 1e+09, got 'nan'"),
        (["--prompt-lengths", "lognormal:0:1"], "MEDIAN must be a number from 1 to 1e+09, got '0'"),
        (["--prompt-lengths", "lognormal:100:-1"], "SIGMA must be a number from 0 to 10, got '-1'"),
        (["--output-lengths", "uniform:9:3"], "LOW 9 is above HIGH 3"),
        (["--output-lengths", "gamma:3"], "must be constant:N, uniform:LOW:HIGH"),
        (["--json", "/nowhere/at/all.json"], "--json: must lie in a folder that exists"),
    ],
)
def test_a_refused_option_is_named_with_its_limit(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        capacity.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
