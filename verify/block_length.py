"""How many drafted tokens to verify, per request and step: the most tokens per second, and never a bad bet for long.

Each step the engine asks ``plan`` before drafting, tells ``observe`` what was kept and ``observe_cost`` how long it
took. The plan is the best goodput under the estimates (see verify/estimates.py, goodput.py and costs.py), 0 included.
On top of it:
  stake      speculation plays with a stake, in seconds. It starts with a few rounds, grows by a small share of the time
             that passes, wins what accepted tokens are worth and pays for every second that drafts are measured to add
             to a step. When it is used up nothing is drafted until it has grown again. So the loss against plain
             decoding is bounded whatever a drafter does; winnings are capped, so that a good past cannot be squandered.
             Few streams and many have stakes of their own: what pays for the one may never pay for the other.
  probes     what is not drafted is not seen. On a small share of the time some requests get longer drafts, up to what
             would be best if they were as good as can be hoped; success brings a request's next probe at once, failure
             makes it wait.
  hysteresis the previous lengths stay until the gain from changing them is worth it.
Everything is deterministic. No tensors, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verify.costs import CostTable
from verify.estimates import AcceptancePrior, RequestEstimate, SourceEstimate, survival
from verify.goodput import Offer, StepPricer, StepWork, best_lengths, preferred

STAKE_SHARE = 0.01
"""Part of the time that speculation may lose in the long run."""
STAKE_START_STEPS = 3.0
STAKE_LIMIT_STEPS = 30.0
STAKE_DEBT_STEPS = 10.0
"""Stake at the start, its upper limit, and how far below nothing a bad moment can take it, in plain steps."""
PROBE_SHARE = 0.01
"""Part of the time that probes may add."""
SURPRISE_LIMIT = 3.0
"""Times a step's price by which a single measured time can move the stake: other work on the machine is not ours."""
AGE_STEPS = 64
"""Steps after which costs that were not measured meanwhile are doubted."""
DRAFT_WAKE = 8
"""Steps after a draft pass whose times say nothing about plain decoding."""
HYSTERESIS = 0.01
"""Gain in goodput that is worth changing the lengths for."""
HOPE = 0.92
"""Conditional acceptance of as good a drafter as can be hoped for: what a probe looks for."""
_NO_LIMIT = 1 << 30
_PROBE_GAP = 4
_PROBE_GAP_LIMIT = 64
_PROBES_PER_STEP = 8


@dataclass(frozen=True)
class Candidate:
    """A sequence that could have a draft of up to ``max_length`` tokens (>= 0) verified in this step.

    ``source`` is "block" for a draft that a draft pass has yet to make, anything else (such as "lookup:3") for one that
    costs nothing to make; acceptance is learned per source.
    """

    id: str
    source: str
    max_length: int


@dataclass
class _Request:
    """What is remembered about one request, by source."""

    estimates: dict[str, RequestEstimate]
    lengths: dict[str, int]
    probe_gap: int = _PROBE_GAP
    next_probe: int = 0
    probing: bool = False


