"""Who drafts how much for whom: asks the proposers what they could draft, the controller how much of it is worth
verifying, and the block drafter for the tokens.

A proposer that fails, or answers nonsense, costs speed only: the fault is counted and repeated ones switch it off. This
file knows no pass of the target and does not decide what is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from serve.drafter.base import DraftRequest, Proposer
from serve.drafter.prompt_lookup import PromptLookup
from serve.engine.copying import SearchBudget
from serve.engine.scheduler import Plan
from serve.engine.sequence import Sequence
from serve.engine.tally import Tally
from verify.block_length import BlockLengthController, Candidate

log = logging.getLogger(__name__)

MAX_DRAFTER_FAULTS = 3
CHOICE_SHARE = 0.005
LONGEST_PAUSE = 256
"""Steps without a choice at most, while at least half of the sequences are still there."""
KEPT_SHARE = 0.03
LONGEST_KEPT = 8
"""A choice of something is kept for as many steps as bring its time below this share of theirs, and so many at most."""


@dataclass(frozen=True)
class Draft:
    """Tokens to verify after the newest token of a sequence, and the proposer they came from. ``wanted``: how many
    the block drafter is to propose, where it has not yet."""

    source: str = ""
    token_ids: tuple[int, ...] = ()
    wanted: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids) or self.wanted


NO_DRAFT = Draft()


def check_drafts(drafts: Seq[Seq[int]], requests: Seq[DraftRequest], vocab_size: int) -> None:
    """ValueError unless there is one draft for each request, no longer than asked, of token ids of the vocabulary."""
    if len(drafts) != len(requests):
        raise ValueError(f"{len(drafts)} drafts for {len(requests)} requests")
    for draft, request in zip(drafts, requests, strict=True):
        if len(draft) > request.max_length:
            raise ValueError(f"a draft of {len(draft)} tokens where {request.max_length} were asked for")
        if draft and not 0 <= min(draft) <= max(draft) < vocab_size:
            raise ValueError("a drafted token is outside the vocabulary")


class Drafting:
    """The proposers and the controller of one engine; any of them may be exchanged between steps.

    lookup is asked first because it is nearly free, and the block drafter drafts for the sequences that lookup has
    nothing for. ``on_switch_off`` is called when the block drafter has failed too often. ``graphs``: decoding steps are
    launches of their own, without the rows of prefills, and may take little longer than choosing does: choosing nothing
    again and again must not cost more than CHOICE_SHARE of the time, and what was chosen is kept for some steps.
    """

    def __init__(
        self,
        controller: BlockLengthController,
        lookup: PromptLookup | None,
        block: Proposer | None,
        vocab_size: int,
        tally: Tally,
        on_switch_off: Callable[[], None],
        *,
        graphs: bool = False,
    ) -> None:
        self.controller = controller
        self.lookup = lookup
        self.block = block
        self._vocab_size = vocab_size
        self._tally = tally
        self._on_switch_off = on_switch_off
        self._graphs = graphs
        self._budget = SearchBudget(limited=graphs)
        self._pause = 0
        self._paused_with = 0
        self._kept = 0
        self._chosen: dict[str, Draft] = {}
        self._chosen_rows = 0

    def choose(self, plan: Plan) -> list[Draft]:
        """A draft for each decoding sequence, as long as the controller likes; the block drafter's are only wanted yet.
        No drafts when anything in it fails, and in the steps after a choice of nothing that was dear."""
        if 2 * len(plan.decodes) < self._paused_with:
            self._pause = 0
        if self._pause > 0 or (self.lookup is None and self.block is None):
            self._pause = max(0, self._pause - 1)
            return [NO_DRAFT] * len(plan.decodes)
        started = time.perf_counter()
        try:
            if self._keeps(plan):
                self._kept -= 1
                return self.renew(plan, self._chosen)
            drafts = self._choose(plan)
            if self._graphs and plan.decodes:
                self._rest(plan, drafts, started)
            return drafts
        except Exception as error:
            self.count_fault(error)
            if self._tally.counts["drafter_faults"] >= MAX_DRAFTER_FAULTS:
                self.lookup = None
            return [NO_DRAFT] * len(plan.decodes)

    def _keeps(self, plan: Plan) -> bool:
        """Whether the latest choice is good for this step too: it knows all who may be drafted for, its rows fit."""
        return (
            self._kept > 0
            and self._chosen_rows <= plan.draft_budget
            and all(work.sequence.id in self._chosen for work in plan.decodes)
            and self.controller.again()
        )

    def _rest(self, plan: Plan, drafts: Seq[Draft], started: float) -> None:
        """Do not choose again before a choice that began at ``started`` has been worth its time. Beside a prompt
        nothing may be chosen for want of rows: that says nothing about the next steps."""
        rows = len(plan.decodes) + sum(draft.length for draft in drafts)
        step = self.controller.costs.verify_seconds(rows)
        took = time.perf_counter() - started
        self._kept = 0
        self._chosen_rows = rows - len(plan.decodes)
        if not self._chosen_rows:
            if plan.prefills:
                return
            self._pause = min(LONGEST_PAUSE, int(took / (CHOICE_SHARE * step)))
            self._paused_with = len(plan.decodes)
        else:
            self._kept = min(LONGEST_KEPT, int(took / (KEPT_SHARE * step)))
            self._chosen = {work.sequence.id: draft for work, draft in zip(plan.decodes, drafts, strict=True)}

    def _choose(self, plan: Plan) -> list[Draft]:
        guesses = self._guesses(plan)
        candidates: list[Candidate] = []
        owners: list[int] = []
        for index, work in enumerate(plan.decodes):
            sequence = work.sequence
            room = self._room(sequence)
            if room < 1 or not sequence.params.speculation:
                continue
            guess = guesses.get(index, NO_DRAFT)
            if guess.token_ids:
                candidates.append(Candidate(sequence.id, guess.source, guess.length))
                owners.append(index)
            # Both may be offered for one sequence; the controller gives a length to one of them at most.
            if self.block is not None:
                candidates.append(Candidate(sequence.id, self.block.name, min(room, self._block_length())))
                owners.append(index)
        drafts = [NO_DRAFT] * len(plan.decodes)
        if not candidates:
            return drafts
        offered = len(set(owners))
        undrafted = len(plan.decodes) - offered
        beside = [] if self._graphs else plan.prefills
        plain_rows = sum(w.count for w in beside) + undrafted
        lengths = self.controller.plan(
            candidates,
            plain_rows,
            plain_tokens=undrafted + sum(w.reaches_end for w in beside),
            row_limit=plain_rows + offered + plan.draft_budget,
        )
        for candidate, index, length in zip(candidates, owners, lengths, strict=True):
            if index in guesses and candidate.source == guesses[index].source:
                self._budget.copies(candidate.id, length > 0)
            if length < 1:
                continue
            if self.block is None or candidate.source != self.block.name:
                drafts[index] = Draft(candidate.source, guesses[index].token_ids[:length])
            else:
                drafts[index] = Draft(candidate.source, wanted=length)
        return drafts

    def _room(self, sequence: Sequence) -> int:
        """Tokens worth drafting; steps on their way bring one at least."""
        room = sequence.last_position - len(sequence.token_ids) - (sequence.in_flight > 0) - 1
        most = self.controller.max_length
        return most if room > most else room

    def _block_length(self) -> int:
        """Tokens that the block drafter has in a block; a stand-in may have any number."""
        size: int | None = getattr(self.block, "block_size", None)
        return self.controller.max_length if size is None else size - 1

    def _guesses(self, plan: Plan) -> dict[int, Draft]:
        """Copies found, by place in the plan, as far as the budget for searching goes."""
        wanting = {
            work.sequence.id: (index, self._room(work.sequence))
            for index, work in enumerate(plan.decodes)
            if work.sequence.params.speculation
        }
        if self.lookup is None or not wanting:
            return {}
        due = self._budget.due(list(wanting), self.controller.costs.verify_seconds(len(plan.decodes)))
        started = time.perf_counter()
        guesses = {}
        for name, (index, room) in wanting.items():
            if room >= 1 and name in due:
                guess = self._look_up(plan.decodes[index].sequence, room)
                if guess.token_ids:
                    guesses[index] = guess
                else:
                    self._budget.copies(name, False)
        self._budget.took(len(due), time.perf_counter() - started)
        return guesses

    def _look_up(self, sequence: Sequence, room: int) -> Draft:
        if self.lookup is None:
            return NO_DRAFT
        match = self.lookup.lookup(DraftRequest(sequence.id, sequence.token_ids, room))
        return Draft(match.source, match.token_ids) if match.token_ids else NO_DRAFT

    def renew(self, plan: Plan, before: Mapping[str, Draft]) -> list[Draft]:
        """Drafts of the lengths chosen before (by request id), now that more of each sequence is known."""
        drafts = []
        for work in plan.decodes:
            sequence = work.sequence
            old = before.get(sequence.id, NO_DRAFT)
            length = min(old.length, self._room(sequence))
            if length < 1:
                drafts.append(NO_DRAFT)
            elif old.wanted:
                drafts.append(Draft(old.source, wanted=length))
            else:
                drafts.append(self._look_up(sequence, length))
        return drafts

    def propose(self, plan: Plan, drafts: Seq[Draft]) -> tuple[list[Draft], float]:
        """``drafts`` with the block drafter's tokens in the place of what was wanted, and the seconds that took."""
        wanted = [index for index, draft in enumerate(drafts) if draft.wanted]
        resolved = [NO_DRAFT if draft.wanted else draft for draft in drafts]
        if not wanted or self.block is None:
            return resolved, 0.0
        requests = []
        for index in wanted:
            sequence = plan.decodes[index].sequence
            requests.append(DraftRequest(sequence.id, sequence.token_ids, drafts[index].wanted, tuple(sequence.pages)))
        started = time.perf_counter()
        try:
            proposed = self.block.propose(requests)
            check_drafts(proposed, requests, self._vocab_size)
        except Exception as error:
            self.count_fault(error)
            return resolved, time.perf_counter() - started
        for index, token_ids in zip(wanted, proposed, strict=True):
            if token_ids:
                resolved[index] = Draft(drafts[index].source, tuple(token_ids))
        return resolved, time.perf_counter() - started

    def count_fault(self, error: Exception) -> None:
        """Plain decoding for this step; repeated faults switch the block drafter off."""
        counts = self._tally.counts
        counts["drafter_faults"] += 1
        log.warning("drafter failed, decoding plainly: %s: %s", type(error).__name__, str(error)[:200])
        if counts["drafter_faults"] >= MAX_DRAFTER_FAULTS:
            log.warning("drafter switched off after %d faults", MAX_DRAFTER_FAULTS)
            self.block = None
            self._on_switch_off()

    def drafted(self, drafts: Seq[Draft]) -> int:
        """How many of ``drafts`` a draft pass made."""
        return 0 if self.block is None else sum(draft.source == self.block.name for draft in drafts)

    def release(self, request_id: str) -> None:
        """Forget a finished request."""
        self.controller.release(request_id)
        self._budget.release(request_id)
        if self.lookup is not None:
            self.lookup.release(request_id)
