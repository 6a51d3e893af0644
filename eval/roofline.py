"""What memory and compute allow: step times, throughput curves, knees, prefill, and the worth of speculation.

Pure arithmetic on a shape and a card. One decode step of B sequences at context c reads W + B*c*k bytes (weights once,
k bytes of KV per token) and does 2*P*B operations. The knee is where compute takes over; with enough context there is
none, only flattening. N cards that share a model read and compute N times as fast and pay their exchanges. It knows no
server and makes no allowance for overheads unless asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eval.interconnect import ONE_CARD, TensorSplit
from eval.shapes import Card, ModelShape


@dataclass(frozen=True)
class Roofline:
    """A model on a card, or split over several. ``efficiency`` is the share of peak bandwidth reached, ``overhead``
    seconds added per step. Rates are those of all the cards together."""

    model: ModelShape
    card: Card
    efficiency: float = 1.0
    overhead: float = 0.0
    split: TensorSplit = ONE_CARD

    @property
    def bandwidth(self) -> float:
        """Peak bytes a second of all cards."""
        return self.card.bandwidth * self.split.ranks

    @property
    def flops(self) -> float:
        """Peak operations a second of all cards."""
        return self.card.flops * self.split.ranks

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V of one token on all cards: a head that is copied is read as often as it is held."""
        return self.model.kv_bytes_per_token * self.split.kv_copies(self.model.kv_heads)

    def exchange_seconds(self, rows: float, head_rows: float) -> float:
        """All-reduces and the head's exchange of a pass of ``rows`` rows; nothing on one card."""
        counted = head_rows if self.model.head_parameters else 0.0
        return self.split.pass_seconds(self.model.layers, self.model.hidden, rows, counted)

    @property
    def flops_per_token(self) -> float:
        """2 operations per parameter that a token passes through."""
        return 2.0 * self.model.active_parameters

    def step_seconds(self, batch: float, context: float) -> float:
        """One decode step: the slower of memory and compute, plus exchanges and overhead."""
        traffic = self.model.read_bytes + batch * context * self.kv_bytes_per_token
        memory = traffic / (self.bandwidth * self.efficiency)
        compute = batch * self.flops_per_token / self.flops
        return max(memory, compute) + self.exchange_seconds(batch, batch) + self.overhead

    def throughput(self, batch: float, context: float) -> float:
        """Tokens a second of all sequences together."""
        return batch / self.step_seconds(batch, context)

    def batch_one_ceiling(self) -> float:
        """Tokens a second of one stream with nothing but the weights read at peak bandwidth."""
        return self.bandwidth / self.model.read_bytes

    def half_saturation(self, context: float) -> float:
        """Batch at which half of the throughput asymptote is reached."""
        return self.model.read_bytes / (context * self.kv_bytes_per_token)

    def asymptote(self, context: float) -> float:
        """Tokens a second that memory allows for an endless batch."""
        return self.bandwidth / (context * self.kv_bytes_per_token)

    def compute_roof(self) -> float:
        """Tokens a second that compute allows."""
        return self.flops / self.flops_per_token

    def intensity_asymptote(self, context: float) -> float:
        """Operations per byte for an endless batch."""
        return self.flops_per_token / (context * self.kv_bytes_per_token)

    def naive_knee(self) -> float:
        """Batch at which compute takes over when KV reads are left out."""
        return self.card.ridge * self.model.read_bytes / self.flops_per_token

    def knee(self, context: float) -> float | None:
        """Batch at which compute takes over; None when the KV term keeps every batch bound by memory."""
        room = self.flops_per_token - self.card.ridge * context * self.kv_bytes_per_token
        return self.card.ridge * self.model.read_bytes / room if room > 0 else None

    def no_knee_context(self) -> float:
        """Context from which on no batch is bound by compute."""
        return self.flops_per_token / (self.kv_bytes_per_token * self.card.ridge)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prefill: matrices for every token, the vocabulary once, causal attention."""
        body = (
            2.0 * (self.model.active_parameters - self.model.head_parameters) * tokens
            + 2.0 * self.model.head_parameters
        )
        attention = 2.0 * self.model.layers * self.model.heads * self.model.head_dim * tokens**2
        return body + attention

    def prefill_seconds(self, tokens: int, compute_share: float = 1.0) -> float:
        """Least time of a prefill at a share of peak compute (and never below one read of the weights)."""
        memory = self.model.read_bytes / self.bandwidth
        return max(self.prefill_flops(tokens) / (self.flops * compute_share), memory) + self.exchange_seconds(tokens, 1)

    def serving_throughput(self, batch: float, prompt: int, output: int, compute_share: float = 1.0) -> float:
        """Output tokens a second of a closed loop, the prefill of each request's prompt included.

        Each output token carries prompt/output prompt tokens whose prefill takes time from decoding.
        """
        step = self.step_seconds(batch, live_context(prompt, output))
        prefill = batch * self.prefill_seconds(prompt, compute_share) / output
        return batch / (step + prefill)


def live_context(prompt: float, output: float) -> float:
    """Mean context of a running request in a closed loop: the prompt and half of the answer."""
    return prompt + output / 2


def ttft_knee(prefill_seconds: float, median_ttft: float) -> int:
    """Least concurrency at which prefills that collide push p99 TTFT over twice the median: (C-1)*t > 2*median."""
    return math.floor(2 * median_ttft / prefill_seconds) + 2


def acceptance_length(acceptance: float, block_length: int) -> float:
    """Tokens kept per round, the target's own included, when each draft is accepted independently."""
    if acceptance >= 1:
        return block_length + 1.0
    return float((1 - acceptance ** (block_length + 1)) / (1 - acceptance))


