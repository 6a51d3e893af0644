"""The block lengths of one step that give the most expected tokens per predicted second.

Slots (position k of a request's draft) are admitted from the most to the least likely to be kept, over all requests
together, and every number of admitted slots is priced with the measured costs; the best of all is taken, not the first
that is not beaten by the next, because costs are staircases. The idea of one ordering over the batch is DSpark's
(2026) and goodput as the aim is SmartSpec's (2024). No state, no learning: see verify/block_length.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verify.costs import CostTable


@dataclass(frozen=True)
class Offer:
    """A draft that could be verified: ``survival[k]`` is the chance that its first k + 1 tokens are kept.

    ``drafted`` says that making it takes a draft pass (a block), as opposed to a copy that is already there.
    """

    survival: Sequence[float]
    drafted: bool


@dataclass(frozen=True)
class StepWork:
    """What the step does in any case, besides one row for each offer.

    ``other_tokens`` of the ``other_rows`` give a token (decoding sequences without an offer); the rest is prefill,
    whose cost is the same whichever lengths are chosen, but whose rows share the pass.
    """

    other_rows: int
    other_tokens: int
    row_limit: int


class StepPricer:
    """Prices sets of lengths for one step. Lengths are in the order of the offers."""

    def __init__(self, costs: CostTable, work: StepWork, offers: Sequence[Offer]) -> None:
        self._costs = costs
        self.offers = offers
        self.work = work
        self.base_rows = work.other_rows + len(offers)
        self.base_tokens = work.other_tokens + len(offers)
        most = self.base_rows + sum(len(offer.survival) for offer in offers)
        self.verify = costs.verify.table(min(most, max(self.base_rows, work.row_limit)))
        self.draft = costs.draft_table(sum(offer.drafted for offer in offers))
        self.copying = costs.copying_seconds
        # What a token costs without any draft, in a step without prefill: the value of a token gained.
        self.token_seconds = self.verify[self.base_tokens] / self.base_tokens if self.base_tokens else 0.0

    def with_offers(self, offers: Sequence[Offer]) -> StepPricer:
        """The same step with other chances for the same drafts."""
        return StepPricer(self._costs, self.work, offers)

    def seconds(self, lengths: Sequence[int]) -> float:
        """Predicted seconds of the step, drafting included."""
        used = [offer.drafted for offer, length in zip(self.offers, lengths, strict=True) if length]
        drafts = sum(used)
        copying = self.copying if drafts < len(used) else 0.0
        return self.verify[self.base_rows + sum(lengths)] + self.draft[drafts] + copying

    def extra_seconds(self, lengths: Sequence[int]) -> float:
        """What drafting and verifying adds to the step."""
        return self.seconds(lengths) - self.verify[self.base_rows]

    def extra_tokens(self, lengths: Sequence[int]) -> float:
        """Expected drafted tokens kept."""
        return sum(sum(offer.survival[:length]) for offer, length in zip(self.offers, lengths, strict=True))

    def goodput(self, lengths: Sequence[int]) -> float:
        """Expected tokens per second, without the prefill's part of the step."""
        return self._rate(self.extra_tokens(lengths), self.seconds(lengths))

    def _rate(self, extra_tokens: float, seconds: float) -> float:
        # Prefill rows pay for reading the weights; decode is charged as if it had to pay for itself, plus what the
        # lengths add to this very step. Without prefill this is the plain ratio.
        own = self.verify[self.base_tokens] + seconds - self.verify[self.base_rows]
        return (self.base_tokens + extra_tokens) / own

    def best(self, *, drafting: bool = True, copying: bool = True) -> list[int]:
        """Lengths with the highest goodput found by the global greedy, of blocks and copies or of one kind alone."""
        slots = sorted(
            # Survival falls strictly along a draft, so its slots come in order.
            [
                (-alive, index)
                for index, offer in enumerate(self.offers)
                if (drafting if offer.drafted else copying)
                for alive in offer.survival
            ]
        )
        if not slots:
            return [0] * len(self.offers)
        verify, draft, offers = self.verify, self.draft, self.offers
        started = [not offer.drafted for offer in offers]
        constant = verify[self.base_tokens] - verify[self.base_rows]
        waits = self.copying > 0.0
        most_tokens = self.base_tokens - sum(minus_alive for minus_alive, _ in slots)
        room = max(0, self.work.row_limit - self.base_rows)
        tokens, drafts, rows = float(self.base_tokens), 0, self.base_rows
        best_rate, best_count = self.base_tokens / verify[self.base_tokens], 0
        for count, (minus_alive, index) in enumerate(slots[:room], start=1):
            tokens -= minus_alive
            rows += 1
            if waits and not offers[index].drafted:
                constant += self.copying
                waits = False
            if not started[index]:
                started[index] = True
                drafts += 1
            seconds = constant + verify[rows] + draft[drafts]
            if tokens > best_rate * seconds:
                best_rate, best_count = tokens / seconds, count
            elif most_tokens <= best_rate * seconds:
                break  # not even all tokens to come would do
        lengths = [0] * len(offers)
        for _, index in slots[:best_count]:
            lengths[index] += 1
        return self._pruned(lengths) if drafting else lengths

    def best_alone(self, index: int) -> int:
        """The length of one offer with the highest goodput where no other gets any."""
        offer, verify, rows = self.offers[index], self.verify, self.base_rows
        constant = verify[self.base_tokens] - verify[rows] + (self.draft[1] if offer.drafted else self.copying)
        tokens = float(self.base_tokens)
        best_rate, best_length = tokens / verify[self.base_tokens], 0
        for length, alive in enumerate(offer.survival[: max(0, self.work.row_limit - rows)], start=1):
            tokens += alive
            seconds = constant + verify[rows + length]
            if tokens > best_rate * seconds:
                best_rate, best_length = tokens / seconds, length
        return best_length

    def _pruned(self, lengths: list[int]) -> list[int]:
        """Without the drafted sequences that do not earn what drafting and verifying them adds."""
        for index in sorted(range(len(lengths)), key=lambda i: sum(self.offers[i].survival[: lengths[i]])):
            if lengths[index] and self.offers[index].drafted:
                without = list(lengths)
                without[index] = 0
                if self.goodput(without) <= self.goodput(lengths):
                    break
                lengths = without
        return lengths


