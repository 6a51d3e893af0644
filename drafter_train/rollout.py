"""Writes many responses of the target at once: slots over a static cache, refilled as sequences end.

Prompts are grouped by length so that short ones do not pay for long ones. A burst of decode steps (one CUDA graph
replay each) runs without asking the device anything; then finished slots are read out and new prompts move in. A job
may sample its first tokens and go on greedily: text off the beaten path whose continuation is still what greedy
decoding writes. This file knows no files and no chat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafter_train.target import StaticCache, Target, decode, prefill
from drafter_train.tokens import Ids, Response

MAX_TOP_K = 64


@dataclass(frozen=True)
class Job:
    """One response to write. Tokens 0 .. sampled_tokens-1 are sampled, the rest are greedy; 0 is all greedy."""

    prompt: int
    pass_index: int
    ids: Ids
    max_new_tokens: int
    sampled_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 20

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise ValueError(f"top_k must be between 1 and {MAX_TOP_K}, got {self.top_k}")


def group_by_length(jobs: Sequence[Job], smallest: int = 64) -> Iterator[tuple[int, list[Job]]]:
    """Jobs in groups whose prompts have at most ``bound`` tokens (64, 128, ...), shortest group first, order kept."""
    groups: dict[int, list[Job]] = {}
    for job in jobs:
        bound = smallest
        while bound < len(job.ids):
            bound *= 2
        groups.setdefault(bound, []).append(job)
    yield from sorted(groups.items())


class _Slots:
    """Device state of one group. Everything a decode step reads or writes lives in fixed tensors."""

    def __init__(self, target: Target, count: int, bound: int, max_new: int, sampled: bool) -> None:
        device = target.device
        self.target, self.sampled, self.max_new = target, sampled, max_new
        self.cache = StaticCache(target, count, -(-(bound + max_new) // 64) * 64)
        self.ends = torch.tensor(target.config.eos_token_ids or (-1,), device=device)
        self.rows = torch.arange(count, device=device)
        self.tokens = torch.zeros(count, dtype=torch.long, device=device)
        self.positions = torch.zeros(count, dtype=torch.long, device=device)
        self.written = torch.zeros(count, dtype=torch.long, device=device)
        self.limit = torch.zeros(count, dtype=torch.long, device=device)
        self.active = torch.zeros(count, dtype=torch.bool, device=device)
        self.sampled_until = torch.zeros(count, dtype=torch.long, device=device)
        self.temperature = torch.ones(count, device=device)
        self.top_p = torch.ones(count, device=device)
        self.top_k = torch.ones(count, dtype=torch.long, device=device)
        # One column more than can be written: where idle slots put their garbage.
        self.out = torch.zeros(count, max_new + 1, dtype=torch.int32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """One token for every active slot; no host value is read."""
        logits = decode(self.target, self.cache, self.tokens, self.positions)
        if self.sampled:
            chosen = self._sample(logits)
        else:
            chosen = logits.argmax(-1)
        self.out.index_put_((self.rows, self.written), chosen.int())
        self.tokens.copy_(torch.where(self.active, chosen, self.tokens))
        self.positions.add_(self.active)
        self.written.add_(self.active)
        ended = (chosen[:, None] == self.ends).any(-1) | (self.written >= self.limit)
        self.active.logical_and_(~ended)

    def _sample(self, logits: Tensor) -> Tensor:
        """Top-k, top-p, temperature by the Gumbel trick; argmax where the slot is past its sampled tokens."""
        values, ids = logits.float().topk(MAX_TOP_K, dim=-1)
        probs = (values / self.temperature[:, None]).softmax(-1)
        before = probs.cumsum(-1) - probs
        ranks = torch.arange(MAX_TOP_K, device=logits.device)
        allowed = (before < self.top_p[:, None]) & (ranks < self.top_k[:, None])
        noise = -torch.log(-torch.log(torch.rand_like(probs).clamp_(1e-9, 1 - 1e-7)))
        scores = (probs.log() + noise).masked_fill(~allowed, -torch.inf)
        pick = torch.where(self.written < self.sampled_until, scores.argmax(-1), 0)
        return ids.gather(-1, pick[:, None])[:, 0]

    def capture(self) -> None:
        """Record ``step`` as a CUDA graph. Slots are all idle, so the warm-up steps change nothing that matters."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.graph is not None:
                self.graph.replay()
            else:
                self.step()

    def fill(self, slots: Sequence[int], jobs: Sequence[Job]) -> None:
        """Prefill the prompts of ``jobs`` into idle ``slots`` and make them active."""
        device = self.target.device
        width = -(-max(len(job.ids) for job in jobs) // 32) * 32
        ids = np.zeros((len(jobs), width), dtype=np.int64)
        for row, job in zip(ids, jobs, strict=True):
            row[: len(job.ids)] = job.ids
        where = torch.tensor(slots, device=device)
        prefill(self.target, self.cache, where, torch.from_numpy(ids).to(device))
        # The last prompt token goes through the decode step again: it yields the first token like every other one.
        columns = {
            self.tokens: [int(job.ids[-1]) for job in jobs],
            self.positions: [len(job.ids) - 1 for job in jobs],
            self.limit: [min(job.max_new_tokens, self.max_new) for job in jobs],
            self.sampled_until: [job.sampled_tokens for job in jobs],
            self.temperature: [max(job.temperature, 1e-3) for job in jobs],
            self.top_p: [job.top_p for job in jobs],
            self.top_k: [job.top_k for job in jobs],
        }
        for tensor, values in columns.items():
            tensor[where] = torch.tensor(values, dtype=tensor.dtype, device=device)
        self.written[where] = 0
        self.active[where] = True


def roll_out(
    target: Target,
    jobs: Sequence[Job],
    emit: Callable[[Response], None],
    *,
    slots: int = 512,
    burst: int = 16,
    deadline: float = float("inf"),
) -> bool:
    """Write every job's response and hand each to ``emit`` as it ends (any order). False when ``deadline`` (in
    ``time.monotonic`` seconds) passed first; what had ended by then was emitted."""
    for bound, group in group_by_length(jobs):
        count = min(slots, len(group))
        sampled = any(job.sampled_tokens for job in group)
        state = _Slots(target, count, bound, max(job.max_new_tokens for job in group), sampled)
        if target.device.type == "cuda":
            state.capture()
        pending = iter(group)
        owners: list[Job | None] = [None] * count
        while True:
            free = [i for i, owner in enumerate(owners) if owner is None]
            arrivals = [job for _, job in zip(free, pending, strict=False)]
            for start in range(0, len(arrivals), 128):
                state.fill(free[start : start + 128][: len(arrivals) - start], arrivals[start : start + 128])
            for slot, job in zip(free, arrivals, strict=False):
                owners[slot] = job
            if not any(owners):
                break
            state.run(burst)
            active = state.active.cpu().numpy()
            ended = [i for i, owner in enumerate(owners) if owner is not None and not active[i]]
            if ended:
                where = torch.tensor(ended, device=target.device)
                rows, lengths = state.out[where].cpu().numpy(), state.written[where].cpu().numpy()
                for slot, row, length in zip(ended, rows, lengths, strict=True):
                    owner = owners[slot]
                    assert owner is not None
                    emit(_response(owner, row[:length].copy(), target.config.eos_token_ids))
                    owners[slot] = None
            if time.monotonic() > deadline:
                return False
        del state
    return True


def _response(job: Job, ids: Ids, ends: tuple[int, ...]) -> Response:
    return Response(
        prompt=job.prompt,
        pass_index=job.pass_index,
        ids=ids,
        greedy_from=min(job.sampled_tokens, len(ids)),
        ended=bool(len(ids)) and int(ids[-1]) in ends,
    )
