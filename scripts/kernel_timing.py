"""Times the Triton kernels of one model shape on random weights: each kernel, whole steps, a prompt; and checks their
bits.

Every timing is a CUDA graph over all layers' own weights and pages, so nothing is served from the L2 that a real step
would read from memory. Off CUDA (in a test) the work is simply run and timed by the clock. Knows no tests and no
report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.kv_cache import KVCache
from serve.kernels.triton.attention import SPLIT_ROWS, build_plan, paged_attention
from serve.kernels.triton.gemm import SkinnyLinear
from serve.kernels.triton.heads import write_heads
from serve.kernels.triton.linear import TritonLinear, TritonLinearBuilder
from serve.kernels.triton.rows import add_rms_norm
from serve.model.batch import FlatBatch
from serve.model.config import ModelConfig
from serve.model.target import DecoderLayer, TargetSettings, TargetWeights
from serve.model.triton_layers import TritonTargetModel

PAGE = 32
MATRICES = ("qkv", "output", "gate_up", "down")


def replay_ms(work: Callable[[], object], repeats: int = 5) -> float:
    """Milliseconds of ``work`` as one CUDA graph: the median of a few replays after two."""
    work()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e3
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(repeats + 2):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[2:])[repeats // 2]


def read_bandwidth(device: torch.device, elements: int = 1 << 30) -> float:
    """Bytes a second that one reduction over float32 ``elements`` reads."""
    x = torch.ones(elements, device=device)
    return elements * 4 / (replay_ms(lambda: torch.sum(x)) / 1e3)


def random_model(config: ModelConfig, weights: str, device: torch.device) -> TritonTargetModel:
    """Random weights of the shapes of ``config``, packed one matrix at a time; a four-bit model has an int8 head."""
    builder = TritonLinearBuilder(weights, device)
    hidden, dim = config.hidden_size, config.head_dim
    width, kv = config.num_heads * dim, config.num_kv_heads * dim
    ones = torch.ones(hidden, device=device)

    def matrix(rows: int, depth: int, kind: str | None = None) -> TritonLinear:
        return builder.build(torch.randn(rows, depth, device=device, dtype=torch.bfloat16) * depth**-0.5, weights=kind)

    def layer() -> DecoderLayer:
        return DecoderLayer(
            input_norm=ones,
            qkv=matrix(width + 2 * kv, hidden),
            qk_norm=torch.ones(config.num_heads + config.num_kv_heads, dim, device=device) if config.qk_norm else None,
            output=matrix(hidden, width),
            mlp_norm=ones,
            gate_up=matrix(2 * config.intermediate_size, hidden),
            down=matrix(hidden, config.intermediate_size),
        )

    layers = tuple(layer() for _ in range(config.num_layers))
    table = torch.randn(config.vocab_size, hidden, device=device, dtype=torch.bfloat16)
    head = matrix(config.vocab_size, hidden, "int8" if weights == "int4" else None)
    return TritonTargetModel(
        config,
        TargetWeights(table, layers, ones, head),
        TargetSettings(weights, device, builder.activation_dtype, builder.describe()),
    )


@dataclass(frozen=True)
class Bench:
    """One model on one card. bandwidth in bytes a second; context in positions before the rows of a step."""

    model: TritonTargetModel
    bandwidth: float
    context: int = 1024

    def kernels(self, rows_list: tuple[int, ...]) -> list[dict[str, Any]]:
        """Microseconds a call of each kernel, the share of the read bandwidth, and cuBLAS beside dense matrices."""
        layers = self.model.stack.layers
        found: list[dict[str, Any]] = []
        for rows in rows_list:
            for name in MATRICES:
                found.append(self._matrix(name, [getattr(layer, name) for layer in layers], rows))
            found.append(self._matrix("head argmax", [self.model._head], rows))
            found += self._small(rows)
        return found

    def _matrix(self, name: str, matrices: list[SkinnyLinear], rows: int) -> dict[str, Any]:
        first, count = matrices[0], len(matrices)
        x = torch.randn(rows, first.weight.depth, device=self.model.device, dtype=first.weight.compute_dtype)
        calls: list[Callable[[], object]]
        if name == "head argmax":
            calls = [partial(one.argmax, x) for one in matrices]
        elif first.gated:
            calls = [partial(one.gated_silu, x) for one in matrices]
        else:
            calls = [partial(one.partial, x) for one in matrices]
            name = f"{name} /{first.splits}"
        entry = self._entry(name, rows, replay_ms(lambda: [call() for call in calls]), count, first.weight.nbytes)
        if first.weight.weight_format == "dense":
            library = replay_ms(lambda: [F.linear(x, one.weight.data) for one in matrices])
            entry["cublas_us"] = round(library * 1e3 / count, 2)
        return entry

    def _small(self, rows: int) -> list[dict[str, Any]]:
        """Norm with its parts, qkv write and attention, for sequences of at most 16 rows."""
        model = self.model
        config, dtype, layers = model.config, model.cache_dtype, model.stack.layers
        each = min(rows, SPLIT_ROWS)
        batch, cache = self._step(rows // each, each, self.context)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=model.device)

        every = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        delta, residual = randn(layers[0].output.splits, rows, config.hidden_size), randn(rows, config.hidden_size)
        qkv = randn(layers[0].qkv.splits, rows, every)
        eps = config.rms_norm_eps

        def norm() -> None:
            for layer in layers:
                add_rms_norm(residual, delta, layer.input_norm, eps, dtype)

        def write() -> None:
            for layer, pages in zip(layers, cache.layers, strict=True):
                turns, heads = model.turns, config.num_heads
                write_heads(qkv, layer.qk_norm, turns, batch.positions, batch.slots, pages, heads, eps, dtype)

        attend = self.attention_work(rows // each, each)
        seen = self._kv_bytes(rows // each)
        return [
            self._entry("add + norm", rows, replay_ms(norm), len(layers)),
            self._entry("qkv norm + rope + write", rows, replay_ms(write), len(layers)),
            self._entry(f"attention {rows // each}x{each}", rows, replay_ms(attend), len(layers), seen),
        ]

    def attention_work(self, sequences: int, rows: int, context: int | None = None) -> Callable[[], None]:
        """Attention of all layers for ``rows`` rows of each sequence, over pages of their own."""
        model, config = self.model, self.model.config
        batch, cache = self._step(sequences, rows, self.context if context is None else context)
        plan = build_plan(batch, PAGE)
        shape = (sequences * rows, config.num_heads, config.head_dim)
        q = torch.randn(shape, device=model.device).to(model.cache_dtype)
        for pages in cache.layers:
            pages.normal_()

        def attend() -> None:
            for pages in cache.layers:
                paged_attention(q, pages, plan)

        return attend

    def steps(self, shapes: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
        """Whole steps of (sequences, rows each): embedding, all layers, final norm, head and argmax."""
        model = self.model
        weight_bytes = sum(getattr(layer, name).weight.nbytes for layer in model.stack.layers for name in MATRICES)
        weight_bytes += model._head.weight.nbytes
        found = []
        for sequences, rows in shapes:
            batch, cache = self._step(sequences, rows, self.context)
            plan = build_plan(batch, PAGE)
            took = replay_ms(partial(self._greedy, batch, plan, cache))
            read = weight_bytes + self._kv_bytes(sequences) * len(model.stack.layers)
            share = round(read / (took / 1e3) / self.bandwidth, 3)
            found.append({"step": f"{sequences}x{rows} at {self.context}", "ms": round(took, 3), "share": share})
        return found

    def prompt(self, length: int) -> list[dict[str, Any]]:
        """A prompt in one chunk with the head on its last row, and its attention beside SDPA."""
        model, config = self.model, self.model.config
        batch, cache = self._step(1, length, 0)
        plan = build_plan(batch, PAGE)
        whole = replay_ms(lambda: model.greedy(model.layers(batch, plan, cache)[0][-1:]), repeats=3)
        heads = torch.randn(1, config.num_heads, length, config.head_dim, device=model.device, dtype=model.cache_dtype)
        attend = replay_ms(self.attention_work(1, length, 0), repeats=3)
        library = replay_ms(
            lambda: [F.scaled_dot_product_attention(heads, heads, heads, is_causal=True) for _ in cache.layers],
            repeats=3,
        )
        return [
            {"step": f"prompt of {length}", "ms": round(whole, 2)},
            {"step": f"prompt of {length}, attention", "ms": round(attend, 2), "sdpa_ms": round(library, 2)},
        ]

    def invariance(self, mates_list: tuple[int, ...] = (2, 8, 40)) -> dict[str, bool]:
        """Whether rows of one sequence have the same bits in shorter steps and beside other sequences."""
        model = self.model
        whole, cache = self._step(1, 16, self.context, pages=(max(mates_list) + 1) * -(-(self.context + 16) // PAGE))
        for pages in cache.layers:
            pages.normal_()
        want, _ = model.layers(whole, build_plan(whole, PAGE), cache)
        found = {}
        for count in (1, 2, 5, 15):
            rows = slice(0, count)
            part = FlatBatch(
                token_ids=whole.token_ids[rows],
                positions=whole.positions[rows],
                slots=whole.slots[rows],
                visible=whole.visible[rows],
                query_starts=(0, count),
                page_tables=whole.page_tables,
                logit_rows=whole.logit_rows[rows],
            )
            got, _ = model.layers(part, build_plan(part, PAGE), cache)
            found[f"{count} of 16 rows"] = torch.equal(got, want[:count])
        for mates in mates_list:
            many = self._batch(mates, 1, self.context)
            many.token_ids[0] = whole.token_ids[0]
            got, _ = model.layers(many, build_plan(many, PAGE), cache)
            found[f"1 of {mates} sequences"] = torch.equal(got[:1], want[:1])
        return found

    def _greedy(self, batch: FlatBatch, plan: Any, cache: KVCache) -> Tensor:
        return self.model.greedy(self.model.layers(batch, plan, cache)[0])

    def _batch(self, sequences: int, rows: int, context: int) -> FlatBatch:
        """``rows`` causal rows of each sequence after ``context`` positions, on pages of their own."""
        device = self.model.device
        pages = -(-(context + rows) // PAGE)
        position = torch.arange(context, context + rows, device=device).repeat(sequences)
        sequence = torch.arange(sequences, device=device).repeat_interleave(rows)
        return FlatBatch(
            token_ids=torch.randint(0, self.model.config.vocab_size, (sequences * rows,), device=device),
            positions=position,
            slots=sequence * pages * PAGE + position,
            visible=position + 1,
            query_starts=tuple(range(0, sequences * rows + 1, rows)),
            page_tables=tuple(tuple(range(s * pages, (s + 1) * pages)) for s in range(sequences)),
            logit_rows=torch.arange(sequences * rows, device=device),
        )

    def _step(self, sequences: int, rows: int, context: int, pages: int = 0) -> tuple[FlatBatch, KVCache]:
        batch = self._batch(sequences, rows, context)
        self.model.reserve(context + rows)
        return batch, self.model.allocate_cache(max(pages, 1 + batch.page_tables[-1][-1]), PAGE)

    def _kv_bytes(self, sequences: int) -> int:
        """Bytes of K and V one layer reads."""
        config = self.model.config
        return sequences * self.context * config.num_kv_heads * config.head_dim * 2 * self.model.cache_dtype.itemsize

    def _entry(self, name: str, rows: int, ms: float, calls: int, nbytes: int = 0) -> dict[str, Any]:
        entry: dict[str, Any] = {"kernel": name, "rows": rows, "us": round(ms * 1e3 / calls, 2)}
        if nbytes:
            entry["share"] = round(nbytes / (ms / calls / 1e3) / self.bandwidth, 3)
        return entry
