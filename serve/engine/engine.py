"""The step loop: plan, draft, verify, accept, observe, settle.

One ``step`` runs everything that the scheduler planned and hands back what each request gained, in token order. Where
the device can choose the tokens itself (greedy decoding through graphs), a step is launched before the one before it
is settled, so that the device never waits for the host. A request that fails (its logits are NaN, the pass ran out of
memory) ends alone; a drafter that fails costs speed only. This file knows no HTTP, no model family and no process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve.drafter.base import Proposer
from serve.drafter.prompt_lookup import PromptLookup
from serve.engine.choosing import chosen_tokens
from serve.engine.drafting import NO_DRAFT, Draft, Drafting
from serve.engine.requests import UNSCORABLE_LOGITS, UNUSABLE_LOGITS, Requests
from serve.engine.runner import ModelRunner, Rows
from serve.engine.scheduler import Plan, Scheduler, Work
from serve.engine.settling import collect_prompt_logprobs, final_facts, settle
from serve.engine.tally import Tally
from serve.engine.trace import TraceWriter
from serve.protocol import EngineStats, Output, SamplingParams
from serve.tokenizer import Tokenizer
from verify.acceptance import accept
from verify.block_length import BlockLengthController
from verify.sampling import InvalidLogitsError, row_logprobs

if TYPE_CHECKING:  # graphs need Triton, which a CPU may not have
    from serve.engine.ahead import Flight

log = logging.getLogger(__name__)

MAX_FAILED_PASSES = 64
"""Passes in a row that may fail, one request each, before the engine gives up."""


def device_is_lost(error: Exception) -> bool:
    """Whether a CUDA error other than missing memory was raised: it stays with the process."""
    told = str(error)
    return isinstance(error, RuntimeError) and "CUDA error" in told and "ALLOC_FAILED" not in told


class Engine:
    """All requests of one model. Not thread safe: one thread adds, cancels and steps.

    lookup, block: the proposers in use (see Drafting). They and the controller may be exchanged between steps.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        controller: BlockLengthController,
        tokenizer: Tokenizer,
        *,
        lookup: PromptLookup | None = None,
        block: Proposer | None = None,
        max_model_len: int,
        trace: TraceWriter | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.trace = trace or TraceWriter(None)
        self._tally = Tally()
        self._drafting = Drafting(
            controller,
            lookup,
            block,
            runner.model.config.vocab_size,
            self._tally,
            self._stop_observing,
            graphs=runner.ahead is not None,
        )
        vocab_size = runner.model.config.vocab_size
        self._requests = Requests(scheduler, tokenizer, vocab_size, max_model_len, self._drafting.release)
        self._failed_passes = 0
        self._ahead = runner.ahead
        self._flight: Flight | None = None
        runner.on_observer_fault = self._drafting.count_fault

    @property
    def controller(self) -> BlockLengthController:
        return self._drafting.controller

    @controller.setter
    def controller(self, controller: BlockLengthController) -> None:
        self._drafting.controller = controller

    @property
    def lookup(self) -> PromptLookup | None:
        return self._drafting.lookup

    @lookup.setter
    def lookup(self, lookup: PromptLookup | None) -> None:
        self._drafting.lookup = lookup

    @property
    def block(self) -> Proposer | None:
        return self._drafting.block

    @block.setter
    def block(self, block: Proposer | None) -> None:
        self._drafting.block = block

    def _stop_observing(self) -> None:
        self.runner.observer = None

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt_ids: Seq[int], params: SamplingParams, salt: str = "") -> None:
        """Queue a request. ValueError names what is wrong with it; nothing is queued then."""
        self._requests.add(request_id, prompt_ids, params, salt)
        self._tally.counts["prompt_tokens"] += len(prompt_ids)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its pages at once; unknown ids (already finished) are fine."""
        sequence = self._requests.get(request_id)
        if sequence is not None:
            self._requests.leave(sequence)
            self._rest()

    @property
    def has_work(self) -> bool:
        return len(self._requests) > 0

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Run one step; what each request gained, in order. Empty when there is nothing to do, and in the step that
        launches the first of several steps ahead."""
        outputs = self._step()
        self._rest()
        return outputs

    def _rest(self) -> None:
        """Wait for what was launched for requests that have all ended meanwhile: read later, it would seem to have
        taken as long as the pause in between."""
        if not self._requests:
            self._land()
            if self._ahead is not None:
                self._ahead.pause()

    def _step(self) -> list[Output]:
        outputs: list[Output] = []
        if self._flight is not None and not self.scheduler.runs_ahead():
            outputs += self._land()
        plan = self.scheduler.plan()
        drafts = self._drafting.choose(plan)
        flies = self._flies(plan)
        if self._flight is not None and not (
            flies and all(draft is NO_DRAFT or self._drafts_on_device(draft) for draft in drafts)
        ):
            # The host has to know more: a copied draft goes on from the newest token, say.
            outputs += self._land()
            chosen = {work.sequence.id: draft for work, draft in zip(plan.decodes, drafts, strict=True)}
            plan = self.scheduler.plan()
            drafts = self._drafting.renew(plan, chosen)
            flies = self._flies(plan)
        if not plan:
            return outputs + self._requests.take_failed()
        return outputs + (self._fly(plan, drafts) if flies else self._run(plan, drafts))

    def _flies(self, plan: Plan) -> bool:
        """Whether the plan can be launched as it is, its tokens left to the device."""
        if self._ahead is None:
            return False
        return self._ahead.takes(plan.decodes) if plan.decodes else self._ahead.takes_prompts(plan.prefills)

    def _drafts_on_device(self, draft: Draft) -> bool:
        return bool(draft.wanted) and self._ahead is not None and self.block is self._ahead.graphs.drafter

    def _fly(self, plan: Plan, drafts: list[Draft]) -> list[Output]:
        """Launch the decoding part of a plan, and the prefills where the device can choose their first tokens; settle
        the launch before them. Decoded tokens do not wait for the prefills behind them."""
        assert self._ahead is not None
        if any(draft.wanted and not self._drafts_on_device(draft) for draft in drafts):
            self._ahead.graphs.observe_waiting()
            drafts, _ = self._drafting.propose(plan, drafts)
        self._ahead.pages_released(self.scheduler.pool.releases)
        decoding: Flight | None = None
        try:
            if plan.decodes:
                drafts = self._ahead.trimmed(plan.decodes, drafts)
                decoding = self._ahead.launch(plan.decodes, drafts, self._flight)
        except Exception as error:
            self._fail_one(plan, error)
            return self._requests.take_failed()
        chosen_there = self._ahead.takes_prompts(plan.prefills)
        prompts = self._launch_prompts(plan.prefills) if chosen_there else None
        outputs = self._land()
        self._flight = decoding
        if plan.prefills:
            if not chosen_there:
                outputs += self._run(Plan(prefills=plan.prefills), [])
            outputs += self._land()
            self._flight = prompts
        return outputs + self._requests.take_failed()

    def _launch_prompts(self, works: Seq[Work]) -> Flight | None:
        """Launch a prefill pass; what it computes counts as computed, for all that comes is behind it. None where it
        failed."""
        assert self._ahead is not None
        started = time.perf_counter()
        try:
            self._ahead.graphs.observe_waiting()
            batch, _ = self.runner.build_batch([(work, ()) for work in works])
            flight = self._ahead.launch_prompts(works, batch, self.runner.forward_batch(batch), started)
        except Exception as error:
            self._fail_one(Plan(prefills=list(works)), error)
            return None
        for work in works:
            if work.reaches_end:
                work.sequence.register_full_pages(self.scheduler.pool)
            else:
                self._settle_alone(work, NO_DRAFT, [], prefill=True)
        self._ahead.not_of_this_step(time.perf_counter() - started)
        return flight

    def _land(self) -> list[Output]:
        """Settle the step on its way, if there is one. What ended meanwhile gets nothing."""
        if self._flight is None or self._ahead is None:
            return []
        flight, self._flight = self._flight, None
        began = time.perf_counter()
        landed = self._ahead.land(flight)
        self._failed_passes = 0
        outputs: list[Output] = []
        for passenger, kept in landed.kept:
            sequence = passenger.work.sequence
            if kept and self._requests.has(sequence):
                output = self._settle_alone(passenger.work, passenger.draft, kept, prefill=flight.prefills)
                if output is not None:
                    outputs.append(output)
            if sequence in landed.spoilt and self._requests.has(sequence):
                self._requests.fail(sequence, UNUSABLE_LOGITS)
        for sequence in landed.spoilt:  # cancelled ones too: their pages could be found since the launch
            self._requests.distrust(sequence)
        if flight.prefills:
            took = time.perf_counter() - began
            self._ahead.not_of_this_step(took)
        else:
            took = self._ahead.charge(flight.started) - landed.draft_seconds
        self._account(
            [passenger.draft for passenger in flight.passengers],
            landed.draft_seconds,
            max(took, landed.verify_seconds),
            flight.rows,
            prefills=flight.prefills,
        )
        return outputs + self._requests.take_failed()

    def _run(self, plan: Plan, drafts: Seq[Draft]) -> list[Output]:
        """Run a plan and settle it at once, and before it the step on its way."""
        if self._ahead is not None:
            self._ahead.graphs.observe_waiting()
        drafts, draft_seconds = self._drafting.propose(plan, drafts)
        works: list[tuple[Work, tuple[int, ...]]] = [
            *((work, draft.token_ids) for work, draft in zip(plan.decodes, drafts, strict=True)),
            *((work, ()) for work in plan.prefills),
        ]
        started = time.perf_counter()
        outputs: list[Output] = []
        try:
            logits, rows = self.runner.forward(works)
            outputs += self._land()  # while the device runs a prompt behind it
            sampled = self._sample(works, logits, rows)
        except Exception as error:
            self._fail_one(plan, error)
            return outputs + self._requests.take_failed()
        self._failed_passes = 0
        verify_seconds = time.perf_counter() - started
        sources = [*drafts, *(NO_DRAFT for _ in plan.prefills)]
        for index, ((work, _), draft, where, ids) in enumerate(zip(works, sources, rows, sampled, strict=True)):
            if ids is not None and self._requests.has(work.sequence):
                kept = accept(_decided(draft.token_ids, ids), ids) if ids else []
                prefill = index >= len(plan.decodes)
                output = self._settle_alone(work, draft, kept, logits, where, prefill=prefill)
                if output is not None:
                    outputs.append(output)
        if self._ahead is not None and plan.decodes:
            verify_seconds = max(self._ahead.charge(started) - draft_seconds, verify_seconds)
        elif self._ahead is not None:
            self._ahead.not_of_this_step(time.perf_counter() - started)
        count = sum(w.count + len(d) for w, d in works)
        self._account(drafts, draft_seconds, verify_seconds, count, prefills=bool(plan.prefills))
        return outputs + self._requests.take_failed()

    def _settle_alone(
        self,
        work: Work,
        draft: Draft,
        kept: Seq[int],
        logits: Tensor | None = None,
        where: Rows | None = None,
        *,
        prefill: bool,
    ) -> Output | None:
        """Settle one work; whatever goes wrong with it ends its request and no other."""
        try:
            return self._settle(work, draft, kept, logits, where, prefill=prefill)
        except InvalidLogitsError:  # of a row that was to be scored only: no token was chosen from it
            self._requests.distrust(work.sequence)
            self._requests.fail(work.sequence, UNSCORABLE_LOGITS)
            return None
        except Exception as error:
            log.exception("settling request %s failed", work.sequence.id)
            self._requests.fail(
                work.sequence, f"its tokens could not be settled: {type(error).__name__}: {str(error)[:200]}"
            )
            return None

    def _settle(
        self, work: Work, draft: Draft, kept: Seq[int], logits: Tensor | None, where: Rows | None, *, prefill: bool
    ) -> Output | None:
        """logits and where: the rows of this work, for requests that want log-probabilities."""
        sequence = work.sequence
        if sequence.scores_prompt and logits is not None and where is not None:
            collect_prompt_logprobs(work, logits, where)
        gained = settle(work, draft, kept, self.scheduler.pool, self._tally, self.controller, prefill=prefill)
        if gained is None:
            return None
        if sequence.params.logprobs is not None and logits is not None and where is not None:
            first = where.first + where.count - 1 - draft.length
            chosen = logits[first : first + len(gained.token_ids)]
            gained = replace(gained, logprobs=row_logprobs(chosen, gained.token_ids, sequence.params.logprobs))
        if gained.finish_reason is None:
            return gained
        final = final_facts(sequence)
        self.trace.write(sequence, gained.finish_reason, final)
        self._requests.leave(sequence)
        return replace(gained, final=final)

    def _sample(self, works: Seq[tuple[Work, Seq[int]]], logits: Tensor, rows: Seq[Rows]) -> list[list[int] | None]:
        """The target's own tokens for each work: [] for a chunk that does not reach the end, None where it failed."""
        chosen, refused = chosen_tokens(works, logits, rows)
        for sequence in refused:
            self._requests.distrust(sequence)
            self._requests.fail(sequence, UNUSABLE_LOGITS)
        return chosen

    def _account(
        self, drafts: Seq[Draft], draft_seconds: float, verify_seconds: float, rows: int, *, prefills: bool = False
    ) -> None:
        self._tally.step(rows, draft_seconds, verify_seconds)
        if not prefills:
            blocks = self._drafting.drafted(drafts)
            self.controller.observe_cost(
                rows=rows,
                drafted_rows=sum(draft.length for draft in drafts),
                drafted_sequences=blocks,
                verify_seconds=verify_seconds,
                draft_seconds=draft_seconds,
                copies=sum(draft.length > 0 for draft in drafts) > blocks,
            )

    # -- endings -----------------------------------------------------------------------------------------------------

    def _fail_one(self, plan: Plan, error: Exception) -> None:
        """A pass failed as a whole: end the newest prefill, or the newest sequence, and let the others try again.
        Those that sampling refused before it failed have ended already."""
        self._failed_passes += 1
        if self._failed_passes > MAX_FAILED_PASSES or device_is_lost(error) or not self.runner.mirror.alone:
            # Not one request's fault, and every pass after it will fail (ranks that are out of step stay so): a new
            # process may do better.
            raise error
        prefills, decodes = (
            [w.sequence for w in works if self._requests.has(w.sequence)] for works in (plan.prefills, plan.decodes)
        )
        suspects = prefills or decodes
        if suspects:
            newest = max(suspects, key=lambda sequence: sequence.order)
            self._requests.fail(newest, f"the forward pass failed: {type(error).__name__}: {str(error)[:200]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- observation -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return self._tally.stats(self.scheduler)

    def check(self) -> None:
        """Integrity of the page books (AssertionError otherwise); cheap enough to run whenever the engine is idle."""
        self.scheduler.pool.check([s.pages for s in self._requests.all()])


def _decided(draft: tuple[int, ...], ids: Seq[int]) -> tuple[int, ...]:
    """The drafts that the target's tokens decide: all of them, but where the list ends in agreement with one, before a
    row that could not be used."""
    agrees = len(ids) <= len(draft) and ids[-1] == draft[len(ids) - 1]
    return draft[: len(ids) - 1] if agrees else draft
