"""The requests alive in an engine: what is refused before it is queued, and how each one leaves, finished, dropped or
failed. This file knows no passes, no drafts and no device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, ValuesView
from collections.abc import Sequence as Seq

import numpy as np

from serve.engine.scheduler import Scheduler
from serve.engine.sequence import Sequence
from serve.engine.text import PROMPT_TAIL, TextStream
from serve.protocol import Output, SamplingParams
from serve.tokenizer import Tokenizer
from verify.sampling import RequestSampler

log = logging.getLogger(__name__)

UNUSABLE_LOGITS = "no token can be chosen: the logits are NaN, infinite or all masked"
UNSCORABLE_LOGITS = "a token that was to be scored has no log-probability: the logits are NaN or infinite"


class Requests:
    """By id. ``on_leave`` is told the id of every request that leaves."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        on_leave: Callable[[str], None],
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._on_leave = on_leave
        self._sequences: dict[str, Sequence] = {}
        self._failed: list[Output] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, request_id: str) -> Sequence | None:
        return self._sequences.get(request_id)

    def has(self, sequence: Sequence) -> bool:
        """Whether this very request is alive, and not another one of its id."""
        return self._sequences.get(sequence.id) is sequence

    def all(self) -> ValuesView[Sequence]:
        return self._sequences.values()

    def add(self, request_id: str, prompt_ids: Seq[int], params: SamplingParams, salt: str) -> None:
        """Queue a request. ValueError names what is wrong with it; nothing is queued then."""
        if request_id in self._sequences:
            raise ValueError(f"request id {request_id!r} is already in use")
        if not len(prompt_ids):
            raise ValueError("the prompt has no tokens")
        numbers = np.asarray(prompt_ids)  # of an array no copy: thousands of ids are looked at in microseconds
        if numbers.min() < 0 or numbers.max() >= self._vocab_size:
            raise ValueError(f"prompt token ids must be between 0 and {self._vocab_size - 1}")
        if params.max_tokens < 1 or len(prompt_ids) + params.max_tokens > self._max_model_len:
            raise ValueError(
                f"max_tokens ({params.max_tokens}) must be at least 1, and with the prompt ({len(prompt_ids)}) at most "
                f"the context of {self._max_model_len} tokens"
            )
        end_ids = self._tokenizer.end_token_ids
        sequence = Sequence(
            id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            sampler=RequestSampler(params, prompt_ids, end_ids, self._vocab_size),
            text=TextStream(self._tokenizer, params, params.max_tokens, end_ids, tuple(prompt_ids[-PROMPT_TAIL:])),
            salt=salt,
        )
        self._scheduler.add(sequence)
        self._sequences[request_id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Forget a request and free its pages at once."""
        del self._sequences[sequence.id]
        self._scheduler.remove(sequence)
        self._on_leave(sequence.id)

    def fail(self, sequence: Sequence, reason: str) -> None:
        """End a request with an error, which ``take_failed`` hands out."""
        log.warning("request %s failed: %s", sequence.id, reason)
        self.leave(sequence)
        self._failed.append(Output(sequence.id, finish_reason="error", error=reason))

    def distrust(self, sequence: Sequence) -> None:
        """Logits of a request, alive or not, were no numbers: nobody finds the pages any more that it made findable,
        nor those that it found: a prompt in parts may have ended before any logits told of what it left there."""
        self._scheduler.pool.forget_pages(sequence.findable)

    def take_failed(self) -> list[Output]:
        """The errors since the last time."""
        failed, self._failed = self._failed, []
        return failed
