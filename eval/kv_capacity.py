"""How many requests fit: KV pools, reservations, plans over several cards, collectives, and lengths as distributions.

Pure arithmetic (numpy for the sampling). Bytes and tokens unless a name says otherwise. Every result says what it
assumes; the command line is ``eval.capacity``. It knows no server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.interconnect import ONE_CARD, Link, TensorSplit
from eval.shapes import ModelShape


@dataclass(frozen=True)
class Pool:
    """Memory left for KV on each card of a replica. ``block`` is the page size in tokens."""

    bytes: float
    kv_bytes_per_token: int
    block: int = 16

    @property
    def tokens(self) -> int:
        return math.floor(self.bytes / self.kv_bytes_per_token)

    @property
    def blocks(self) -> int:
        return self.tokens // self.block

    def requests(self, tokens: float) -> float:
        """Requests of that many tokens each, not rounded."""
        return self.bytes / self.kv_bytes_per_token / tokens

    def requests_in_blocks(self, tokens: int) -> int:
        """Whole requests when each takes whole blocks."""
        return self.blocks // math.ceil(tokens / self.block)


def weights_per_card(model: ModelShape, cards: int) -> float:
    """Bytes on the fullest card: its part of all matrices, and the whole embedding table, which one card looks up."""
    whole = model.embedding_bytes if cards > 1 else 0.0
    return (model.weight_bytes - whole) / cards + whole


def kv_bytes_per_card(model: ModelShape, split: TensorSplit, layers: int) -> int:
    """Bytes of K and V of one token on one card that holds so many layers."""
    return 2 * layers * split.kv_heads_per_rank(model.kv_heads) * model.head_dim * model.kv_element_bytes


def kv_pool(
    model: ModelShape,
    memory: float,
    utilisation: float = 0.9,
    overhead: float = 3e9,
    block: int = 16,
    split: TensorSplit = ONE_CARD,
) -> Pool:
    """What utilisation, weights and overhead leave on a card; ValueError when the weights alone do not fit."""
    weights = weights_per_card(model, split.ranks)
    left = memory * utilisation - weights - overhead
    if left <= 0:
        raise ValueError(
            f"{model.name}: weights of {weights / 1e9:.2f} GB and {overhead / 1e9:.2f} GB overhead exceed "
            f"{memory * utilisation / 1e9:.2f} GB usable"
        )
    return Pool(left, kv_bytes_per_card(model, split, model.layers), block)


def kv_read_crossover(model: ModelShape) -> int:
    """Batch times context from which on a step reads more KV than weights, in tokens."""
    return round(model.weight_bytes / model.kv_bytes_per_token)


def fixed_link(name: str, latency: float) -> Link:
    """A link whose every collective takes ``latency`` seconds, whatever its size: how exercises state it."""
    return Link(name, math.inf, latency, 0.0, "assumed")


NODE = fixed_link("node", 10e-6)
NETWORK = fixed_link("network", 30e-6)


@dataclass(frozen=True)
class Hardware:
    """Cards of a plan: usable bytes on each, achievable bytes/s, the links inside and across nodes."""

    usable: float
    bandwidth: float
    cards_per_node: int = 8
    node: Link = NODE
    network: Link = NETWORK


@dataclass(frozen=True)
class Plan:
    """A model split over ``tensor`` x ``pipeline`` cards; times are seconds per token of one stream."""

    name: str
    tensor: int
    pipeline: int
    model: ModelShape
    hardware: Hardware

    @property
    def cards(self) -> int:
        return self.tensor * self.pipeline

    @property
    def split(self) -> TensorSplit:
        """The ranks that share each layer, and what joins them."""
        return TensorSplit(self.tensor, self.hardware.network if self.crosses_nodes else self.hardware.node)

    @property
    def weights_per_card(self) -> float:
        return weights_per_card(self.model, self.cards)

    @property
    def free_per_card(self) -> float:
        return self.hardware.usable - self.weights_per_card

    @property
    def pool_bytes(self) -> float:
        """Free memory of all cards; replicated heads make less of it useful than it seems."""
        return max(0.0, self.free_per_card) * self.cards

    @property
    def kv_heads_per_card(self) -> int:
        return self.split.kv_heads_per_rank(self.model.kv_heads)

    @property
    def kv_copies(self) -> float:
        return self.split.kv_copies(self.model.kv_heads)

    @property
    def kv_bytes_per_token_per_card(self) -> int:
        return kv_bytes_per_card(self.model, self.split, math.ceil(self.model.layers / self.pipeline))

    @property
    def fits(self) -> bool:
        return self.free_per_card > 0

    @property
    def tokens(self) -> int:
        return max(0, math.floor(self.free_per_card / self.kv_bytes_per_token_per_card))

    def concurrency(self, context: int) -> int:
        return self.tokens // context

    @property
    def stage_weight_seconds(self) -> float:
        return self.model.read_bytes / self.cards / self.hardware.bandwidth

    @property
    def weight_seconds(self) -> float:
        """Every token crosses all pipeline stages in turn: splitting by layers does not shorten its path."""
        return self.stage_weight_seconds * self.pipeline

    def kv_seconds(self, batch: int, context: int) -> float:
        stage = batch * context * self.kv_bytes_per_token_per_card / self.hardware.bandwidth
        return stage * self.pipeline

    @property
    def allreduces(self) -> int:
        return 2 * self.model.layers if self.tensor > 1 else 0

    @property
    def crosses_nodes(self) -> bool:
        return self.tensor > self.hardware.cards_per_node

    def collective_seconds(self, batch: int = 1) -> float:
        """All-reduces of one step of ``batch`` tokens and the exchange of a head that is counted apart."""
        head_rows = batch if self.model.head_parameters else 0
        return self.split.pass_seconds(self.model.layers, self.model.hidden, batch, head_rows)

    def tpot(self, batch: int, context: int) -> float:
        return self.weight_seconds + self.kv_seconds(batch, context) + self.collective_seconds(batch)

    def headroom_tokens(self, tpot: float) -> int:
        """Tokens of KV that could be read within a TPOT after the weights, memory only; negative: not even those."""
        left = tpot - self.weight_seconds
        return math.floor(left * self.hardware.bandwidth / self.pipeline / self.kv_bytes_per_token_per_card)


@dataclass(frozen=True)
class Lengths:
    """Samples of (prompt, output) token counts that stand for a distribution."""

    prompt: Sequence[int]
    output: Sequence[int]
    text: str

    def live_samples(self, rng: np.random.Generator, shape: tuple[int, int], block: int) -> np.ndarray:
        """Contexts of running requests at a random moment, in whole blocks.

        A request is seen in proportion to how long it runs (its output), at a uniform point of its life.
        """
        prompt, output = np.asarray(self.prompt, dtype=np.float64), np.asarray(self.output, dtype=np.float64)
        chosen = rng.choice(len(prompt), size=shape, p=output / output.sum())
        live = prompt[chosen] + rng.random(shape) * output[chosen]
        return np.asarray(np.ceil(live / block) * block)


def parse_length(spec: str, rng: np.random.Generator, count: int, maximum: int) -> list[int]:
    """``constant:N``, ``uniform:LOW:HIGH``, ``lognormal:MEDIAN:SIGMA`` or ``exponential:MEAN``, cut to 1..maximum."""
    kind, *numbers = spec.split(":")
    fields = {
        "constant": ("N",),
        "uniform": ("LOW", "HIGH"),
        "lognormal": ("MEDIAN", "SIGMA"),
        "exponential": ("MEAN",),
    }
    if len(fields.get(kind, ())) != len(numbers) or not numbers:
        raise ValueError(
            f"length {spec!r} must be constant:N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or exponential:MEAN"
        )
    values = [_length_figure(spec, *pair) for pair in zip(fields[kind], numbers, strict=True)]
    if kind == "uniform" and values[0] > values[1]:
        raise ValueError(f"length {spec!r}: LOW {values[0]:g} is above HIGH {values[1]:g}")
    if kind == "constant":
        drawn = np.full(count, values[0])
    elif kind == "uniform":
        drawn = rng.uniform(values[0], values[1], count)
    elif kind == "lognormal":
        drawn = rng.lognormal(math.log(values[0]), values[1], count)
    else:
        drawn = rng.exponential(values[0], count)
    return [int(value) for value in np.clip(np.rint(drawn), 1, maximum)]


def _length_figure(spec: str, field: str, text: str) -> float:
    """One figure of a length: tokens of at least 1, or a SIGMA of 0 to 10."""
    low, high = (0.0, 10.0) if field == "SIGMA" else (1.0, 1e9)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ValueError(f"length {spec!r}: {field} must be a number from {low:g} to {high:g}, got {text!r}")
    return value


def lengths(prompt: str, output: str, maximum: int, seed: int = 0, count: int = 20_000) -> Lengths:
    """Lengths from two specifications (see ``parse_length``). Prompt and output together have at most ``maximum``
    tokens, as on a server: a prompt leaves room for one token, and the output ends where the room does.

    ValueError for a maximum below 2."""
    if maximum < 2:
        raise ValueError(f"a request has a prompt and an output, so at least 2 tokens, got {maximum}")
    rng = np.random.default_rng(seed)
    prompts, wanted = parse_length(prompt, rng, count, maximum - 1), parse_length(output, rng, count, maximum)
    outputs = [min(want, maximum - used) for used, want in zip(prompts, wanted, strict=True)]
    full = sum(used + got == maximum for used, got in zip(prompts, outputs, strict=True)) / count
    return Lengths(
        prompts, outputs, f"prompt {prompt}, output {output}, together cut at {maximum} ({full:.1%} of them end there)"
    )


@dataclass(frozen=True)
class Overflow:
    """``probability[i]``: chance that ``i + 1`` running requests need more than the pool at a random moment."""

    probability: tuple[float, ...]
    mean_context: float
    median_context: float

    def concurrency(self, risk: float) -> int:
        """Most requests whose overflow probability is at most ``risk``."""
        return sum(1 for value in self.probability if value <= risk)


def overflow(pool_tokens: int, sizes: Lengths, block: int = 16, seed: int = 0, draws: int = 4000) -> Overflow:
    """P(sum of live contexts > pool) for every number of running requests, by sampling with a fixed seed."""
    rng = np.random.default_rng(seed)
    probe = sizes.live_samples(rng, (1, 20_000), block)[0]
    mean = float(probe.mean())
    most = max(1, math.ceil(pool_tokens / mean * 1.5) + 8)
    exceeded = np.zeros(most)
    done = 0
    # In slices, so that a big pool of short requests stays small in memory.
    rows = max(1, min(draws, 4_000_000 // most))
    while done < draws:
        live = sizes.live_samples(rng, (min(rows, draws - done), most), block)
        exceeded += (np.cumsum(live, axis=1) > pool_tokens).sum(axis=0)
        done += live.shape[0]
    return Overflow(tuple(float(value) for value in exceeded / done), mean, float(np.median(probe)))