class BlockLengthController:
    """Chooses block lengths. ``max_length`` is the longest any source drafts; ``fixed`` switches the choosing off."""

    def __init__(
        self, costs: CostTable, max_length: int, prior: AcceptancePrior | None = None, fixed: int | None = None
    ) -> None:
        if max_length < 0 or (fixed is not None and fixed < 0):
            raise ValueError(f"block lengths must be >= 0, got max_length {max_length}, fixed {fixed}")
        self.costs = costs
        self.max_length = max_length
        self.fixed = fixed
        self._prior = prior or AcceptancePrior()
        self._sources: dict[str, SourceEstimate] = {}
        self._requests: dict[str, _Request] = {}
        self._step = 0
        self._token_seconds = 0.0
        self._steps_since_draft = DRAFT_WAKE
        self._steps_to_age = AGE_STEPS
        self._steps_unplanned = 0
        self._stakes: dict[int, float] = {}
        self._crowd = 0
        """Which stake the latest step played with: about the logarithm of how many sequences it decoded."""
        self._probe_price = 0.0
        self._probe_credit = math.inf  # as much as the stake, until spent
        self._repeatable: tuple[float, float] | None = None
        """Seconds of a plain step and what the latest plan's drafts add, where the plan is good for more steps."""

    def plan(
        self,
        candidates: Sequence[Candidate],
        plain_rows: int,
        plain_tokens: int | None = None,
        row_limit: int | None = None,
    ) -> list[int]:
        """Block length (0 .. its max_length) of each candidate; each request also has one row of its own.

        A request may have several candidates (a copy and a block, say): at most one of them gets a length above 0.
        plain_rows: rows of the step that are not up for choice (prefill chunks, sequences without a candidate);
        plain_tokens of them give a token (all, if not told: then prefill counts as progress too, which makes drafting
        beside a prefill chunk rarer). row_limit: most rows of the step in all.
        """
        self._repeatable = None
        limits = [max(0, min(candidate.max_length, self.max_length)) for candidate in candidates]
        work = StepWork(plain_rows, plain_rows if plain_tokens is None else plain_tokens, row_limit or _NO_LIMIT)
        if self.fixed is not None:
            return _fitted(candidates, [min(self.fixed, limit) for limit in limits], work)
        if not candidates or not any(limits):
            return [0] * len(limits)
        self._step += 1
        offers = [
            Offer(self._survival(candidate, limit), candidate.source == "block")
            for candidate, limit in zip(candidates, limits, strict=True)
        ]
        picked = preferred(self.costs, work, [candidate.id for candidate in candidates], offers)
        lengths = [0] * len(candidates)
        chosen = self._choose(
            [candidates[i] for i in picked], [limits[i] for i in picked], [offers[i] for i in picked], work
        )
        for index, length in zip(picked, chosen, strict=True):
            lengths[index] = length
        return lengths

    def _choose(
        self, candidates: Sequence[Candidate], limits: Sequence[int], offers: Sequence[Offer], work: StepWork
    ) -> list[int]:
        """Lengths for candidates of different requests."""
        requests = [self._request(candidate.id) for candidate in candidates]
        pricer = StepPricer(self.costs, work, offers)
        self._token_seconds = pricer.token_seconds
        plain = pricer.verify[pricer.base_tokens]
        self._crowd = (pricer.base_tokens + 1).bit_length()
        stake = self._grown_stake(plain)
        lengths = self._settled(best_lengths(pricer), pricer, candidates, requests)
        if stake <= 0.0:
            lengths = [0] * len(limits)
        probed = self._with_probes(lengths, stake, pricer, requests, limits)
        extra = pricer.extra_seconds(probed)
        self._stakes[self._crowd] = stake - extra
        if probed == lengths:
            self._repeatable = plain, extra
        return probed

    def again(self) -> bool:
        """Whether the lengths of the latest plan are good for one more step, which is charged like the first one. Not
        for ever: the caller sees to it that new estimates are looked at now and then."""
        if self._repeatable is None:
            return False
        plain, extra = self._repeatable
        stake = self._grown_stake(plain)
        if stake <= 0.0:
            return False
        self._step += 1
        self._stakes[self._crowd] = stake - extra
        return True

    def observe(self, id: str, source: str, drafted: int, accepted: int) -> None:
        """What came of a draft: ``accepted`` of ``drafted`` tokens were kept."""
        if drafted < 1 or self.fixed is not None or self.max_length < 1:
            return
        self._source(source).observe(drafted, accepted, self._step)
        self._win(accepted * self._token_seconds)
        request = self._requests.get(id)
        if request is None:
            return
        self._estimate(request, source).observe(drafted, accepted, self._step, self._source(source))
        if request.probing:
            request.probing = False
            good = 2 * accepted >= drafted or accepted >= 2
            request.probe_gap = _PROBE_GAP if good else min(_PROBE_GAP_LIMIT, 2 * request.probe_gap)
            request.next_probe = self._step + (0 if good else request.probe_gap)

    def observe_cost(
        self,
        *,
        rows: int,
        drafted_rows: int,
        drafted_sequences: int,
        verify_seconds: float,
        draft_seconds: float,
        copies: bool = False,
    ) -> None:
        """What a step took; a part that did not happen is given as 0. ``drafted_rows`` of its rows were drafted tokens,
        some of them copies if it says so; what such a step took beyond its price comes out of the stake, and what it
        saved goes in.

        On a CPU a draft pass pushes weights of the target out of the caches, and the target's next passes are slower
        for it. So what drafted steps take says nothing about other row counts, and plain steps soon after one are not
        counted: else drafting would make plain decoding look dear, and go on for that.
        """
        if self.fixed is not None:
            return
        self._steps_unplanned += 1
        self._steps_to_age -= 1
        if self._steps_to_age == 0:
            self._steps_to_age = AGE_STEPS
            self.costs.age()
        verify, draft = self.costs.verify, self.costs.draft
        waited = copies and self.costs.copying_waits
        if drafted_rows:
            price = verify.seconds(rows) + self.costs.draft_seconds(drafted_sequences)
            if waited:
                self.costs.observe_copying(verify_seconds + draft_seconds - price)
                price += self.costs.copying_seconds
            excess = verify_seconds + draft_seconds - price
            self._win(-max(-SURPRISE_LIMIT * price, min(SURPRISE_LIMIT * price, excess)))
        self._steps_since_draft += 1
        if draft is not None and drafted_sequences:
            draft.observe(drafted_sequences, draft_seconds)
            self._steps_since_draft = 0
        if not waited and (drafted_rows or self._steps_since_draft > DRAFT_WAKE):
            verify.observe(rows, verify_seconds, alone=self._steps_since_draft == 0)

    def release(self, id: str) -> None:
        """Forget a finished request; unknown ids are fine."""
        self._requests.pop(id, None)

    def _request(self, id: str) -> _Request:
        request = self._requests.get(id)
        if request is None:
            request = self._requests[id] = _Request({}, {})
        return request

    def _source(self, source: str) -> SourceEstimate:
        estimate = self._sources.get(source)
        if estimate is None:
            estimate = self._sources[source] = SourceEstimate(self._prior.curve(source, self.max_length), self._step)
        return estimate

    def _estimate(self, request: _Request, source: str) -> RequestEstimate:
        estimate = request.estimates.get(source)
        if estimate is None:
            estimate = request.estimates[source] = RequestEstimate(self.max_length, self._step)
        return estimate

    def _survival(self, candidate: Candidate, limit: int) -> list[float]:
        source = self._source(candidate.source)
        request = self._requests.get(candidate.id)
        estimate = request.estimates.get(candidate.source) if request else None
        return survival(source.odds(self._step), estimate.ratio(source, self._step) if estimate else 1.0, limit)

    def _grown_stake(self, plain: float) -> float:
        """The stake of the latest step's crowd, after what the steps since the last choice add to it. What probes may
        spend grows by as much for them, up to the stake, and falls no lower than a debt of these streams can be."""
        stake = self._stakes.get(self._crowd)
        steps, self._steps_unplanned = max(1, self._steps_unplanned), 0
        lowest = -STAKE_DEBT_STEPS * plain
        if stake is None:
            stake = STAKE_START_STEPS * plain
        else:
            stake = min(max(stake, lowest) + STAKE_SHARE * plain * steps, STAKE_LIMIT_STEPS * plain)
        self._probe_credit = min(max(self._probe_credit, lowest) + PROBE_SHARE * plain * steps, stake)
        return stake

    def _win(self, seconds: float) -> None:
        if self._crowd in self._stakes:
            self._stakes[self._crowd] += seconds

    def _settled(
        self, lengths: list[int], pricer: StepPricer, candidates: Sequence[Candidate], requests: Sequence[_Request]
    ) -> list[int]:
        """The previous lengths where they still fit and the new ones are hardly better; else the new ones, noted."""
        previous = [
            request.lengths.get(candidate.source, -1) for candidate, request in zip(candidates, requests, strict=True)
        ]
        if previous == lengths:
            return lengths
        fits = all(0 <= before <= len(offer.survival) for before, offer in zip(previous, pricer.offers, strict=True))
        fits = fits and pricer.base_rows + sum(previous) <= pricer.work.row_limit
        if fits and pricer.goodput(lengths) < (1.0 + HYSTERESIS) * pricer.goodput(previous):
            return previous
        for candidate, request, length in zip(candidates, requests, lengths, strict=True):
            request.lengths[candidate.source] = length
        return lengths

    def _with_probes(
        self,
        lengths: list[int],
        stake: float,
        pricer: StepPricer,
        requests: Sequence[_Request],
        limits: Sequence[int],
    ) -> list[int]:
        """Lengths with longer ones for a few requests due for a probe, as far as the stake pays for all drafts."""
        due = sorted((request.next_probe, i) for i, request in enumerate(requests) if request.next_probe <= self._step)
        if not due or stake <= 0.0 or self._probe_credit < self._probe_price:
            return lengths
        hope = pricer.with_offers(
            [
                Offer([HOPE ** (k + 1) for k in range(limit)], offer.drafted)
                for limit, offer in zip(limits, pricer.offers, strict=True)
            ]
        )
        hoped = best_lengths(hope)
        chosen: list[int] = []
        for _, index in due:
            if hoped[index] <= lengths[index]:
                requests[index].next_probe = self._step + _PROBE_GAP
            elif len(chosen) < _PROBES_PER_STEP:
                chosen.append(index)
        if not chosen:
            return lengths
        # Two more tokens for each tell most; more only where rows are nearly free.
        before = hope.seconds(lengths)
        room = pricer.work.row_limit - pricer.base_rows - sum(lengths)
        probed = _raised(lengths, chosen, hoped, 2, room)
        if probed == lengths:
            return lengths
        cost = hope.seconds(probed) - before
        for more in range(3, self.max_length + 1):
            longer = _raised(lengths, chosen, hoped, more, room)
            if longer == probed or hope.seconds(longer) - before > 1.25 * cost:
                break
            probed = longer
        cost = hope.seconds(probed) - before
        if cost > self._probe_credit:
            self._probe_price = cost  # saved up for; the price may be another one by then
            return lengths
        self._probe_credit -= cost
        self._probe_price = 0.0
        for index in chosen:
            requests[index].probing = True
        return probed


def _raised(lengths: Sequence[int], chosen: Sequence[int], hoped: Sequence[int], more: int, room: int) -> list[int]:
    """Lengths with the chosen ones ``more`` longer, up to what is hoped for and ``room`` rows in all."""
    raised = list(lengths)
    for index in chosen:
        extra = min(hoped[index] - lengths[index], more, room)
        raised[index] += extra
        room -= extra
    return raised


def _fitted(candidates: Sequence[Candidate], lengths: Sequence[int], work: StepWork) -> list[int]:
    """Lengths for the first candidate of each request that has any, cut from the back of the list to the row limit."""
    room = max(0, work.row_limit - work.other_rows - len({candidate.id for candidate in candidates}))
    fitted, served = [], set()
    for candidate, length in zip(candidates, lengths, strict=True):
        fitted.append(0 if candidate.id in served else min(length, room))
        room -= fitted[-1]
        if length:
            served.add(candidate.id)
    return fitted
