"""How one row of target logits becomes a token: the same function for plain decoding and for every verified row.

Drafts are point guesses. Each row of a verify pass is *sampled from the target itself*, with a uniform number keyed by
(seed, absolute position of the token being drawn), and a drafted token is kept exactly when it is what the target
drew. So the text, sampled or greedy, is the same with speculation on and off, whatever the block length.

A row is processed in this order (in float64, on a copy):
  1. repetition penalty   tokens of prompt and output: positive logits divided by it, the others multiplied
  2. presence, frequency  subtracted for tokens of the output only: presence once, frequency times the count
  3. logit bias           added
  4. min_tokens           end tokens and stop_token_ids are masked until so many output tokens exist
  5. temperature          below GREEDY_TEMPERATURE the row ends here: its highest logit, the lowest id among equals
  6. top_k, min_p, top_p  each over what the one before left; exactly top_k tokens, lower ids first among equals
  7. draw                 inverse of the cumulative distribution at the keyed uniform number
"Output" in row j of a group means the committed output followed by the first j drafted tokens.

This file knows no sequences, pages or stop strings, and never changes the logits it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.protocol import SamplingParams, TokenLogprob
from verify.randomness import uniform

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: the draw would pick the highest logit anyway."""

LOWEST_LOGPROB = -9999.0
"""Reported in place of minus infinity, which JSON cannot carry."""


class InvalidLogitsError(ValueError):
    """Some rows have no usable highest logit: NaN, infinite, or every token masked.

    ``groups`` are the indices of the row groups concerned. Sampling keeps no state, so the caller fails these requests
    and calls again with the others.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self.groups = tuple(groups)
        super().__init__(f"the target's logits are NaN, infinite or all masked (row groups {list(self.groups)})")


class RequestSampler:
    """What choosing tokens has to remember about one request; lives as long as its sequence.

    ``end_token_ids`` are the model's end tokens, ``vocab_size`` the width of a row of logits. Raises ValueError for a
    biased token id outside the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], end_token_ids: Collection[int], vocab_size: int
    ) -> None:
        for token_id, _ in params.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"logit_bias: token id {token_id} is outside 0..{vocab_size - 1}")
        self.params = params
        self.vocab_size = vocab_size
        self.num_output_tokens = 0
        self.greedy = params.temperature < GREEDY_TEMPERATURE
        self._penalises_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._penalises_seen = params.repetition_penalty != 1.0
        self._output_counts: dict[int, int] = {}
        self._seen: dict[int, None] = {}
        if self._penalises_seen:
            self._seen = dict.fromkeys(t for t in prompt_ids if 0 <= t < vocab_size)
        self._bias_ids = torch.tensor([token_id for token_id, _ in params.logit_bias], dtype=torch.int64)
        self._bias_values = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float64)
        ends = {t for t in (*end_token_ids, *params.stop_token_ids) if 0 <= t < vocab_size}
        self._end_ids = torch.tensor(sorted(ends), dtype=torch.int64)

    @property
    def plain_greedy(self) -> bool:
        """True when the next token is the argmax of the raw row, and so is every token after it."""
        return (
            self.greedy
            and not self._penalises_output
            and not self._penalises_seen
            and not self.params.logit_bias
            and self.num_output_tokens >= self.params.min_tokens
        )

    def commit(self, token_ids: Sequence[int]) -> None:
        """Note tokens appended to the output, in order. Not again after a preemption: the output has not changed."""
        self.num_output_tokens += len(token_ids)
        if self._penalises_output:
            _count(self._output_counts, token_ids)
        if self._penalises_seen:
            self._seen.update(dict.fromkeys(token_ids))

    def processed(self, row: Tensor, draft: Sequence[int]) -> Tensor:
        """Steps 1 to 4 for the row after ``draft``: raw logits [V] in, a new float64 tensor [V] on the CPU out."""
        params = self.params
        logits = row.detach().to("cpu", torch.float64, copy=True)
        if self._penalises_seen:
            ids = torch.tensor(list({**self._seen, **dict.fromkeys(draft)}), dtype=torch.int64)
            picked = logits[ids]
            penalty = params.repetition_penalty
            logits[ids] = torch.where(picked > 0, picked / penalty, picked * penalty)
        if self._penalises_output:
            counts = dict(self._output_counts)
            _count(counts, draft)
            ids = torch.tensor(list(counts), dtype=torch.int64)
            times = torch.tensor(list(counts.values()), dtype=torch.float64)
            logits[ids] = logits[ids] - params.presence_penalty - params.frequency_penalty * times
        if params.logit_bias:
            logits.index_add_(0, self._bias_ids, self._bias_values)
        if self.num_output_tokens + len(draft) < params.min_tokens:
            logits[self._end_ids] = -torch.inf
        return logits

    def sample(self, row: Tensor, draft: Sequence[int], position: int) -> int | None:
        """The token the target says at ``position`` after ``draft``; None when the row is unusable."""
        logits = self.processed(row, draft)
        best, value = _highest(logits.unsqueeze(0))[0]
        if not _finite(value):
            return None
        if self.greedy:
            return best
        return _draw(logits, value, self.params, uniform(self.params.seed, position))


