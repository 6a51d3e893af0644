"""A model and a drafter that a test can run thousands of steps of: the next token is a hash of all tokens so far, read
back from the K/V pages through the page tables. Whoever writes to a wrong slot, reads a wrong page, sees one position
too many or passes a wrong token gets another text.

They have the faces of TritonTargetModel and TritonBlockDrafter, in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from serve.drafter.base import DraftRequest
from serve.kernels.kv_cache import KVCache
from serve.kernels.triton.attention import Spans, TritonPlan, build_plan
from serve.model.batch import FlatBatch
from serve.model.target import ForwardOutput

VOCAB = 320
PRIME = 2_147_483_629


def next_token(tokens: Sequence[int]) -> int:
    """What follows ``tokens``."""
    return _hash(torch.tensor(list(tokens), dtype=torch.int64))


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def _hash(tokens: Tensor) -> int:
    """Mostly a function of the last two tokens, so that text repeats and copies match; now and then of them all."""
    recent = int((tokens[-2:] * torch.tensor([31, 7])[-len(tokens[-2:]) :]).sum()) % 5
    places = torch.arange(1, len(tokens) + 1)
    every = int((tokens * places * places % PRIME).sum() % 9)
    return 4 + recent + (40 if every == 0 else 0)


class HashModel:
    """Hidden states are one number a row: the next token. Taps are the row's own token."""

    def __init__(self) -> None:
        self.config: Any = SimpleNamespace(
            vocab_size=VOCAB,
            hidden_size=1,
            num_layers=1,
            num_heads=4,
            num_kv_heads=1,
            head_dim=1,
            max_position_embeddings=512,
        )
        self.device = torch.device("cpu")
        self.cache_dtype = torch.float32
        self.weights = "hash"
        self.turns = torch.zeros(1)
        self.stack = self
        self.poisoned: set[int] = set()

    def kv_bytes_per_page(self, page_size: int) -> int:
        return 8 * page_size

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        cache = KVCache(1, num_pages, page_size, 1, 1)
        cache.layers[0].fill_(-1)
        return cache

    def reserve(self, length: int) -> None:
        pass

    def embed(self, token_ids: Tensor) -> Tensor:
        return token_ids.float()[:, None]

    def run(
        self,
        residual: Tensor,
        positions: Tensor,
        slots: Tensor,
        turns: Tensor,
        plan: TritonPlan,
        cache: KVCache,
        taps: Sequence[int] = (),
        wanted: Tensor | None = None,
        tapped: Callable[[Tensor], object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        pages = cache.layers[0]
        size = cache.page_size
        for token, slot in zip(residual[:, 0].tolist(), slots.tolist(), strict=True):
            pages[slot // size, 0, 0, slot % size, 0] = token
        hidden = torch.zeros(len(residual), 1)
        for spans in (plan.split, plan.prefill):
            if spans is not None:
                _attend(spans, plan.visible, pages, hidden)
        if tapped is not None:
            tapped(residual.clone())
        return hidden if wanted is None else hidden[wanted], residual.clone()

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        ids = hidden[:, 0].long()
        bad = torch.tensor([token in self.poisoned for token in ids.tolist()], dtype=torch.bool)
        return ids, torch.where(bad, torch.nan, 1.0)

    def logits(self, hidden: Tensor) -> Tensor:
        ids, values = self.best(hidden)
        rows = torch.zeros(len(ids), VOCAB)
        rows[torch.arange(len(ids)), ids] = 9.0
        return torch.where(values.isnan()[:, None], torch.nan, rows)

    def forward(self, batch: FlatBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        plan = build_plan(batch, cache.page_size)
        hidden, kept = self.run(
            self.embed(batch.token_ids), batch.positions, batch.slots, self.turns, plan, cache, taps
        )
        return ForwardOutput(self.logits(hidden.index_select(0, batch.logit_rows)), kept if taps else None)


def _attend(spans: Spans, visible: Tensor, pages: Tensor, hidden: Tensor) -> None:
    size = pages.shape[3]
    for table, (start, stop, _) in zip(spans.tables, spans.spans.tolist(), strict=False):
        for row in range(start, stop):
            seen = torch.arange(int(visible[row]))
            tokens = pages[table.long()[seen // size], 0, 0, seen % size, 0].long()
            if len(tokens):
                hidden[row, 0] = _hash(tokens)


class HashDrafter:
    """Drafts the truth as far as its context is complete, spoilt where a number says so; garbage otherwise."""

    name = "block"
    taps = (0,)
    block_size = 4
    description = "hash drafter"

    def __init__(self, spoil: int = 5) -> None:
        self.config: Any = SimpleNamespace(
            num_attention_heads=4, num_key_value_heads=1, mask_token_id=3, max_position_embeddings=512
        )
        self._spoil = spoil
        self.cache: KVCache | None = None

    def kv_bytes_per_page(self, page_size: int) -> int:
        return 8 * page_size

    def allocate_cache(self, num_pages: int, page_size: int) -> None:
        self.cache = KVCache(1, num_pages, page_size, 1, 1)
        self.cache.layers[0].fill_(-1)

    def reserve(self, length: int) -> None:
        pass

    def observe(self, batch: FlatBatch, taps: Tensor) -> None:
        self.observe_rows(taps, batch.positions, batch.slots)

    def observe_rows(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        assert self.cache is not None
        size = self.cache.page_size
        for token, slot in zip(taps[:, 0].tolist(), slots.tolist(), strict=True):
            self.cache.layers[0][slot // size, 0, 0, slot % size, 0] = token

    def hidden(self, token_ids: Tensor, positions: Tensor, slots: Tensor, plan: TritonPlan) -> Tensor:
        assert self.cache is not None
        assert plan.split is not None
        pages, size, spans = self.cache.layers[0], self.cache.page_size, plan.split
        owner = {row: index for index, (a, b, _) in enumerate(spans.spans.tolist()) for row in range(a, b)}
        hidden = torch.zeros(len(token_ids), 1)
        for first in range(0, len(token_ids), self.block_size):
            if int(plan.visible[first]) == 0:
                continue
            table, start = spans.tables[owner[first]].long(), int(positions[first])
            seen = torch.arange(start)
            tokens = [*pages[table[seen // size], 0, 0, seen % size, 0].long().tolist(), int(token_ids[first])]
            hidden[first : first + self.block_size, 0] = torch.tensor([0, *self.guess(tokens)]).float()
        return hidden

    def guess(self, tokens: Sequence[int]) -> list[int]:
        drafts = continuation(tokens, self.block_size - 1)
        return [9 if (sum(tokens) + place) % self._spoil == 0 else token for place, token in enumerate(drafts)]

    def best(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0].long()

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self.guess(request.token_ids)[: request.max_length] for request in requests]
