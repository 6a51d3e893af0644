"""The block drafter at serving time: the DFlash layers over pages, next to the target's K/V at the same page ids.

``observe`` turns the target's taps of every row into context K/V (also in prefill, for shared prefixes and when nothing
is drafted), so the drafter is never stale. ``propose`` runs one pass over blocks of [anchor, mask, mask, ...] for all
sequences and takes the target head's best token for each mask, among the frequent ones where the drafter's folder
lists them. The block's own K/V is written behind the context and
overwritten by the next observation; nothing that is visible later comes from a guess.

The eager specification is serve/drafter/dflash.py; a test proves equal hidden states. This file knows no scheduling and
does not decide what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from serve.drafter.base import DraftRequest
from serve.drafter.checkpoint import DrafterError, TargetFacts, load_drafter
from serve.drafter.dflash import DFlashConfig
from serve.drafter.head import head_rows, read_head_tokens
from serve.kernels.attention import PagedAttention
from serve.kernels.attention_plan import AttentionShape
from serve.kernels.builder import choose_kernels
from serve.kernels.elementwise import interleave_halves, rms_norm, rotate_, silu_mul
from serve.kernels.kv_cache import KVCache, begun_pages, write_kv, write_rows
from serve.kernels.linear import LinearBuilder
from serve.model.batch import FlatBatch
from serve.model.rope import RopeConfig, RotaryTable
from serve.model.target import DecoderLayer, TargetModel
from serve.parallel.mirror import NO_MIRROR, Mirror

Drafter = TypeVar("Drafter", bound="BlockDrafter")

# A guess needs less precision than the text: the drafter follows the target's format down to int8.
DRAFTER_FORMATS = dict.fromkeys(("int4", "int4-g32", "int4-g64", "int4-g128"), "int8")


@dataclass(frozen=True)
class DraftLayer(DecoderLayer):
    """A decoder layer, and its key norm alone, which context rows take."""

    qk_norm: Tensor
    k_norm: Tensor  # [kv_heads, head_dim]


class BlockDrafter:
    """A proposer that reads the target's hidden states. ``taps`` are the target layers it needs after every pass."""

    name = "block"

    def __init__(
        self,
        config: DFlashConfig,
        weights: dict[str, Tensor],
        target: TargetModel,
        source: str,
        head_tokens: Tensor | None = None,
    ) -> None:
        """head_tokens [N] int64, ascending: the tokens to guess among; all, if not told."""
        self.config = config
        self.taps = config.target_layer_ids
        self.block_size = config.block_size
        self.description = f"{source}: {config.num_hidden_layers} layers, block of {config.block_size}"
        if head_tokens is not None:
            self.description += f", head of {len(head_tokens)} tokens"
        self._target = target
        device = target.device
        builder = self._builder(target)

        def vector(name: str) -> Tensor:
            return weights[name].float().to(device)

        self._fc = builder.build(weights["fc.weight"])
        self._hidden_norm = vector("hidden_norm.weight")
        self._norm = vector("norm.weight")
        self._layers = [_layer(config, weights, index, builder, device) for index in range(config.num_hidden_layers)]
        self._context_kv = builder.build(torch.cat([_kv_rows(config, weights, i) for i in range(len(self._layers))]))
        self._rotary = RotaryTable(RopeConfig(theta=config.rope_theta), config.head_dim, device)
        self._head_tokens = None if head_tokens is None else head_tokens.to(device)
        self._head = None if head_tokens is None else builder.build(head_rows(target, head_tokens))
        self.mirror: Mirror = NO_MIRROR
        self._cache: KVCache | None = None
        self._attention: PagedAttention | None = None

    def _builder(self, target: TargetModel) -> LinearBuilder:
        return choose_kernels(DRAFTER_FORMATS.get(target.weights, target.weights), target.device, target.native).builder

    @classmethod
    def load(cls: type[Drafter], folder: Path, target: TargetModel, frequent_tokens: bool = True) -> Drafter:
        """The drafter in ``folder`` for ``target``; ``frequent_tokens``: it guesses among those that the folder lists,
        if it does. DrafterError names the values that disagree."""
        facts = TargetFacts(
            target.config.hidden_size,
            target.config.num_layers,
            target.config.vocab_size,
            embedding=lambda ids: target.embed(ids.to(target.device)),
            lm_head=lambda ids: head_rows(target, ids),
        )
        config, weights = load_drafter(folder, facts)
        if config.mask_token_id >= target.config.vocab_size:
            raise DrafterError(
                f"mask_token_id {config.mask_token_id} is outside the target's vocabulary of {target.config.vocab_size}"
            )
        head_tokens = read_head_tokens(folder, target.config.vocab_size) if frequent_tokens else None
        return cls(config, weights, target, str(folder), head_tokens)

    def best(self, hidden: Tensor) -> Tensor:
        """The target head's best token of each row of ``hidden``, among those it guesses among: [T] int64."""
        if self._head is None:
            return self._target.greedy(hidden)
        return self._token_ids(self._head(hidden).argmax(-1))

    def _token_ids(self, best: Tensor) -> Tensor:
        """The tokens that rows of the drafter's own head stand for."""
        return best if self._head_tokens is None else self._head_tokens.index_select(0, best)

    def kv_bytes_per_page(self, page_size: int) -> int:
        config = self.config
        return KVCache.bytes_per_page(
            config.num_hidden_layers, page_size, config.num_key_value_heads, config.head_dim, self._target.cache_dtype
        )

    def allocate_cache(self, num_pages: int, page_size: int) -> None:
        """Zeroed pages under the target's page ids. Must precede the first ``observe``."""
        config = self.config
        self._attention = PagedAttention(
            AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim, page_size)
        )
        self._cache = KVCache(
            config.num_hidden_layers,
            num_pages,
            page_size,
            config.num_key_value_heads,
            config.head_dim,
            dtype=self._target.cache_dtype,
            device=self._target.device,
        )

    @torch.inference_mode()
    def observe(self, batch: FlatBatch, taps: Tensor) -> None:
        """Write the context K/V of every row of ``batch``. taps [T, len(self.taps) * hidden] float32.

        Rows whose tokens are rejected later are written too: they lie at or behind the next anchor, where the next
        block and the next observation overwrite them before anything can see them.
        """
        config, cache = self.config, self._pages()
        self._rotary.reserve(max(map(len, batch.page_tables)) * cache.page_size)
        context = rms_norm(self._fc(taps), self._hidden_norm, config.rms_norm_eps)
        turn = self._rotary.rows(batch.positions)
        rows = write_rows(batch.slots, config.num_key_value_heads, cache.page_size)
        begun = begun_pages(batch.slots, cache.page_size)
        kv = self._context_kv(context).view(
            batch.num_rows, len(self._layers), 2 * config.num_key_value_heads, config.head_dim
        )
        for index, layer in enumerate(self._layers):
            own = kv[:, index].contiguous()
            keys = own[:, : config.num_key_value_heads]
            keys.copy_(rms_norm(keys, None, config.rms_norm_eps) * layer.k_norm)
            rotate_(keys, turn)
            write_kv(cache.layers[index], rows, torch.unflatten(own, 1, (2, config.num_key_value_heads)), begun=begun)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Up to ``block_size - 1`` tokens for each request, in one pass; fewer where the sequence's pages end.

        RuntimeError when its own arithmetic went wrong.
        """
        if not requests:
            return []
        batch, lengths = self._blocks(requests)
        if not any(lengths):  # every one of them beyond the drafter's window
            return [[] for _ in lengths]
        with self.mirror.propose(batch):
            tokens, hidden = self.draft(batch)
        if not hidden.isfinite().all():
            raise RuntimeError("the drafter's hidden states are NaN or infinite")
        best = tokens.tolist()
        drafts = []
        for length in lengths:
            drafts.append(best[:length])
            best = best[length:]
        return drafts

    def draft(self, batch: FlatBatch) -> tuple[Tensor, Tensor]:
        """Tokens [R] int64 of the wanted rows of blocks laid out by ``_blocks``, and hidden states [T, hidden]."""
        hidden = self.forward(batch)
        return self.best(hidden.index_select(0, batch.logit_rows)), hidden

    @torch.inference_mode()
    def forward(self, batch: FlatBatch) -> Tensor:
        """Hidden states [T, hidden] float32 after the drafter's own final norm, for blocks laid out by ``_blocks``."""
        config, cache = self.config, self._pages()
        assert self._attention is not None
        self._rotary.reserve(max(map(len, batch.page_tables)) * cache.page_size)
        plan = self._attention.plan(batch)
        turn = self._rotary.rows(batch.positions)
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        x = self._target.embed(batch.token_ids)
        for layer, pages in zip(self._layers, cache.layers, strict=True):
            qkv = layer.qkv(rms_norm(x, layer.input_norm, config.rms_norm_eps))
            split = torch.unflatten(qkv, 1, (heads + 2 * kv_heads, dim))
            turned = split[:, : heads + kv_heads]
            turned.copy_(rms_norm(turned, None, config.rms_norm_eps) * layer.qk_norm)
            rotate_(turned, turn)
            write_kv(pages, plan.kv_rows, torch.unflatten(split[:, heads:], 1, (2, kv_heads)), begun=plan.begun)
            x = x + layer.output(self._attention(qkv[:, : heads * dim], pages, plan))
            x = x + layer.down(silu_mul(layer.gate_up(rms_norm(x, layer.mlp_norm, config.rms_norm_eps))))
        return rms_norm(x, self._norm, config.rms_norm_eps)

    def _blocks(self, requests: Sequence[DraftRequest]) -> tuple[FlatBatch, list[int]]:
        """Rows [anchor, mask, ...] of each request, and how many of its masks are wanted."""
        cache, device = self._pages(), self._target.device
        size = cache.page_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        visible: list[int] = []
        starts = [0]
        tables: list[tuple[int, ...]] = []
        wanted: list[int] = []
        lengths: list[int] = []
        for request in requests:
            start = len(request.token_ids) - 1
            end = min(start + self.block_size, len(request.page_table) * size, self.config.max_position_embeddings)
            rows = max(0, end - start)
            if rows < 2:  # beyond the drafter's window or pages: plain decoding
                lengths.append(0)
                continue
            first = starts[-1]
            token_ids += [request.token_ids[-1], *[self.config.mask_token_id] * (rows - 1)]
            positions += range(start, end)
            slots += [request.page_table[p // size] * size + p % size for p in range(start, end)]
            visible += [end] * rows
            starts.append(first + rows)
            tables.append(tuple(request.page_table[: -(-end // size)]))
            lengths.append(min(request.max_length, rows - 1))
            wanted += range(first + 1, first + 1 + lengths[-1])

        def put(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        batch = FlatBatch(
            put(token_ids), put(positions), put(slots), put(visible), tuple(starts), tuple(tables), put(wanted)
        )
        return batch, lengths

    def _pages(self) -> KVCache:
        if self._cache is None:
            raise RuntimeError("allocate_cache was not called")
        return self._cache


def _kv_rows(config: DFlashConfig, weights: dict[str, Tensor], index: int) -> Tensor:
    """k and v projection of one layer as the rows of one matrix, keys in rotary pairs."""
    prefix = f"layers.{index}.self_attn."
    keys = interleave_halves(weights[prefix + "k_proj.weight"].float(), config.head_dim)
    return torch.cat([keys, weights[prefix + "v_proj.weight"].float()])


def _layer(
    config: DFlashConfig, weights: dict[str, Tensor], index: int, builder: LinearBuilder, device: torch.device
) -> DraftLayer:
    prefix = f"layers.{index}."

    def take(name: str) -> Tensor:
        return weights[f"{prefix}{name}.weight"].float()

    def norm(name: str, heads: int) -> Tensor:
        return interleave_halves(take(f"self_attn.{name}"), config.head_dim).expand(heads, config.head_dim)

    q_norm, k_norm = norm("q_norm", config.num_attention_heads), norm("k_norm", config.num_key_value_heads)
    queries = interleave_halves(take("self_attn.q_proj"), config.head_dim)
    return DraftLayer(
        input_norm=take("input_layernorm").to(device),
        qkv=builder.build(torch.cat([queries, _kv_rows(config, weights, index)])),
        qk_norm=torch.cat([q_norm, k_norm]).to(device),
        k_norm=k_norm.contiguous().to(device),
        output=builder.build(take("self_attn.o_proj")),
        mlp_norm=take("post_attention_layernorm").to(device),
        gate_up=builder.build(torch.cat([take("mlp.gate_proj"), take("mlp.up_proj")])),
        down=builder.build(take("mlp.down_proj")),
    )
