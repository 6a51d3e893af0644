"""One request inside the engine: its tokens, how far they are computed, the pages it holds, and its history.

Every phase is the same thing here: ``num_computed`` chases ``len(token_ids)``. This file knows no scheduling policy,
no tensors and no HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from serve.engine.pages import PagePool, root_hash
from serve.engine.text import TextStream
from serve.protocol import SamplingParams, TokenLogprob
from verify.sampling import RequestSampler


class Round(NamedTuple):
    """One verify pass of a decoding sequence: where the draft came from, its length, and how much was kept."""

    source: str
    drafted: int
    accepted: int


@dataclass(eq=False)
class Sequence:
    """A request alive in the engine.

    order: rank by arrival, given by the scheduler; the highest is preempted first.
    token_ids: prompt and committed output. num_computed: leading tokens whose K/V is in the pages.
    pages: page ids in order; together they cover at least num_computed positions. A list only ever grows; pages that
    are dropped leave with their list. findable: pages that this request computed and made findable, or found, by id and
    chain hash, since its arrival.
    last_position: exclusive end of the positions that this request may ever use.
    in_flight: most tokens that launched steps whose outcome was not read yet may add; where the first of them ends a
    prefill, its last row alone is not computed in these books. epoch: counts the times its pages were dropped; what an
    earlier epoch launched is not its own any more.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    sampler: RequestSampler
    text: TextStream
    salt: str = ""
    order: int = 0
    arrival: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    findable: list[tuple[int, bytes]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    admitted: float | None = None
    first_token: float | None = None
    preemptions: int = 0
    in_flight: int = 0
    epoch: int = 0
    num_prompt: int = field(init=False)
    last_position: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt_ids)
        self.last_position = self.num_prompt + self.params.max_tokens
        if not self.token_ids:
            self.token_ids = list(self.prompt_ids)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Only the newest token, produced by this engine or on its way, is left to compute."""
        return self.num_computed == len(self.token_ids) - 1 >= self.num_prompt - (self.in_flight > 0)

    @property
    def ends_in_flight(self) -> bool:
        """The steps on their way bring its last token whatever they accept."""
        return self.in_flight > 0 and len(self.token_ids) + 1 >= self.last_position

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of the prompt are still wanted: every prompt row must be computed and its logits kept."""
        return self.params.prompt_logprobs is not None and self.first_token is None

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def register_full_pages(self, pool: PagePool) -> None:
        """Make the pages findable that have become full of computed, committed tokens."""
        if not pool.reuse:
            return
        size = pool.page_size
        while (len(self.page_hashes) + 1) * size <= self.num_computed:
            index = len(self.page_hashes)
            parent = self.page_hashes[-1] if self.page_hashes else root_hash(self.salt)
            ids = self.token_ids[index * size : (index + 1) * size]
            digest = pool.register(self.pages[index], parent, ids)
            self.page_hashes.append(digest)
            self.findable.append((self.pages[index], digest))

    def drop_pages(self, pool: PagePool) -> None:
        """Give all pages back; what was computed must be found in the prefix cache or computed again."""
        pool.release(self.pages)
        self.pages = []
        self.page_hashes = []
        self.num_computed = 0
        self.in_flight = 0
        self.epoch += 1
