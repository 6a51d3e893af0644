"""Steps that are launched before the step before them has been read: which works a graph can take, which prompts' first
tokens the device can choose, what the host has to tell the device about them, and what to make of the outcome.

The host's books stay one step behind. A sequence in the air has ``in_flight`` tokens at most on their way; its pages
are reserved for all of them. What comes back for a sequence that has ended or was preempted meanwhile (another
``epoch``) is dropped. This file knows sequences and lanes; of tensors only that a pass has logits, and no text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from serve.engine.drafting import NO_DRAFT, Draft
from serve.engine.first_tokens import FirstTokens, FirstTokensLaunch
from serve.engine.graphs import Launch, Outcome, StepGraphs
from serve.engine.lanes import Lane
from serve.engine.scheduler import Work
from serve.engine.sequence import Sequence
from serve.model.batch import FlatBatch


class Passenger(NamedTuple):
    """One work of a flight, the epoch of its sequence at the start, and how many tokens it may bring."""

    work: Work
    draft: Draft
    epoch: int
    rows: int


@dataclass(frozen=True)
class Flight:
    """A launched decoding step or prefill pass of ``rows`` rows whose outcome the host has not read. Passengers of a
    pass are the prompts that end in it."""

    passengers: tuple[Passenger, ...]
    launch: Launch | FirstTokensLaunch
    started: float
    rows: int

    @property
    def prefills(self) -> bool:
        return isinstance(self.launch, FirstTokensLaunch)


@dataclass(frozen=True)
class Landed:
    """kept: by passenger, the tokens to commit, those before a logit that was not finite; absent for sequences of
    another epoch. spoilt: the sequences of such logits, of whatever epoch. Seconds of the draft pass and of the rest on
    the device."""

    kept: list[tuple[Passenger, list[int]]]
    spoilt: list[Sequence]
    draft_seconds: float
    verify_seconds: float


class StepsAhead:
    """Graph launches of one engine, in order."""

    def __init__(self, graphs: StepGraphs) -> None:
        self.graphs = graphs
        self._first_tokens = FirstTokens(graphs.state, graphs.sizes.rows[-1])
        self._charged_until: float | None = None
        self._releases = 0

    def pages_released(self, releases: int) -> None:
        """How often pages have been released so far: after another time, rows that still wait for the drafter are read
        before the next step, which may write to the same pages."""
        if releases != self._releases:
            self._releases = releases
            self.graphs.observe_waiting()

    def takes(self, works: Seq[Work]) -> bool:
        """Whether these decoding works can be one launch whose tokens the device chooses."""
        return bool(works) and all(_greedy(work.sequence) for work in works) and self._fits(works)

    def takes_prompts(self, works: Seq[Work]) -> bool:
        """Whether the first tokens behind these prefill works can be chosen by the device. Other ranks are told of
        passes and not of tokens."""
        ends = [work.sequence for work in works if work.reaches_end]
        return (
            bool(works)
            and self.graphs.mirror.alone
            and len(ends) <= self._first_tokens.most
            and all(_greedy(sequence) for sequence in ends)
            and not any(work.sequence.scores_prompt for work in works)
        )

    def _fits(self, works: Seq[Work]) -> bool:
        return self.graphs.sizes.takes(len(works), max(_longest(work.sequence) for work in works))

    def trimmed(self, works: Seq[Work], drafts: Seq[Draft]) -> list[Draft]:
        """``drafts`` cut to the rows and the draft blocks that graphs have room for, from the back."""
        if all(draft is NO_DRAFT for draft in drafts):
            return list(drafts)
        longest = max(_longest(work.sequence) for work in works) + max(draft.length for draft in drafts)
        room = self.graphs.sizes.room(len(works), longest)
        blocks = self.graphs.sizes.draft_room(longest)
        fitting = []
        for draft in drafts:
            length = min(draft.length, room)
            if draft.wanted:
                length = min(length, self.graphs.sizes.block_length) if blocks > 0 else 0
                blocks -= length > 0
            room -= length
            fitting.append(_cut(draft, length))
        return fitting

    def launch(self, works: Seq[Work], drafts: Seq[Draft], before: Flight | None) -> Flight:
        """Start a step. ``before`` is the launch just before it, if that has not been read."""
        places = {}
        if before is not None:
            places = {
                id(passenger.work.sequence): place
                for place, passenger in enumerate(before.passengers)
                if passenger.epoch == passenger.work.sequence.epoch
            }
        lanes = [
            _lane(work.sequence, draft, places.get(id(work.sequence), -1), self.graphs.cache.page_size)
            for work, draft in zip(works, drafts, strict=True)
        ]
        started = time.perf_counter()
        launch = self.graphs.launch(lanes)
        passengers = []
        total = 0
        for work, draft in zip(works, drafts, strict=True):
            rows = 1 + draft.length
            work.sequence.in_flight += rows
            total += rows
            passengers.append(Passenger(work, draft, work.sequence.epoch, rows))
        return Flight(tuple(passengers), launch, started, total)

    def launch_prompts(self, works: Seq[Work], batch: FlatBatch, logits: Tensor, started: float) -> Flight:
        """Choose the tokens behind a prefill pass that has just been launched (at ``started``): its works, its batch,
        and the logits of those that reach their end. These count as decoding from here on."""
        launch = self._first_tokens.launch(batch, logits)
        passengers = []
        for work in works:
            if work.reaches_end:
                sequence = work.sequence
                sequence.num_computed += work.count - 1
                sequence.in_flight += 1
                passengers.append(Passenger(Work(sequence, sequence.num_computed, 1), NO_DRAFT, sequence.epoch, 1))
        return Flight(tuple(passengers), launch, started, batch.num_rows)

    def logits(self, works: Seq[tuple[Work, Seq[int]]]) -> Tensor | None:
        """Logits of a step whose tokens the host chooses: the rows of each work and its draft, [R, vocab] float32; None
        where there is no graph for them."""
        rows = sum(1 + len(draft) for _, draft in works)
        longest = max(_longest(work.sequence) + len(draft) for work, draft in works)
        if not self.graphs.sizes.takes(rows, longest):
            return None
        lanes = [
            _lane(work.sequence, Draft("", tuple(draft)), -1, self.graphs.cache.page_size) for work, draft in works
        ]
        return self.graphs.logits(self.graphs.launch(lanes))

    def land(self, flight: Flight) -> Landed:
        """Wait for a flight; its sequences are on the ground again."""
        if isinstance(flight.launch, FirstTokensLaunch):
            read = self._first_tokens.read(flight.launch)
            outcome = Outcome(read, [not tokens for tokens in read], 0.0, 0.0)
        else:
            outcome = self.graphs.read(flight.launch)
        kept = []
        spoilt = []
        for passenger, tokens, bad in zip(flight.passengers, outcome.kept, outcome.spoilt, strict=True):
            sequence = passenger.work.sequence
            if bad:
                spoilt.append(sequence)
            if sequence.epoch == passenger.epoch:
                sequence.in_flight -= passenger.rows
                kept.append((passenger, tokens))
        return Landed(kept, spoilt, outcome.draft_seconds, outcome.verify_seconds)

    def charge(self, started: float) -> float:
        """Seconds that a step which has just been settled added to those before it: all since the last one was charged,
        or since ``started`` where there was none before it. So what the host does for a step counts, waiting or not."""
        now = time.perf_counter()
        since = started if self._charged_until is None else self._charged_until
        self._charged_until = now
        return now - since

    def not_of_this_step(self, seconds: float) -> None:
        """So much of the time since the last charge went into something else, such as launching a prompt."""
        if self._charged_until is not None:
            self._charged_until = min(self._charged_until + seconds, time.perf_counter())

    def pause(self) -> None:
        """Nothing is left to do: the time that passes now belongs to no step."""
        self._charged_until = None


def _greedy(sequence: Sequence) -> bool:
    """The device's best token is the next one, and nothing else is asked of its logits."""
    return sequence.sampler.plain_greedy and sequence.params.logprobs is None


def _longest(sequence: Sequence) -> int:
    """Most positions that the sequence's newest token can see."""
    return min(len(sequence.token_ids) + sequence.in_flight, sequence.last_position)


def _cut(draft: Draft, length: int) -> Draft:
    if length == draft.length:
        return draft
    if length < 1:
        return NO_DRAFT
    if draft.wanted:
        return Draft(draft.source, wanted=length)
    return Draft(draft.source, draft.token_ids[:length])


def _lane(sequence: Sequence, draft: Draft, place: int, page_size: int) -> Lane:
    start = len(sequence.token_ids) - 1
    return Lane(
        place=place,
        start=start,
        anchor=sequence.token_ids[-1],
        pages=sequence.pages,
        end=min(len(sequence.pages) * page_size, sequence.last_position),
        latest=start + sequence.in_flight,
        draft=draft.token_ids,
        wanted=draft.wanted,
    )
