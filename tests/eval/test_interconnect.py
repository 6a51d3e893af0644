"""Times of a model split over several cards: one small case by hand, what must hold of any, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import capacity
from eval.interconnect import ONE_CARD, Link, TensorSplit, check_split, load_link
from eval.kernel_model import BLOCK, KERNEL_CARDS, MEASURED_TWO_H200, KernelTimes, kernel_table
from eval.kv_capacity import Hardware, Plan, kv_pool, weights_per_card
from eval.predict import main
from eval.roofline import Roofline
from eval.shapes import Card, ModelShape, intermediate_size, load_cards, load_shape

LINK = Link("test", 100e9, 5e-6, 0.5e-6, "")
CARD = Card("test", "", 20e9, 1e12, 100e12, "")
SMALL = ModelShape("small", 4, 1024, 8, 2, 128, 100_000_000, 20_000_000, 200e6, 2, 0, 0.0, 40e6)
"""100 M parameters in 16 bits, the vocabulary matrix (20 M) tied; K and V of a token: 4 layers x 2 x 2 x 128 x 2 B =
4,096 B."""
SHAPES = ("qwen3-4b", "qwen3-32b")


def four(value: float) -> object:
    return pytest.approx(value, rel=5e-5)


def test_collectives_by_hand() -> None:
    assert LINK.allreduce_seconds(1e6, 2) == four(5e-6 + 2 * (0.5e-6 + 5e-6))
    assert LINK.allreduce_seconds(1e6, 4) == four(5e-6 + 6 * (0.5e-6 + 2.5e-6))
    assert LINK.gather_seconds(8, 4) == four(5e-6 + 3 * 0.5e-6 + 3 * 8 / 100e9)
    assert LINK.allreduce_seconds(1e6, 1) == LINK.gather_seconds(1e6, 1) == 0.0


def test_a_small_model_on_two_cards_by_hand() -> None:
    two = Roofline(SMALL, CARD, split=TensorSplit(2, LINK))
    # 8 rows of 1,024 take 8 B each, 65,536 B: 5 + 0.5 + 0.65536 = 6.15536 us, eight times, and
    # 5 + 0.5 + 64 / 100e3 = 5.50064 us for the head.
    exchange = 8 * 6.15536e-6 + 5.50064e-6
    assert two.exchange_seconds(8, 8) == four(exchange)
    traffic = 200e6 + 8 * 1000 * 4096
    assert two.step_seconds(8, 1000) == four(traffic / 2e12 + exchange)
    assert two.step_seconds(8, 1000) == four(171.12816e-6)
    assert Roofline(SMALL, CARD).step_seconds(8, 1000) == four(232.768e-6)
    # 4,096 tokens: 8.389 MB an all-reduce, 5 + 2 x (0.5 + 41.943) us; the head's row 5.50008 us.
    flops = 2 * 80e6 * 4096 + 2 * 20e6 + 2 * 4 * 8 * 128 * 4096**2
    assert two.prefill_seconds(4096) == four(flops / 200e12 + 8 * 89.88608e-6 + 5.50008e-6)


def test_memory_of_a_card_holds_its_share_and_the_whole_embedding() -> None:
    assert weights_per_card(SMALL, 1) == four(200e6)
    assert weights_per_card(SMALL, 4) == four(160e6 / 4 + 40e6)
    pool = kv_pool(SMALL, 1e9, 0.9, 0.1e9, split=TensorSplit(2, LINK))
    assert pool.tokens == int((0.9e9 - 120e6 - 0.1e9) / 2048)
    untied = load_shape("qwen3-32b")
    assert weights_per_card(untied, 2) == four((65.524246528e9 - 1.5558246400e9) / 2 + 1.5558246400e9)


@pytest.mark.parametrize(("ranks", "per_rank", "copies"), [(1, 2, 1.0), (2, 1, 1.0), (4, 1, 2.0), (8, 1, 4.0)])
def test_more_ranks_than_kv_heads_read_and_hold_copies(ranks: int, per_rank: int, copies: float) -> None:
    split = TensorSplit(ranks, LINK)
    assert (split.kv_heads_per_rank(2), split.kv_copies(2)) == (per_rank, copies)
    assert Roofline(SMALL, CARD, split=split).kv_bytes_per_token == 4096 * copies
    assert kv_pool(SMALL, 1e9, 0.9, 0.1e9, split=split).kv_bytes_per_token == 2048 * per_rank
    plan = Plan("", ranks, 1, SMALL, Hardware(1e9, 1e12, node=LINK))
    assert plan.kv_bytes_per_token_per_card == 2048 * per_rank


def test_copies_of_kv_heads_take_no_time_off_attention() -> None:
    """From 8 to 16 ranks the 8 KV heads are copied: a longer context costs as much more with 16 as with 8."""
    model, inner = load_shape("qwen3-32b"), intermediate_size("qwen3-32b")

    def context_ms(ranks: int) -> float:
        times = KernelTimes(model, inner, "bf16", KERNEL_CARDS["h200"], TensorSplit(ranks, LINK))
        return times.step_ms(32, 1, 65_536) - times.step_ms(32, 1, 32_768)

    assert context_ms(8) == pytest.approx(context_ms(4) / 2, rel=1e-6)
    assert context_ms(8) > context_ms(16) > 0.9 * context_ms(8)  # what is left to split are the parts of the sums


@given(
    name=st.sampled_from(SHAPES),
    ranks=st.sampled_from((1, 2, 4, 8, 16)),
    sequences=st.integers(1, 64),
    rows=st.integers(1, 16),
    context=st.integers(1, 32_768),
)
def test_a_slower_link_or_more_work_is_never_quicker(
    name: str, ranks: int, sequences: int, rows: int, context: int
) -> None:
    model, inner = load_shape(name), intermediate_size(name)
    slower = Link("slow", LINK.bandwidth / 2, LINK.start * 2, LINK.hop * 2, "")
    times = KernelTimes(model, inner, "bf16", KERNEL_CARDS["h200"], TensorSplit(ranks, LINK))
    slow = KernelTimes(model, inner, "bf16", KERNEL_CARDS["h200"], TensorSplit(ranks, slower))
    step = times.step_ms(sequences, rows, context)
    assert times.exchange_ms(sequences * rows, sequences * rows) < step <= slow.step_ms(sequences, rows, context)
    assert step <= times.step_ms(sequences + 1, rows, context)
    assert step < times.step_ms(sequences, rows, context + 1024)
    assert times.step_ms(sequences, BLOCK, context) < times.round_ms(sequences, context)
    line = Roofline(model, CARD, split=TensorSplit(ranks, LINK))
    assert line.step_seconds(sequences, context) < line.step_seconds(sequences + 1, context)
    assert line.prefill_seconds(context) <= line.prefill_seconds(context + 1)


@given(ranks=st.sampled_from((2, 4, 8)), sequences=st.integers(1, 64), tokens=st.integers(64, 16_384))
def test_the_speed_up_is_at_most_the_number_of_cards(ranks: int, sequences: int, tokens: int) -> None:
    model = load_shape("qwen3-32b")
    for link in (LINK, Link("free", 1e30, 0.0, 0.0, "")):
        one, many = Roofline(model, CARD), Roofline(model, CARD, split=TensorSplit(ranks, link))
        assert one.step_seconds(sequences, tokens) <= many.step_seconds(sequences, tokens) * ranks * (1 + 1e-9)
        assert one.prefill_seconds(tokens) <= many.prefill_seconds(tokens) * ranks * (1 + 1e-9)


def test_kernels_of_a_rank_by_hand() -> None:
    """With fixed times and the exchange alone left (endless rates), a step is what its launches take."""
    card = replace(KERNEL_CARDS["h200"], bandwidth=1e30, matrix_rate=1e30, prompt_rate=1e30, attention_rate=1e30)
    model = replace(load_shape("qwen3-4b"), layers=1)
    one, two = (KernelTimes(model, 9728, "bf16", card, split) for split in (ONE_CARD, TensorSplit(2, LINK)))
    assert one.step_ms(8, 1, 1024) == four((5 * 2.2 + 3 * 1.4 + 9.0) / 1e3)
    # Two more small kernels and what their exchanges cost others, two all-reduces of 8 x 2,560 x 2 B (5 + 2 x (0.5 +
    # 0.2048) us), 8 candidates (5.50064 us) and the eight small kernels that choose among them.
    assert two.step_ms(8, 1, 1024) == four((5 * 2.2 + 5 * 1.4 + 9.0 + 2 * 5.2 + 2 * 6.4096 + 5.50064 + 8 * 1.4) / 1e3)
    assert two.prompt_ms(4096) == four((2 * (5 + 2 * (0.5 + 104.8576)) + 5.50008 + 2.2 + 8 * 1.4) / 1e3)


KERNELS_THEN = replace(KERNEL_CARDS["h200"], matrix_us=1.5, small_us=2.0, attention_us=7.5, lane_us=7.5, kv_share=0.7)
"""Those that the two cards ran: one row attended as many do, norms took longer."""


@pytest.mark.parametrize("name", SHAPES)
def test_two_cards_take_what_was_measured_on_two(name: str) -> None:
    split = TensorSplit(2, load_link("h200", None, 2))
    table = kernel_table(load_shape(name), intermediate_size(name), KERNELS_THEN, split=split)
    for line, measured in MEASURED_TWO_H200[name].items():
        assert table[0][line] == pytest.approx(measured, rel=0.11), line


def test_a_large_message_starts_later_and_few_rows_do_not_wait_for_it() -> None:
    late = replace(LINK, bulk=20e-6)
    few, many = (TensorSplit(2, late).layer_seconds(rows, 1024) for rows in (8, 4096))
    assert few == four(2 * LINK.gather_seconds(8 * 1024 * 8, 2))
    assert many == four(2 * (LINK.allreduce_seconds(4096 * 1024 * 2, 2) + 20e-6))


@pytest.mark.parametrize("name", SHAPES)
def test_one_rank_is_one_card(name: str) -> None:
    model, inner, card = load_shape(name), intermediate_size(name), KERNEL_CARDS["h200"]
    whole, one = (KernelTimes(model, inner, "int8", card, split) for split in (ONE_CARD, TensorSplit(1, LINK)))
    assert whole.step_ms(8, 4, 1024) == one.step_ms(8, 4, 1024)
    assert whole.prompt_ms(4096) == one.prompt_ms(4096)
    assert one.round_ms(1, 1024) == one.round_ms(1, 1024, whole_drafter=True)


def test_what_cannot_be_split_is_refused_by_the_name_of_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    check_split(4, 8, 2, 1024, 512)
    for ranks, heads, kv_heads, inner, vocabulary, field in (
        (3, 32, 8, 9729, 300, "num_attention_heads 32"),
        (6, 12, 4, 1536, 300, "num_key_value_heads 4"),
        (8, 32, 8, 100, 320, "intermediate_size 100"),
        (2, 32, 8, 100, 321, "vocab_size 321"),
    ):
        with pytest.raises(ValueError, match=f"--tp {ranks} .*{field}"):
            check_split(ranks, heads, kv_heads, inner, vocabulary)
    for command, options, message in (
        (main, ["--tp", "3", "--card", "h200"], "--tp 3 does not divide num_attention_heads 32"),
        (main, ["--tp", "4", "--card", "h100-pcie"], "--link nvlink joins 2 cards of h100-pcie, --tp is 4"),
        (main, ["--tp", "16", "--card", "h200"], "--link nvlink joins 8 cards of h200, --tp is 16"),
        (main, ["--tp", "2", "--card", "t4", "--link", "nvlink"], "not one of the t4's: pcie"),
        (main, ["--link", "pcie"], "--link is for --tp above 1"),
        (main, ["--tp", "2", "--custom-card", "x:80:2000:300"], "--custom-card has no link"),
        (main, ["--replicas", "0"], "must be at least 1"),
        (capacity.main, ["--tp", "5", "--card", "h200"], "--tp 5 does not divide num_attention_heads 32"),
    ):
        with pytest.raises(SystemExit):
            command(options)
        assert message in capsys.readouterr().err


def test_every_card_says_where_its_link_figures_come_from() -> None:
    for card in load_cards():
        link = load_link(card)
        assert link.source
        assert 0 < link.hop < link.start < 20e-6
        assert 5e9 < link.bandwidth < 450e9


def test_the_predictor_sets_two_cards_beside_one_and_counts_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "two.json"
    options = ["--model", "qwen3-32b", "--card", "h200", "--weights", "bf16", "--tp", "2", "--replicas", "3"]
    assert main([*options, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "measured on two H200" in text
    assert "no KV is shared between replicas" in text
    found = json.loads(out.read_text())["predictions"]
    for one, two, speed_up in zip(found["kernels_one_card"], found["kernels"], found["speed_up"], strict=True):
        assert speed_up["32x1"] == pytest.approx(one["32x1"] / two["32x1"])
        assert speed_up["whole draft"] == pytest.approx(one["round 1x16"] / two["whole draft"])
        assert all(0.9 < value < 2 for name, value in speed_up.items() if name != "weights")
    fleet = found["fleet"]
    assert (fleet["replicas"], fleet["cards"]) == (3, 6)
    assert fleet["tokens_per_second"]["8"] == pytest.approx(3 * found["serving_curve"]["8"])
    assert fleet["requests_per_second"]["8"] == pytest.approx(3 * found["serving_curve"]["8"] / 1000)


def test_the_planner_multiplies_rates_by_replicas_and_not_the_risk(tmp_path: Path) -> None:
    plans = []
    for replicas in ("1", "4"):
        out = tmp_path / f"{replicas}.json"
        options = ["--card", "h200", "--weights", "bf16", "--tp", "2", "--replicas", replicas, "--context", "4096"]
        assert capacity.main([*options, "--model", "qwen3-32b", "--json", str(out)]) == 0
        plans.append(json.loads(out.read_text()))
    one, four_of_them = plans
    assert four_of_them["requests_per_second"] == pytest.approx(4 * one["requests_per_second"])
    assert (one["concurrency"], one["tpot_seconds"]) == (four_of_them["concurrency"], four_of_them["tpot_seconds"])
    assert (one["cards"], four_of_them["cards"]) == (2, 8)
