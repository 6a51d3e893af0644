"""What a step's tokens do to a request: its text, its end, its rounds, its pages, and the output that goes out.

Tokens arrive in the order they were produced and are committed one by one up to the request's end. This file knows
neither passes nor drafting, and fails nobody: the caller decides what an exception costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from torch import Tensor

from serve.engine.drafting import Draft
from serve.engine.pages import PagePool
from serve.engine.runner import Rows
from serve.engine.scheduler import Work
from serve.engine.sequence import Round, Sequence
from serve.engine.tally import Tally
from serve.protocol import Output
from verify.block_length import BlockLengthController
from verify.sampling import row_logprobs

PLAIN_ROUND = Round("", 0, 0)


def settle(
    work: Work,
    draft: Draft,
    kept: Seq[int],
    pool: PagePool,
    tally: Tally,
    controller: BlockLengthController,
    *,
    prefill: bool,
) -> Output | None:
    """Commit what one work produced: ``kept`` are the drafted tokens the target agreed with and its own token after
    them, none for a chunk that does not reach the end (then there is no output). prefill: the work was no decoding
    round."""
    sequence = work.sequence
    if not kept:
        sequence.num_computed += work.count
        sequence.register_full_pages(pool)
        return None
    accepted = len(kept) - 1
    text: list[str] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    for token_id in kept:
        piece, finish_reason, stop_reason = sequence.text.push(token_id)
        text.append(piece)
        if finish_reason is not None:
            break
    count = len(text)
    committed = tuple(kept[:count])
    prompt_logprobs = None
    if sequence.first_token is None:
        sequence.first_token = time.monotonic()
        if sequence.params.prompt_logprobs is not None:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
            sequence.prompt_logprobs = []
    sequence.token_ids += committed
    sequence.sampler.commit(committed)
    sequence.num_computed += work.count + min(accepted, count - 1)
    tally.counts["generation_tokens"] += count
    this_round = None if prefill else _record_round(sequence, draft, accepted, count, tally, controller)
    drafted = min(accepted, count)
    sources = (draft.source.partition(":")[0],) * drafted + ("target",) * (count - drafted)
    sequence.register_full_pages(pool)
    gained = Output(
        sequence.id,
        "".join(text),
        committed,
        sources,
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
    if sequence.params.provenance:
        counts = None if this_round is None else (this_round.source, this_round.drafted, this_round.accepted)
        gained = replace(gained, round=counts, pieces=tuple(text))
    return gained


def _record_round(
    sequence: Sequence, draft: Draft, agreed: int, committed: int, tally: Tally, controller: BlockLengthController
) -> Round:
    """Count a round: of the tokens that agreed, those behind the request's end were not kept."""
    drafted, accepted = draft.length, min(agreed, committed)
    this_round = Round(draft.source.partition(":")[0], drafted, accepted) if drafted else PLAIN_ROUND
    sequence.rounds.append(this_round)
    tally.round(this_round)
    if drafted:
        # What lies behind the end was not refused either: the controller is told of the part before it only.
        controller.observe(sequence.id, draft.source, drafted if accepted == agreed else accepted, accepted)
    return this_round


def collect_prompt_logprobs(work: Work, logits: Tensor, where: Rows) -> None:
    """Log-probabilities of the prompt tokens that follow this chunk's rows."""
    sequence = work.sequence
    targets = sequence.prompt_ids[work.start + 1 : work.start + work.count + 1]
    chunk = logits[where.first : where.first + len(targets)]
    assert sequence.params.prompt_logprobs is not None
    # A preempted prefill starts again: what it had scored is scored once more.
    del sequence.prompt_logprobs[work.start + 1 :]
    sequence.prompt_logprobs += row_logprobs(chunk, targets, sequence.params.prompt_logprobs)


def final_facts(sequence: Sequence) -> dict[str, Any]:
    """``Output.final`` of a request that ends now."""
    now = time.monotonic()
    admitted = sequence.admitted or now
    first_token = sequence.first_token or now
    return {
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
