"""The step loop: plan, draft, verify, accept, observe, settle.

One ``step`` runs everything that the scheduler planned in one target pass and hands back what each request gained,
in token order. A request that fails (its logits are NaN, the pass ran out of memory) ends alone; a drafter that fails
costs speed only. This file knows no HTTP, no model family and no process.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from serve.drafter.base import DraftRequest, Proposer
from serve.drafter.prompt_lookup import PromptLookup
from serve.engine.runner import ModelRunner, Rows
from serve.engine.scheduler import Plan, Scheduler, Work
from serve.engine.sequence import Round, Sequence
from serve.engine.text import TextStream
from serve.engine.trace import TraceWriter
from serve.protocol import EngineStats, Output, SamplingParams
from serve.tokenizer import Tokenizer
from verify.acceptance import accept
from verify.block_length import BlockLengthController, Candidate
from verify.sampling import InvalidLogitsError, RequestSampler, RowGroup, row_logprobs, sample_rows

log = logging.getLogger(__name__)

MAX_DRAFTER_FAULTS = 3
MAX_FAILED_PASSES = 64
"""Passes in a row that may fail, one request each, before the engine gives up."""
# Prompt tokens that the detokeniser may look back at, for decoders where a token's text depends on the one before.
PROMPT_TAIL = 8


@dataclass(frozen=True)
class Draft:
    """Tokens to verify after the newest token of a sequence, and the proposer they came from."""

    source: str = ""
    token_ids: tuple[int, ...] = ()


NO_DRAFT = Draft()


def device_is_lost(error: Exception) -> bool:
    """Whether a CUDA error other than missing memory was raised: it stays with the process."""
    told = str(error)
    return isinstance(error, RuntimeError) and "CUDA error" in told and "ALLOC_FAILED" not in told


def check_drafts(drafts: Seq[Seq[int]], requests: Seq[DraftRequest], vocab_size: int) -> None:
    """ValueError unless there is one draft for each request, no longer than asked, of token ids of the vocabulary."""
    if len(drafts) != len(requests):
        raise ValueError(f"{len(drafts)} drafts for {len(requests)} requests")
    for draft, request in zip(drafts, requests, strict=True):
        if len(draft) > request.max_length:
            raise ValueError(f"a draft of {len(draft)} tokens where {request.max_length} were asked for")
        if draft and not 0 <= min(draft) <= max(draft) < vocab_size:
            raise ValueError("a drafted token is outside the vocabulary")


class Engine:
    """All requests of one model. Not thread safe: one thread adds, cancels and steps.

    lookup, block: the proposers in use; lookup is asked first because it is nearly free, and the block drafter drafts
    for the sequences that lookup has nothing for.
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
        self.controller = controller
        self.tokenizer = tokenizer
        self.lookup = lookup
        self.block = block
        self.max_model_len = max_model_len
        self.trace = trace or TraceWriter(None)
        self._sequences: dict[str, Sequence] = {}
        self._failed: list[Output] = []
        self._counts: Counter[str] = Counter()
        self._accepted_per_position: list[int] = []
        self._block_lengths: Counter[str] = Counter()
        self._draft_seconds = 0.0
        self._verify_seconds = 0.0
        self._failed_passes = 0
        runner.on_observer_fault = self._count_drafter_fault

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt_ids: Seq[int], params: SamplingParams, salt: str = "") -> None:
        """Queue a request. ValueError names what is wrong with it; nothing is queued then."""
        if request_id in self._sequences:
            raise ValueError(f"request id {request_id!r} is already in use")
        vocab_size = self.runner.model.config.vocab_size
        if not prompt_ids:
            raise ValueError("the prompt has no tokens")
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
            raise ValueError(f"prompt token ids must be between 0 and {vocab_size - 1}")
        if params.max_tokens < 1 or len(prompt_ids) + params.max_tokens > self.max_model_len:
            raise ValueError(
                f"max_tokens ({params.max_tokens}) must be at least 1, and with the prompt ({len(prompt_ids)}) at most "
                f"the context of {self.max_model_len} tokens"
            )
        end_ids = self.tokenizer.end_token_ids
        sequence = Sequence(
            id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            sampler=RequestSampler(params, prompt_ids, end_ids, vocab_size),
            text=TextStream(self.tokenizer, params, params.max_tokens, end_ids, tuple(prompt_ids[-PROMPT_TAIL:])),
            salt=salt,
        )
        self.scheduler.add(sequence)
        self._sequences[request_id] = sequence
        self._counts["prompt_tokens"] += len(prompt_ids)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its pages at once; unknown ids (already finished) are fine."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._forget(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Run one step; what each request gained, in order. Empty when there is nothing to do."""
        outputs: list[Output] = []
        plan = self.scheduler.plan()
        if not plan:
            return outputs
        drafts, draft_seconds = self._draft_safely(plan)
        works: list[tuple[Work, tuple[int, ...]]] = [
            *((work, draft.token_ids) for work, draft in zip(plan.decodes, drafts, strict=True)),
            *((work, ()) for work in plan.prefills),
        ]
        started = time.perf_counter()
        try:
            logits, rows = self.runner.forward(works)
            sampled = self._sample(works, logits, rows)
        except Exception as error:
            return outputs + self._fail_one(plan, error)
        self._failed_passes = 0
        verify_seconds = time.perf_counter() - started
        self._account(plan, drafts, draft_seconds, verify_seconds, sum(w.count + len(d) for w, d in works))
        sources = [*drafts, *(NO_DRAFT for _ in plan.prefills)]
        for (work, _), draft, where, ids in zip(works, sources, rows, sampled, strict=True):
            if ids is not None and work.sequence.id in self._sequences:
                output = self._settle_alone(work, draft, logits, where, ids)
                if output is not None:
                    outputs.append(output)
        return outputs + self._take_failed()

    def _settle_alone(self, work: Work, draft: Draft, logits: Tensor, where: Rows, ids: list[int]) -> Output | None:
        """``_settle``, where whatever goes wrong with one request ends that request and no other."""
        try:
            return self._settle(work, draft, logits, where, ids)
        except Exception as error:
            log.exception("settling request %s failed", work.sequence.id)
            self._fail(work.sequence, f"its tokens could not be settled: {type(error).__name__}: {str(error)[:200]}")
            return None

    def _take_failed(self) -> list[Output]:
        failed, self._failed = self._failed, []
        return failed

    def _draft_safely(self, plan: Plan) -> tuple[list[Draft], float]:
        """``_draft``, or no drafts when anything in it fails: a proposer or a length never costs a step."""
        try:
            return self._draft(plan)
        except Exception as error:
            self._count_drafter_fault(error)
            if self._counts["drafter_faults"] >= MAX_DRAFTER_FAULTS:
                self.lookup = None
            return [NO_DRAFT] * len(plan.decodes), 0.0

    def _draft(self, plan: Plan) -> tuple[list[Draft], float]:
        """A draft for each decoding sequence, as long as the controller likes, and the seconds that drafting took."""
        guesses: dict[int, Draft] = {}
        candidates: list[Candidate] = []
        owners: list[int] = []
        for index, work in enumerate(plan.decodes):
            sequence = work.sequence
            room = min(self.controller.max_length, sequence.last_position - len(sequence.token_ids) - 1)
            if room < 1 or not sequence.params.speculation:
                continue
            request = DraftRequest(sequence.id, sequence.token_ids, room, tuple(sequence.pages))
            if self.lookup is not None:
                match = self.lookup.lookup(request)
                if match.token_ids:
                    guesses[index] = Draft(match.source, match.token_ids)
                    candidates.append(Candidate(sequence.id, match.source, len(match.token_ids)))
                    owners.append(index)
            # Both may be offered for one sequence; the controller gives a length to one of them at most.
            if self.block is not None:
                candidates.append(Candidate(sequence.id, self.block.name, room))
                owners.append(index)
        drafts = [NO_DRAFT] * len(plan.decodes)
        if not candidates:
            return drafts, 0.0
        offered = len(set(owners))
        undrafted = len(plan.decodes) - offered
        plain_rows = sum(w.count for w in plan.prefills) + undrafted
        lengths = self.controller.plan(
            candidates,
            plain_rows,
            plain_tokens=undrafted + sum(w.reaches_end for w in plan.prefills),
            row_limit=plain_rows + offered + plan.draft_budget,
        )
        wanted: list[tuple[int, DraftRequest]] = []
        for candidate, index, length in zip(candidates, owners, lengths, strict=True):
            if length < 1:
                continue
            if self.block is None or candidate.source != self.block.name:
                drafts[index] = Draft(candidate.source, guesses[index].token_ids[:length])
            else:
                sequence = plan.decodes[index].sequence
                wanted.append((index, DraftRequest(sequence.id, sequence.token_ids, length, tuple(sequence.pages))))
        started = time.perf_counter()
        for (index, _), token_ids in zip(wanted, self._propose([r for _, r in wanted]), strict=True):
            if token_ids and self.block is not None:
                drafts[index] = Draft(self.block.name, tuple(token_ids))
        return drafts, time.perf_counter() - started

    def _propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        """The block drafter's guesses. A fault gives none, is counted, and repeated faults switch the drafter off."""
        nothing: list[list[int]] = [[] for _ in requests]
        if self.block is None or not requests:
            return nothing
        try:
            drafts = self.block.propose(requests)
            check_drafts(drafts, requests, self.runner.model.config.vocab_size)
        except Exception as error:
            self._count_drafter_fault(error)
            return nothing
        return drafts

    def _count_drafter_fault(self, error: Exception) -> None:
        """Plain decoding for this step; repeated faults switch the drafter off, its observation included."""
        self._counts["drafter_faults"] += 1
        log.warning("drafter failed, decoding plainly: %s: %s", type(error).__name__, str(error)[:200])
        if self._counts["drafter_faults"] >= MAX_DRAFTER_FAULTS:
            log.warning("drafter switched off after %d faults", MAX_DRAFTER_FAULTS)
            self.block = None
            self.runner.observer = None

    def _sample(self, works: Seq[tuple[Work, Seq[int]]], logits: Tensor, rows: Seq[Rows]) -> list[list[int] | None]:
        """The target's own tokens for each work: [] for a chunk that does not reach the end, None where it failed."""
        groups: list[RowGroup] = []
        owners: list[int] = []
        for index, ((work, draft), where) in enumerate(zip(works, rows, strict=True)):
            if work.reaches_end and where.count:
                first = where.first + where.count - 1 - len(draft)
                groups.append(RowGroup(work.sequence.sampler, first, tuple(draft), len(work.sequence.token_ids)))
                owners.append(index)
        results: list[list[int] | None] = [None] * len(works)
        while groups:
            try:
                for index, ids in zip(owners, sample_rows(logits, groups), strict=True):
                    results[index] = ids
                break
            except InvalidLogitsError as error:
                for group in sorted(error.groups, reverse=True):
                    sequence = works[owners[group]][0].sequence
                    self._fail(sequence, "no token can be chosen: the logits are NaN, infinite or all masked")
                    del groups[group], owners[group]
        # A prefill chunk that does not reach the end has no token to choose but still has to be settled.
        return [[] if ids is None and not works[i][0].reaches_end else ids for i, ids in enumerate(results)]

    def _settle(self, work: Work, draft: Draft, logits: Tensor, where: Rows, ids: list[int]) -> Output | None:
        """Commit what one work produced, token by token, up to its end."""
        sequence = work.sequence
        if sequence.scores_prompt:
            self._collect_prompt_logprobs(work, logits, where)
        if not ids:
            sequence.num_computed += work.count
            sequence.register_full_pages(self.scheduler.pool)
            return None
        decoding = sequence.is_decoding
        kept = accept(draft.token_ids, ids)
        first_row = where.first + where.count - 1 - len(draft.token_ids)
        accepted = len(kept) - 1
        text: list[str] = []
        committed: list[int] = []
        finish_reason: str | None = None
        stop_reason: str | int | None = None
        for token_id in kept:
            committed.append(token_id)
            released = sequence.text.push(token_id)
            text.append(released.text)
            if released.finish_reason is not None:
                finish_reason, stop_reason = released.finish_reason, released.stop_reason
                break
        prompt_logprobs = None
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
            if sequence.params.prompt_logprobs is not None:
                prompt_logprobs = tuple(sequence.prompt_logprobs)
                sequence.prompt_logprobs = []
        logprobs = None
        if sequence.params.logprobs is not None:
            chosen = logits[first_row : first_row + len(committed)]
            logprobs = tuple(row_logprobs(chosen, committed, sequence.params.logprobs))
        sequence.token_ids += committed
        sequence.sampler.commit(committed)
        sequence.num_computed += work.count + min(accepted, len(committed) - 1)
        self._counts["generation_tokens"] += len(committed)
        this_round = self._record_round(sequence, draft, accepted, len(committed)) if decoding else None
        sources = [draft.source.partition(":")[0]] * min(accepted, len(committed))
        sources += ["target"] * (len(committed) - len(sources))
        sequence.register_full_pages(self.scheduler.pool)
        gained = Output(sequence.id, "".join(text), tuple(committed), tuple(sources), logprobs, prompt_logprobs)
        if sequence.params.provenance:
            counts = None if this_round is None else (this_round.source, this_round.drafted, this_round.accepted)
            gained = replace(gained, round=counts, pieces=tuple(text))
        return gained if finish_reason is None else self._finish(sequence, gained, finish_reason, stop_reason)

    def _collect_prompt_logprobs(self, work: Work, logits: Tensor, where: Rows) -> None:
        """Log-probabilities of the prompt tokens that follow this chunk's rows."""
        sequence = work.sequence
        targets = sequence.prompt_ids[work.start + 1 : work.start + work.count + 1]
        chunk = logits[where.first : where.first + len(targets)]
        assert sequence.params.prompt_logprobs is not None
        # A preempted prefill starts again: what it had scored is scored once more.
        del sequence.prompt_logprobs[work.start + 1 :]
        sequence.prompt_logprobs += row_logprobs(chunk, targets, sequence.params.prompt_logprobs)

    def _record_round(self, sequence: Sequence, draft: Draft, agreed: int, committed: int) -> Round:
        """Count a round: of the tokens that agreed, those behind the request's end were not kept."""
        drafted, accepted = len(draft.token_ids), min(agreed, committed)
        this_round = Round(draft.source.partition(":")[0], drafted, accepted)
        sequence.rounds.append(this_round)
        self._block_lengths[str(drafted)] += 1
        if not drafted:
            return this_round
        # What lies behind the end was not refused either: the controller is told of the part before it only.
        self.controller.observe(sequence.id, draft.source, drafted if accepted == agreed else accepted, accepted)
        self._counts["drafts"] += 1
        self._counts["draft_tokens"] += drafted
        self._counts["accepted_tokens"] += accepted
        grow = drafted - len(self._accepted_per_position)
        self._accepted_per_position += [0] * grow
        for position in range(accepted):
            self._accepted_per_position[position] += 1
        return this_round

    def _account(self, plan: Plan, drafts: Seq[Draft], draft_seconds: float, verify_seconds: float, rows: int) -> None:
        self._counts["steps"] += 1
        self._counts["step_tokens"] += rows
        self._draft_seconds += draft_seconds
        self._verify_seconds += verify_seconds
        if not plan.prefills:
            drafted = sum(1 for d in drafts if self.block is not None and d.source == self.block.name)
            self.controller.observe_cost(
                rows=rows, drafted_sequences=drafted, verify_seconds=verify_seconds, draft_seconds=draft_seconds
            )

    # -- endings -----------------------------------------------------------------------------------------------------

    def _finish(
        self,
        sequence: Sequence,
        gained: Output,
        finish_reason: str,
        stop_reason: str | int | None,
    ) -> Output:
        now = time.monotonic()
        admitted = sequence.admitted or now
        first_token = sequence.first_token or now
        final: dict[str, Any] = {
            "prompt_tokens": sequence.num_prompt,
            "cached_tokens": sequence.num_cached,
            "completion_tokens": sequence.num_output,
            "queue_seconds": admitted - sequence.arrival,
            "prefill_seconds": first_token - admitted,
            "decode_seconds": now - first_token,
            "speculation": {
                "sources": [r.source for r in sequence.rounds],
                "drafted": [r.drafted for r in sequence.rounds],
                "accepted": [r.accepted for r in sequence.rounds],
            },
        }
        self.trace.write(sequence, finish_reason, final)
        self._forget(sequence)
        return replace(gained, finish_reason=finish_reason, stop_reason=stop_reason, final=final)

    def _fail(self, sequence: Sequence, reason: str) -> None:
        log.warning("request %s failed: %s", sequence.id, reason)
        self._forget(sequence)
        self._failed.append(Output(sequence.id, finish_reason="error", error=reason))

    def _fail_one(self, plan: Plan, error: Exception) -> list[Output]:
        """A pass failed as a whole: end the newest prefill, or the newest sequence, and let the others try again."""
        self._failed_passes += 1
        if self._failed_passes > MAX_FAILED_PASSES or device_is_lost(error):
            # Not one request's fault, and every pass after it will fail: a new process may do better.
            raise error
        works = plan.prefills or plan.decodes
        newest = max(works, key=lambda w: w.sequence.order).sequence
        self._fail(newest, f"the forward pass failed: {type(error).__name__}: {str(error)[:200]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self._take_failed()

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        self.scheduler.remove(sequence)
        self.controller.release(sequence.id)
        if self.lookup is not None:
            self.lookup.release(sequence.id)

    # -- observation -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        counts = self._counts
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_pages_total=self.scheduler.pool.num_pages,
            kv_pages_free=self.scheduler.pool.num_available,
            steps=counts["steps"],
            step_tokens=counts["step_tokens"],
            prompt_tokens=counts["prompt_tokens"],
            generation_tokens=counts["generation_tokens"],
            prefix_queries=self.scheduler.prefix_queries,
            prefix_hits=self.scheduler.prefix_hits,
            preemptions=self.scheduler.num_preemptions,
            drafts=counts["drafts"],
            draft_tokens=counts["draft_tokens"],
            accepted_tokens=counts["accepted_tokens"],
            accepted_per_position=tuple(self._accepted_per_position),
            block_lengths=dict(self._block_lengths),
            drafter_faults=counts["drafter_faults"],
            draft_seconds=self._draft_seconds,
            verify_seconds=self._verify_seconds,
        )

    def check(self) -> None:
        """Integrity of the page books (AssertionError otherwise); cheap enough to run whenever the engine is idle."""
        self.scheduler.pool.check([s.pages for s in self._sequences.values()])
