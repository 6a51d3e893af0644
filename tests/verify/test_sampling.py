"""Choosing tokens: verified rows equal plain rows for every setting, the right distribution, exact penalties, edges."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.protocol import SamplingParams
from verify.sampling import (
    LOWEST_LOGPROB,
    InvalidLogitsError,
    RequestSampler,
    RowGroup,
    row_logprobs,
    sample_rows,
)

VOCAB = 24


def rows(seed: int, count: int, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sampler(
    params: SamplingParams, prompt: Sequence[int] = (), ends: Sequence[int] = (), vocab: int = VOCAB
) -> RequestSampler:
    return RequestSampler(params, prompt, ends, vocab)


def one(logits: torch.Tensor, params: SamplingParams, position: int = 0, **kwargs: Sequence[int]) -> int:
    made = sampler(params, vocab=logits.shape[-1], **kwargs)
    return sample_rows(logits.reshape(1, -1), [RowGroup(made, 0, (), position)])[0][0]


tokens = st.integers(0, VOCAB - 1)
any_params = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.4, 0.01]),
    top_k=st.sampled_from([0, 1, 3, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.lists(
        st.tuples(tokens, st.sampled_from([-100.0, -1.0, 3.0])), max_size=3, unique_by=lambda b: b[0]
    ).map(tuple),
    min_tokens=st.integers(0, 12),
)


@settings(max_examples=150, deadline=None)
@given(
    params=any_params,
    prompt=st.lists(tokens, max_size=8),
    output=st.lists(tokens, max_size=6),
    length=st.integers(0, 5),
    agree=st.integers(0, 5),
    seed=st.integers(0, 10_000),
)
def test_a_verify_row_is_the_plain_row_after_committing_the_drafts_before_it(
    params: SamplingParams, prompt: list[int], output: list[int], length: int, agree: int, seed: int
) -> None:
    logits = rows(seed, length + 1)
    start = len(prompt) + len(output)

    plain = sampler(params, prompt, ends=[0, 1])
    plain.commit(output)
    expected = []
    for j in range(length + 1):
        [[token]] = sample_rows(logits[j : j + 1], [RowGroup(plain, 0, (), start + j)])
        expected.append(token)
        plain.commit([token])
    # A draft that agrees with the target for ``agree`` tokens and then not.
    draft = [t if j < agree else (t + 1) % VOCAB for j, t in enumerate(expected[:length])]

    verifier = sampler(params, prompt, ends=[0, 1])
    verifier.commit(output)
    [kept] = sample_rows(logits, [RowGroup(verifier, 0, tuple(draft), start)])
    assert kept == expected[: min(agree, length) + 1]


@settings(max_examples=40, deadline=None)
@given(params=st.lists(any_params, min_size=1, max_size=5), seed=st.integers(0, 10_000), order=st.randoms())
def test_neither_the_order_of_groups_nor_their_company_matters(
    params: list[SamplingParams], seed: int, order: object
) -> None:
    blocks = [(rows(seed + i, 3), (i, (i * 7) % VOCAB)) for i in range(len(params))]
    alone = [
        sample_rows(block, [RowGroup(sampler(p, [1, 2]), 0, draft, 50)])[0]
        for p, (block, draft) in zip(params, blocks, strict=True)
    ]
    shuffled = list(range(len(params)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    logits = torch.cat([blocks[i][0] for i in shuffled])
    before = logits.clone()
    groups = [RowGroup(sampler(params[i], [1, 2]), 3 * place, blocks[i][1], 50) for place, i in enumerate(shuffled)]
    assert sample_rows(logits, groups) == [alone[i] for i in shuffled]
    assert torch.equal(logits, before)


def chi_square(observed: Counter[int], probabilities: torch.Tensor, draws: int) -> tuple[float, int]:
    expected = [(int(i), float(p) * draws) for i, p in enumerate(probabilities) if float(p) > 0]
    assert sum(observed[i] for i, _ in expected) == draws, "a token of probability zero was drawn"
    return sum((observed[i] - e) ** 2 / e for i, e in expected), len(expected) - 1


# 99.9 % points of the chi-square distribution
LIMITS = {7: 24.3, 4: 18.5, 2: 13.8, 3: 16.3}


def test_temperature_one_draws_from_the_softmax() -> None:
    logits, draws = rows(3, 1, vocab=8, spread=1.0)[0], 6000
    seen = Counter(one(logits, SamplingParams(1, temperature=1.0, seed=seed)) for seed in range(draws))
    value, freedom = chi_square(seen, torch.softmax(logits.double(), 0), draws)
    assert value < LIMITS[freedom]


def test_positions_of_one_seed_draw_from_the_softmax_too() -> None:
    logits, draws = rows(4, 1, vocab=8, spread=1.0)[0], 6000
    params = SamplingParams(1, temperature=1.0, seed=2**63 - 1)
    seen = Counter(one(logits, params, position) for position in range(draws))
    value, freedom = chi_square(seen, torch.softmax(logits.double(), 0), draws)
    assert value < LIMITS[freedom]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.75}, [0, 1, 2]),  # .4 + .2 + .2 reaches .75
        ({"min_p": 0.45}, [0, 1, 2]),
        ({"top_k": 4, "min_p": 0.3, "top_p": 0.6}, [0, 1]),  # after top_k and min_p: .5 .25 .25
    ],
)
def test_filters_keep_what_they_say_and_the_rest_is_renormalised(changes: dict[str, float], kept: list[int]) -> None:
    probabilities = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
    draws = 3000
    params = SamplingParams(1, temperature=1.0, **changes)  # type: ignore[arg-type]
    logits = probabilities.log().float()
    seen = Counter(one(logits, replace(params, seed=seed)) for seed in range(draws))
    only = torch.zeros(8, dtype=torch.float64)
    only[kept] = probabilities[kept] / probabilities[kept].sum()
    value, freedom = chi_square(seen, only, draws)
    assert value < {1: 10.8, **LIMITS}[freedom]


@settings(max_examples=80, deadline=None)
@given(
    prompt=st.lists(tokens, max_size=6),
    output=st.lists(tokens, max_size=10),
    draft=st.lists(tokens, max_size=4),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
    seed=st.integers(0, 10_000),
)
def test_penalties_equal_a_naive_reference(
    prompt: list[int],
    output: list[int],
    draft: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    seed: int,
) -> None:
    params = SamplingParams(
        1, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=((3, 1.5),)
    )
    made = sampler(params, prompt)
    made.commit(output[:4])
    made.commit(output[4:])
    row = rows(seed, 1)[0]
    got = made.processed(row, draft)
    for token_id in range(VOCAB):
        x = float(row[token_id])
        if token_id in [*prompt, *output, *draft]:
            x = x / repetition if x > 0 else x * repetition
        count = [*output, *draft].count(token_id)
        x -= presence * (count > 0) + frequency * count
        x += 1.5 if token_id == 3 else 0.0
        assert float(got[token_id]) == pytest.approx(x, abs=1e-9)


def test_min_tokens_masks_end_and_stop_tokens_until_reached_counting_drafts() -> None:
    row = torch.zeros(VOCAB)
    row[2], row[5], row[7] = 9.0, 8.0, 1.0
    params = SamplingParams(9, min_tokens=3, stop_token_ids=(5,))
    made = sampler(params, ends=[2])
    made.commit([7])
    assert not made.plain_greedy
    [kept] = sample_rows(row.repeat(4, 1), [RowGroup(made, 0, (7, 7, 7), 10)])
    assert kept == [7, 7, 2]  # output tokens 2 and 3 may not end; the fourth may
    made.commit([7, 7])
    assert made.plain_greedy


def test_ties_go_to_the_lowest_id_greedy_and_top_k() -> None:
    row = torch.zeros(VOCAB)
    row[[4, 9, 11]] = 2.0
    assert one(row, SamplingParams(1)) == 4
    assert {one(row, SamplingParams(1, temperature=1.0, top_k=1, seed=s)) for s in range(20)} == {4}
    assert {one(row, SamplingParams(1, temperature=1.0, top_k=2, seed=s)) for s in range(40)} == {4, 9}
    assert {one(row, SamplingParams(1, temperature=1.0, top_p=1e-9, seed=s)) for s in range(20)} == {4}


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4, 1e-300])
def test_tiny_temperatures_are_greedy_without_overflow(temperature: float) -> None:
    row = rows(8, 1)[0] * 1e4
    best = int(row.argmax())
    assert {one(row, SamplingParams(1, temperature=temperature, seed=s)) for s in range(10)} == {best}


def test_high_temperature_and_masked_tokens() -> None:
    row = torch.full((VOCAB,), -torch.inf)
    row[[3, 8]] = torch.tensor([1.0, -1.0])
    seen = {one(row, SamplingParams(1, temperature=1e6, top_p=0.999, seed=s)) for s in range(60)}
    assert seen == {3, 8}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_bad_logits_fail_their_own_group_only(temperature: float, poison: float) -> None:
    params = SamplingParams(1, temperature=temperature)
    logits = rows(1, 3)
    logits[1, 6] = poison
    groups = [RowGroup(sampler(params), i, (), 5) for i in range(3)]
    with pytest.raises(InvalidLogitsError) as caught:
        sample_rows(logits, groups)
    assert caught.value.groups == (1,)
    assert len(sample_rows(logits, [groups[0], groups[2]])) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_with_every_token_masked_is_an_error(temperature: float) -> None:
    with pytest.raises(InvalidLogitsError):
        one(torch.full((VOCAB,), -torch.inf), SamplingParams(1, temperature=temperature))
    with pytest.raises(InvalidLogitsError):
        one(torch.zeros(4), SamplingParams(1, temperature=temperature, min_tokens=1), ends=range(4))


def test_a_bad_row_behind_the_first_refusal_is_not_looked_at() -> None:
    logits = rows(2, 3)
    logits[2] = math.nan
    first = int(logits[0].argmax())
    draft = ((first + 1) % VOCAB, 0)
    assert sample_rows(logits, [RowGroup(sampler(SamplingParams(1)), 0, draft, 0)]) == [[first]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_bad_row_behind_drafts_that_are_kept_ends_the_list_before_it(temperature: float) -> None:
    logits = rows(2, 3)
    params = SamplingParams(1, temperature=temperature)
    first = sample_rows(logits, [RowGroup(sampler(params), 0, (), 0)])[0][0]
    logits[1] = math.nan
    assert sample_rows(logits, [RowGroup(sampler(params), 0, (first, 0), 0)]) == [[first]]
    with pytest.raises(InvalidLogitsError):
        sample_rows(logits, [RowGroup(sampler(params), 1, (), 1)])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_no_numbers_has_no_log_probabilities(poison: float) -> None:
    logits = rows(2, 3)
    logits[1, 6] = poison
    with pytest.raises(InvalidLogitsError) as caught:
        row_logprobs(logits, [0, 1, 2], top=2)
    assert caught.value.groups == (1,)


def test_settings_and_rows_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="logit_bias: token id 99"):
        sampler(SamplingParams(1, logit_bias=((99, 1.0),)))
    with pytest.raises(ValueError, match="do not fit"):
        sample_rows(rows(0, 2), [RowGroup(sampler(SamplingParams(1)), 0, (1, 2), 0)])
    with pytest.raises(ValueError, match="do not fit"):
        sample_rows(rows(0, 1, vocab=VOCAB + 1), [RowGroup(sampler(SamplingParams(1)), 0, (), 0)])
    assert sample_rows(rows(0, 1), []) == []


def test_unused_rows_between_groups_are_left_alone() -> None:
    logits = rows(6, 4)
    logits[0] = math.nan  # a row that belongs to nobody
    groups = [RowGroup(sampler(SamplingParams(1)), 2, (), 0), RowGroup(sampler(SamplingParams(1)), 1, (), 0)]
    assert sample_rows(logits, groups) == [[int(logits[2].argmax())], [int(logits[1].argmax())]]


def test_logprobs_are_of_the_raw_row_sorted_and_finite() -> None:
    row = torch.tensor([[1.0, 3.0, 3.0, -torch.inf, 0.0]])
    [entry] = row_logprobs(row, [3], top=3)
    reference = torch.log_softmax(row[0].double(), 0)
    assert entry.token_id == 3
    assert entry.logprob == LOWEST_LOGPROB
    assert [token_id for token_id, _ in entry.top] == [1, 2, 0]
    assert [p for _, p in entry.top] == pytest.approx(reference[[1, 2, 0]].tolist(), abs=1e-6)
    [short] = row_logprobs(row, [1], top=0)
    assert short.top == ()
    [everything] = row_logprobs(row, [1], top=20)
    assert len(everything.top) == 5


def test_logprobs_of_a_row_do_not_depend_on_the_other_rows() -> None:
    logits = rows(5, 6, vocab=1000)
    together = row_logprobs(logits, range(6), top=4)
    assert together == tuple(row_logprobs(logits[i : i + 1], [i], top=4)[0] for i in range(6))