def speculative_speedup(tau: float, draft_cost: float, verify_cost: float) -> float:
    """Speed against plain decoding; costs of drafting and verifying in units of one plain step."""
    return tau / (draft_cost + verify_cost)


def expected_speedup(
    acceptance: float, block_length: int, draft_cost: float, verify_cost_per_row: float, batch_rows_free: float = 1.0
) -> float:
    """Expected speed-up for a block length: verifying costs one step plus ``verify_cost_per_row`` for each extra row.

    ``batch_rows_free`` is how many rows cost nothing extra (memory-bound width); block length 0 is plain decoding.
    """
    if block_length == 0:
        return 1.0
    extra = max(0.0, block_length + 1 - batch_rows_free) * verify_cost_per_row
    return speculative_speedup(acceptance_length(acceptance, block_length), draft_cost, 1.0 + extra)


def verify_cost(roofline: Roofline, batch: int, block_length: int, context: float) -> float:
    """Time of verifying ``block_length`` drafts a sequence, in plain steps: a sequence reads its KV once."""
    plain = roofline.step_seconds(batch, context)
    traffic = roofline.model.read_bytes + batch * context * roofline.kv_bytes_per_token
    memory = traffic / (roofline.bandwidth * roofline.efficiency)
    rows = batch * (block_length + 1)
    compute = rows * roofline.flops_per_token / roofline.flops
    return (max(memory, compute) + roofline.exchange_seconds(rows, rows) + roofline.overhead) / plain


def decompose_step(
    measured_step: float, roofline: Roofline, batch: int, prompt: int, output: int, compute_share: float = 1.0
) -> dict[str, float]:
    """Where a measured step (seconds per token of one stream) went: weights, KV, prefill of others, the rest."""
    bandwidth = roofline.bandwidth * roofline.efficiency
    weights = roofline.model.read_bytes / bandwidth
    kv = batch * live_context(prompt, output) * roofline.kv_bytes_per_token / bandwidth
    prefill = batch * roofline.prefill_seconds(prompt, compute_share) / output
    rest = measured_step - weights - kv - prefill
    return {"measured": measured_step, "weights": weights, "kv": kv, "prefill": prefill, "rest": rest}