def best_lengths(pricer: StepPricer) -> list[int]:
    """The best of some plans: any draft allowed, only those that need no draft pass, only those that need one (where a
    copy costs more than its rows), or the likeliest block alone."""
    if len(pricer.offers) == 1:
        return [pricer.best_alone(0)]
    plans = [pricer.best(drafting=False)]
    blocks = [index for index, offer in enumerate(pricer.offers) if offer.drafted]
    if blocks:
        plans.append(pricer.best())
        if pricer.copying and len(blocks) < len(pricer.offers):
            plans.append(pricer.best(copying=False))
        likeliest = max(blocks, key=lambda index: sum(pricer.offers[index].survival))
        alone = [0] * len(pricer.offers)
        alone[likeliest] = pricer.best_alone(likeliest)
        plans.append(alone)
    return max(plans, key=pricer.goodput)


def preferred(costs: CostTable, work: StepWork, ids: Sequence[str], offers: Sequence[Offer]) -> list[int]:
    """Indices of one offer for each request: the one worth most by itself, the draft pass shared by all blocks
    and the wait for copies by all copies."""
    rivals: dict[str, list[int]] = {}
    for index, id in enumerate(ids):
        rivals.setdefault(id, []).append(index)
    if len(rivals) == len(offers):
        return list(range(len(offers)))
    rows = work.other_tokens + len(rivals)
    blocks = sum(offer.drafted for offer in offers)
    draft_share = costs.draft_seconds(blocks) / max(1, blocks)
    copy_share = costs.copying_seconds / max(1, len(offers) - blocks)
    verify = costs.verify.table(rows + max(len(offer.survival) for offer in offers))

    def worth(index: int) -> tuple[float, float]:
        offer, tokens, best = offers[index], 0.0, 0.0
        for length, alive in enumerate(offer.survival, start=1):
            tokens += alive
            best = max(best, tokens * verify[rows] / rows - (verify[rows + length] - verify[rows]))
        # Where none is worth anything, the likelier one is left to be probed.
        return max(0.0, best - (draft_share if offer.drafted else copy_share)), tokens

    return [max(indices, key=worth) for indices in rivals.values()]
