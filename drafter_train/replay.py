"""Finds where rounds of speculative decoding begin in the training responses: ``python -m drafter_train.replay``.

A drafter is asked only where its earlier drafts ended, which is mostly after tokens that it did not see coming: harder
places than random ones. This walks the chains that a drafter would walk through every response of the token store and
keeps their starting places beside the responses; ``train.replay_weight`` then makes blocks start there more often.
Run it again with a better drafter to renew them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from drafter_train.chat import ChatTokenizer
from drafter_train.corpus import Corpus, load_corpus
from drafter_train.generate import parse_shard
from drafter_train.progress import say
from drafter_train.recipe import add_recipe_arguments, recipe_from
from drafter_train.simulate import draft_all
from drafter_train.target import Target
from drafter_train.tokens import Ids, TokenStore
from drafter_train.warmstart import target_facts
from serve.drafter.checkpoint import load_drafter
from serve.drafter.dflash import DFlashModel


def visited_places(leading: Ids, first: int, length: int) -> list[int]:
    """The anchors of one greedy chain: from ``first``, each round commits its right drafts and one more token.
    ``leading[p - first]`` is how many drafts from place p are right; a response ends at ``length``."""
    places: list[int] = []
    place = first
    while place < length - 1:
        places.append(place)
        place += int(leading[place - first]) + 1
    return places


def walk(
    model: DFlashModel, target: Target, corpus: Corpus, samples: Sequence[int], fused: bool
) -> dict[tuple[int, int], Ids]:
    """For each sample's key, where rounds began (from its first place that may be an anchor on)."""
    found: dict[tuple[int, int], Ids] = {}
    said = time.monotonic()
    for drafted in draft_all(model, target, corpus, samples, recall=False, fused=fused):
        for row, sample in enumerate(drafted.samples):
            first, skipped = int(corpus.first[sample]), int(corpus.first[sample] - corpus.prompt_lengths[sample])
            places = visited_places(drafted.leading[row, skipped:], first, int(corpus.lengths[sample]))
            found[corpus.keys[sample]] = np.array(places, dtype=np.int64)
        if time.monotonic() - said > 5:
            said = time.monotonic()
            say(f"{len(found)} of {len(samples)} responses")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.replay", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--drafter", required=True, help="drafter folder in DFlash layout")
    parser.add_argument("--shard", default="0/1", help="INDEX/COUNT: every COUNT-th response from INDEX (default: 0/1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    try:
        index, count = parse_shard(args.shard)
    except ValueError as error:
        parser.error(str(error))
    cuda = args.device.startswith("cuda")
    try:
        target = Target.load(recipe.target, args.device, torch.bfloat16 if cuda else torch.float32)
        config, weights = load_drafter(args.drafter, target_facts(target))
        store = TokenStore(recipe.data.tokens)
        chat = ChatTokenizer(recipe.target, recipe.data.thinking)
        differences = chat.fingerprint.differences(store.meta["fingerprint"])
        if differences:
            raise ValueError(
                f"{store.folder} was written with another chat setup than {recipe.target}: {differences[0]}"
            )
        corpus = load_corpus(store, recipe.data.max_length, recipe.data.anchors_in_sampled)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model = DFlashModel(config)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    model.to(args.device)
    fused = False
    if cuda and recipe.train.fused:
        from drafter_train.fused import attention, forward

        if attention.fits(config.block_size, config.head_dim):
            fused, target.layer = True, forward.fused_causal_layer
    samples = range(index, len(corpus), count)
    found = walk(model, target, corpus, samples, fused)
    path = store.write_replay(found, index, count)
    rounds = sum(len(places) for places in found.values())
    tokens = int((corpus.lengths - corpus.first - 1)[index::count].sum())
    say(f"wrote {path}: {rounds} rounds in {tokens} tokens, {tokens / max(rounds, 1):.3f} tokens a round")
    return 0


if __name__ == "__main__":
    sys.exit(main())
