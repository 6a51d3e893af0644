"""Many draft blocks of many sequences in one drafter forward: rows, positions, labels and who sees whom.

A block's rows see the context strictly before its anchor and all rows of their own block, nothing else: exactly what
the drafter sees when it serves. This file knows no loss and no optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_train.corpus import Batch
from serve.drafter.dflash import Attend, DFlashModel, masked_attention


@dataclass(frozen=True)
class Blocks:
    """ids [S, N, B] (anchor token, then mask tokens), positions [S, N, B], labels [S, N, B-1] (the tokens at positions
    1 .. B-1), valid [S, N, B-1] where there is such a token."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    valid: Tensor


def cut_blocks(batch: Batch, block_size: int, mask_token_id: int) -> Blocks:
    """The blocks that start at the batch's anchors."""
    steps = torch.arange(block_size, device=batch.ids.device)
    positions = batch.anchors[:, :, None] + steps
    inside = positions < batch.lengths[:, None, None]
    flat = positions.clamp(max=batch.ids.shape[1] - 1).flatten(1)
    tokens = batch.ids.gather(1, flat).view_as(positions)
    ids = torch.where(steps == 0, tokens, mask_token_id)
    valid = inside[..., 1:] & batch.valid[..., None]
    return Blocks(ids, positions, tokens[..., 1:], valid)


def dense_mask(anchors: Tensor, block_size: int, width: int) -> Tensor:
    """bool [S, 1, N*B, width + N*B] for anchors [S, N]."""
    rows = anchors.repeat_interleave(block_size, dim=1)
    block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block_size)
    context = torch.arange(width, device=anchors.device) < rows[..., None]
    own = (block[:, None] == block).expand(anchors.shape[0], -1, -1)
    return torch.cat((context, own), dim=-1)[:, None]


def flex_attend(anchors: Tensor, block_size: int, width: int, compiled: bool = True) -> Attend:
    """The same mask for flex attention, which skips the tiles that are empty (many, since anchors ascend)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_seqs, count = anchors.shape
    rows = count * block_size

    def visible(s: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        context = (k < width) & (k < anchors[s, q // block_size])
        own = (k >= width) & ((k - width) // block_size == q // block_size)
        return context | own

    mask = create_block_mask(visible, num_seqs, None, rows, width + rows, device=anchors.device)
    run: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = run(q, k, v, block_mask=mask, enable_gqa=True)
        return out

    return attend


def draft_hidden(
    model: DFlashModel, embeds: Tensor, taps: Tensor, positions: Tensor, mask: Tensor | None, attend: Attend | None
) -> Tensor:
    """Fuse the taps and run all blocks: embeds [S, N, B, H], taps [S, W, T*H], positions [S, N, B] -> [S, N, B, H].
    One of ``mask`` (see ``dense_mask``) and ``attend`` says who sees whom."""
    context = model.fuse(taps)
    num_seqs, width = taps.shape[:2]
    context_positions = torch.arange(width, device=taps.device).expand(num_seqs, width)
    out = model(
        embeds.flatten(1, 2), context, positions.flatten(1), context_positions, attend or masked_attention(mask)
    )
    hidden: Tensor = out.view_as(embeds)
    return hidden


def embed_blocks(blocks: Blocks, embedding: Tensor) -> Tensor:
    """Target embeddings of the blocks' ids [S, N, B, H]."""
    return F.embedding(blocks.ids, embedding)