@dataclass(frozen=True)
class RowGroup:
    """The rows of one request in a step: ``first_row .. first_row + len(draft)`` of the logits.

    Row ``first_row + j`` predicts the token at absolute position ``position + j``, given the output so far and the
    first j drafted tokens. Plain decoding is a group with an empty draft.
    """

    sampler: RequestSampler
    first_row: int
    draft: tuple[int, ...]
    position: int

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.draft) + 1


def sample_rows(logits: Tensor, groups: Sequence[RowGroup]) -> list[list[int]]:
    """What the target says for each group: its tokens up to and including the first that differs from the draft.

    logits [R, V] float32 on any device; a group's list has 1 to ``len(draft) + 1`` ids, and is what verification
    commits: every later row follows a draft the target refused, so it is not looked at. A list ends before an unusable
    row too, which counts only where no token comes before it: the answer may end with those. Raises InvalidLogitsError
    naming the unusable groups (nothing is remembered: call again without them), ValueError for rows out of range.
    """
    for group in groups:
        if group.first_row < 0 or group.end_row > logits.shape[0] or group.sampler.vocab_size != logits.shape[1]:
            raise ValueError(
                f"rows {group.first_row}..{group.end_row - 1} with vocabulary {group.sampler.vocab_size} "
                f"do not fit logits of shape {tuple(logits.shape)}"
            )
    greedy = [group.sampler.plain_greedy for group in groups]
    highest: dict[int, tuple[int, float]] = {}
    if groups and all(greedy) and sum(group.end_row - group.first_row for group in groups) == logits.shape[0]:
        highest = dict(enumerate(_highest(logits)))
    else:
        for group in (group for group, plain in zip(groups, greedy, strict=True) if plain):
            found = _highest(logits[group.first_row : group.end_row])
            highest.update(enumerate(found, start=group.first_row))

    sampled: list[list[int]] = []
    unusable: list[int] = []
    for index, (group, plain) in enumerate(zip(groups, greedy, strict=True)):
        tokens: list[int] = []
        for j in range(len(group.draft) + 1):
            token: int | None
            if plain:
                best, value = highest[group.first_row + j]
                token = best if _finite(value) else None
            else:
                token = group.sampler.sample(logits[group.first_row + j], group.draft[:j], group.position + j)
            if token is None:
                if not tokens:
                    unusable.append(index)
                break
            tokens.append(token)
            if j < len(group.draft) and token != group.draft[j]:
                break
        sampled.append(tokens)
    if unusable:
        raise InvalidLogitsError(unusable)
    return sampled


