"""What a model split over N cards of one node pays: two all-reduces a layer, the head's exchange, KV heads copied.

A collective takes a start, so many hops and its bytes over the link; the figures are card data with their sources
(``data/cards.json``). Pure arithmetic: it knows no server, no NCCL, and nothing of what else a step does.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from eval.shapes import DATA

ACTIVATION_BYTES = 2
"""Sums of a prompt cross the link in 16 bits."""
STEP_BYTES = 8
"""Those of a step in float32, each with a flag beside it: NCCL's protocol of low latency."""
CANDIDATE_BYTES = 8
"""Greedy rows exchange each rank's largest logit and its index, four bytes each."""


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes a second in one direction that a ring of large messages keeps up; start: seconds of a collective
    however few its ranks; hop: seconds of each step of its ring; bulk: what the start of a large message adds."""

    name: str
    bandwidth: float
    start: float
    hop: float
    source: str
    bulk: float = 0.0

    def allreduce_seconds(self, size: float, ranks: int) -> float:
        """Sum of ``size`` bytes on every rank, everywhere: a ring sends 2 (N - 1) parts of size / N."""
        if ranks == 1:
            return 0.0
        return self.start + 2 * (ranks - 1) * (self.hop + size / ranks / self.bandwidth)

    def gather_seconds(self, size: float, ranks: int) -> float:
        """``size`` bytes of every rank to all others: N - 1 hops."""
        if ranks == 1:
            return 0.0
        return self.start + (ranks - 1) * (self.hop + size / self.bandwidth)


NO_LINK = Link("none", math.inf, 0.0, 0.0, "one card")


@dataclass(frozen=True)
class TensorSplit:
    """Attention heads, the gated width and the vocabulary over ``ranks`` cards; norms and the embedding table whole on
    each."""

    ranks: int = 1
    link: Link = NO_LINK

    def kv_heads_per_rank(self, kv_heads: int) -> int:
        """A head is not split: with more ranks than KV heads every rank still holds one, as a copy."""
        return max(1, math.ceil(kv_heads / self.ranks))

    def kv_copies(self, kv_heads: int) -> float:
        """How many times each KV head is stored."""
        return self.kv_heads_per_rank(kv_heads) * self.ranks / kv_heads

    def layer_seconds(self, rows: float, hidden: int) -> float:
        """The two sums of a layer, after the attention's output and after the MLP's: all ranks' parts gathered for few
        rows, an all-reduce for many."""
        few = self.link.gather_seconds(rows * hidden * STEP_BYTES, self.ranks)
        many = self.link.allreduce_seconds(rows * hidden * ACTIVATION_BYTES, self.ranks)
        return 2 * min(few, many + self.link.bulk)

    def head_seconds(self, rows: float) -> float:
        """The exchange of the best candidates of a head that is split by vocabulary."""
        return self.link.gather_seconds(rows * CANDIDATE_BYTES, self.ranks)

    def pass_seconds(self, layers: int, hidden: int, rows: float, head_rows: float) -> float:
        """All exchanges of one pass; ``head_rows`` of its rows reach the head (0: no head is counted apart)."""
        return layers * self.layer_seconds(rows, hidden) + (self.head_seconds(head_rows) if head_rows else 0.0)


ONE_CARD = TensorSplit()


def check_split(ranks: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> None:
    """ValueError with the config's field where ``ranks`` cannot split it."""
    fields = (("num_attention_heads", heads), ("intermediate_size", intermediate), ("vocab_size", vocabulary))
    for name, value in fields:
        if value % ranks:
            raise ValueError(f"--tp {ranks} does not divide {name} {value}")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"--tp {ranks} neither divides num_key_value_heads {kv_heads} nor is a multiple of it")


def load_link(card: str, name: str | None = None, ranks: int = 1) -> Link:
    """A link of a card of ``data/cards.json``, its first by default; ValueError with the known names, or where it joins
    fewer than ``ranks`` cards."""
    rows: dict[str, Any] = json.loads((DATA / "cards.json").read_text())
    if card not in rows:
        raise ValueError(f"no card {card!r} with links; known: {', '.join(rows)}")
    links: dict[str, Any] = rows[card]["links"]
    name = name or next(iter(links))
    if name not in links:
        raise ValueError(f"--link {name!r} is not one of the {card}'s: {', '.join(links)}")
    row = links[name]
    if ranks > row.get("most_ranks", ranks):
        raise ValueError(f"--link {name} joins {row['most_ranks']} cards of {card}, --tp is {ranks}")
    start, hop, bulk = (row.get(f"{part}_us", 0.0) * 1e-6 for part in ("start", "hop", "bulk"))
    return Link(name, row["gbs"] * 1e9, start, hop, row["source"], bulk)
