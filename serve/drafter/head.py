"""The tokens that a drafter guesses among, where its folder lists them: its head is then a part of the target's.

``extras/head_tokens.safetensors`` holds ``token_ids``, ascending; ``python -m drafter_train.head`` writes it. It lies
beside the plain DFlash files, which stay as they are for other engines, and changes guesses, never text. Drafting among
the most frequent tokens alone is the idea of FR-Spec (arXiv 2502.14856). This file runs no drafter.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve.drafter.checkpoint import DrafterError
from serve.model.target import TargetModel

HEAD_TOKENS = Path("extras") / "head_tokens.safetensors"
TENSOR = "token_ids"
_DTYPES = (torch.int32, torch.int64)
_ROWS = 64
"""Columns of the head that are taken out at a time: a row of logits each, and vocabularies are large."""


def read_head_tokens(folder: str | Path, vocab_size: int) -> Tensor | None:
    """Ids [N] int64 of the tokens that ``folder`` lists, None where it lists none. DrafterError names the file and what
    is wrong with it."""
    path = Path(folder) / HEAD_TOKENS
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            names = list(handle.keys())
            if names != [TENSOR]:
                raise DrafterError(f"{path} must hold the one tensor {TENSOR!r}, it holds {names[:4]}")
            ids: Tensor = handle.get_tensor(TENSOR)
    except (SafetensorError, OSError) as error:
        raise DrafterError(f"{path} is not a whole safetensors file: {error}") from None
    if ids.dtype not in _DTYPES or ids.dim() != 1 or not ids.numel():
        kind = str(ids.dtype).removeprefix("torch.")
        raise DrafterError(
            f"{path}: {TENSOR} must be a list of int32 or int64, it is {kind} of shape {list(ids.shape)}"
        )
    ids = ids.long()
    if not bool((ids[1:] > ids[:-1]).all()):
        raise DrafterError(f"{path}: {TENSOR} must be ascending, each id once")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
        raise DrafterError(f"{path}: {TENSOR} holds {wrong}, outside the target's vocabulary of {vocab_size}")
    return ids


@torch.inference_mode()
def head_rows(target: TargetModel, ids: Tensor) -> Tensor:
    """The rows ``ids`` of the target's head, [N, hidden] float32 on the CPU, whatever format it is kept in: what it
    makes of every unit vector."""
    width, device = target.config.hidden_size, target.device
    rows = torch.empty(len(ids), width)
    ids = ids.to(device)
    for start in range(0, width, _ROWS):
        stop = min(width, start + _ROWS)
        units = torch.zeros(stop - start, width, device=device)
        units.diagonal(start).fill_(1.0)
        rows[:, start:stop] = target.lm_head(units).index_select(1, ids).T.cpu()
    return rows