def row_logprobs(rows: Tensor, chosen: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities under the target: log-softmax of the *raw* logits in float32, one row at a time.

    rows [M, V], ``chosen`` M token ids, ``top`` how many of the likeliest tokens to list (0 for none), likeliest first,
    the lowest id among equals. Values are never below LOWEST_LOGPROB. Raises InvalidLogitsError naming the first row
    that has none: one NaN or +infinity leaves no token of its row a log-probability.
    """
    entries = []
    for index, (row, token_id) in enumerate(zip(rows, chosen, strict=True)):
        logprobs = torch.log_softmax(row.detach().to("cpu", torch.float32), dim=-1).clamp_min(LOWEST_LOGPROB)
        if logprobs[token_id].isnan():
            raise InvalidLogitsError([index])
        ids, values = _largest(logprobs, min(top, logprobs.shape[0])) if top > 0 else ([], [])
        entries.append(TokenLogprob(token_id, float(logprobs[token_id]), tuple(zip(ids, values, strict=True))))
    return tuple(entries)


def _count(counts: dict[int, int], token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        counts[token_id] = counts.get(token_id, 0) + 1


def _finite(value: float) -> bool:
    return abs(value) < torch.inf  # False for NaN too


def _highest(logits: Tensor) -> list[tuple[int, float]]:
    """(lowest id of the highest logit, that logit) of each row of [M, V]; a row with a NaN gives NaN."""
    if logits.device.type == "cpu":
        # numpy's argmax is several times quicker than torch's on a CPU; both return the first of equals, or a NaN.
        ids = torch.from_numpy(logits.detach().numpy().argmax(axis=-1))
    else:
        ids = logits.argmax(dim=-1)
    values = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    # Both at once, for the host waits for the device at every transfer; float64 holds any id exactly.
    pairs = torch.stack([ids.double(), values.double()]).tolist()
    return [(int(index), value) for index, value in zip(*pairs, strict=True)]


def _largest(values: Tensor, count: int) -> tuple[list[int], list[float]]:
    """Exactly ``count`` largest entries of [N], largest first, lower index first among equals."""
    edge = values.topk(count).values[-1]
    candidates = (values >= edge).nonzero().squeeze(1)
    ordered, order = values[candidates].sort(descending=True, stable=True)
    return candidates[order][:count].tolist(), ordered[:count].tolist()


def _draw(logits: Tensor, highest: float, params: SamplingParams, number: float) -> int:
    """Steps 5 to 7 on processed logits [V] (float64, finite maximum ``highest``)."""
    ids: Tensor | None = None  # None while every token is still in
    if 0 < params.top_k < logits.shape[0]:
        kept, values = _largest(logits, params.top_k)
        ids, logits = torch.tensor(kept), torch.tensor(values, dtype=torch.float64)
    # At most 1 each; exp never overflows, and what is far below the maximum becomes a plain zero.
    weights = ((logits - highest) / params.temperature).exp()
    if params.min_p > 0.0:
        keep = (weights >= params.min_p).nonzero().squeeze(1)  # the highest weight is exactly 1
        ids, weights = keep if ids is None else ids[keep], weights[keep]
    if params.top_p < 1.0:
        # Tokens lighter than (1 - top_p) / N weigh less than 1 - top_p together, so the nucleus is among the others:
        # far fewer to sort than the vocabulary.
        total = weights.sum()
        keep = (weights >= min(1.0, float(total) * (1.0 - params.top_p) / weights.shape[0])).nonzero().squeeze(1)
        ids, weights = keep if ids is None else ids[keep], weights[keep]
        weights, order = weights.sort(descending=True, stable=True)
        before = weights.cumsum(0) - weights
        size = max(1, int((before < params.top_p * total).sum()))
        ids, weights = ids[order[:size]], weights[:size]
    cumulative = weights.cumsum(0)
    total = cumulative[-1]
    index = int(torch.searchsorted(cumulative, number * total, right=True))
    if index == cumulative.shape[0]:  # number * total rounded up to total: the last token that weighs anything
        index = int(torch.searchsorted(cumulative, total))
    return index if ids is None else int(ids[index])
