"""Which tokens the drafter guesses among: those that the target wrote most, and every special one.

``python -m drafter_train.head --config RECIPE --drafter FOLDER --size N`` counts the ids of all answers in the recipe's
token store, writes the list to ``FOLDER/extras/head_tokens.safetensors`` and says how much of the held-out answers it
covers. The server reads it beside the plain DFlash files (serve/drafter/head.py). The list belongs to the tokenizer, so
it stays good for any drafter of the same target. This file knows no model weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from drafter_train.chat import ChatTokenizer
from drafter_train.progress import say
from drafter_train.recipe import add_recipe_arguments, recipe_from
from drafter_train.tokens import TokenStore, write_atomically
from serve.drafter.head import HEAD_TOKENS, TENSOR
from serve.tokenizer import TokenizerError, load_tokenizer

DEFAULT_SIZE = 16_384


def token_counts(store: TokenStore) -> NDArray[np.int64]:
    """How often each token stands in the store's answers: [vocab_size]."""
    size = int(store.meta["fingerprint"]["vocab_size"])
    counts = np.zeros(size, dtype=np.int64)
    for response in store.responses():
        counts += np.bincount(response.ids, minlength=size)
    return counts


def frequent_tokens(counts: NDArray[np.int64], size: int, always: Collection[int] = ()) -> NDArray[np.int64]:
    """Ascending ids of ``size`` tokens: all of ``always``, then the most frequent, the lower id among equals. All
    tokens where there are no more. Raises ValueError where ``always`` is larger or outside the vocabulary."""
    if any(not 0 <= token < len(counts) for token in always):
        raise ValueError(f"special tokens must be ids below {len(counts)}, got {sorted(always)[-1]}")
    if len(set(always)) > size:
        raise ValueError(f"{size} tokens do not hold the {len(set(always))} special ones")
    ranked = counts.copy()
    ranked[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size])


def covered(counts: NDArray[np.int64], ids: NDArray[np.int64]) -> float:
    """Part of the counted tokens that are among ``ids``."""
    return float(counts[ids].sum() / max(1, counts.sum()))


def write_head_tokens(folder: Path, ids: NDArray[np.int64]) -> Path:
    """The list as the server reads it, in a drafter's folder."""
    path = folder / HEAD_TOKENS
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, save({TENSOR: torch.from_numpy(ids).int()}))
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.head", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--drafter", required=True, type=Path, help="drafter folder in DFlash layout")
    parser.add_argument("--size", type=int, default=DEFAULT_SIZE, help=f"tokens to keep (default: {DEFAULT_SIZE})")
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    if args.size < 1:
        parser.error(f"--size must be 1 or more, got {args.size}")
    if not (args.drafter / "config.json").is_file():
        parser.error(f"--drafter {args.drafter} is no drafter folder: it has no config.json")
    try:
        chat = ChatTokenizer(recipe.target, recipe.data.thinking)
        tokenizer = load_tokenizer(Path(recipe.target))
        counts = []
        for folder in (recipe.data.tokens, recipe.data.eval_tokens):
            store = TokenStore(folder)
            differences = chat.fingerprint.differences(store.meta["fingerprint"])
            if differences:
                raise ValueError(
                    f"{store.folder} was written with another chat setup than {recipe.target}: {differences[0]}"
                )
            counts.append(token_counts(store))
        ids = frequent_tokens(counts[0], args.size, tokenizer.special_ids | tokenizer.end_token_ids)
    except (OSError, ValueError, TokenizerError) as error:
        parser.error(str(error))
    path = write_head_tokens(args.drafter, ids)
    say(
        f"{len(ids)} of {len(counts[0])} tokens cover {covered(counts[0], ids):.2%} of {counts[0].sum()} tokens "
        f"written in training answers, {covered(counts[1], ids):.2%} of {counts[1].sum()} in held-out ones"
    )
    say(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
