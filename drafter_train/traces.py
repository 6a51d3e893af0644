"""Turns a server's own traces into training data: ``python -m drafter_train.traces --config RECIPE TRACE_DIR``.

A server started with ``--trace-dir`` writes what it was asked, what it answered and in which rounds, all as token ids.
This fills the recipe's token store with it: the answers are what the drafter will be asked for, and the places where
rounds began are kept for ``train.replay_weight``. Greedy answers are learned from; of sampled ones only with
``--sampled``. This file knows no model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafter_train.chat import ChatTokenizer
from drafter_train.progress import say
from drafter_train.recipe import add_recipe_arguments, recipe_from
from drafter_train.tokens import Ids, Response, TokenStore

# Below this a server's answer is greedy, whatever is written.
GREEDY_BELOW = 1e-4


@dataclass(frozen=True)
class Traced:
    """One finished request. ``accepted``: drafts kept by each round, None when rounds do not tell where they began (the
    request was put aside once, and its tokens then came out of a prompt pass)."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    greedy: bool
    ended: bool
    accepted: tuple[int, ...] | None


def read_traces(folder: Path) -> Iterator[Traced]:
    """The finished requests of every ``*.jsonl`` in ``folder``; a last line that a kill cut short is left out. Raises
    ValueError naming file and line."""
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ValueError(f"{folder} holds no *.jsonl trace")
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
            try:
                found = _traced(json.loads(line))
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} line {number} is not a trace: {error!r}") from None
            if found is not None:
                yield found


def _traced(record: dict[str, Any]) -> Traced | None:
    if record["finish_reason"] not in ("stop", "length"):
        return None
    accepted = tuple(int(accepted) for _source, _drafted, accepted in record["rounds"])
    return Traced(
        prompt=tuple(int(i) for i in record["prompt_ids"]),
        output=tuple(int(i) for i in record["output_ids"]),
        greedy=float(record["temperature"]) < GREEDY_BELOW,
        ended=record["finish_reason"] == "stop",
        accepted=None if record["preemptions"] else accepted,
    )


def round_places(prompt_tokens: int, accepted: Sequence[int], length: int) -> Ids:
    """Where rounds began in prompt and answer together: the first at the answer's first token, which comes from the
    prompt pass, each next one after what the last one committed."""
    places = prompt_tokens + np.cumsum([0, *(kept + 1 for kept in accepted)])[:-1]
    found: Ids = places[places < length - 1]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.traces", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("folder", type=Path, help="the server's --trace-dir")
    parser.add_argument("--sampled", action="store_true", help="learn from sampled answers too")
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    try:
        kept = [
            item
            for item in read_traces(args.folder)
            if len(item.prompt) <= recipe.data.max_prompt_tokens and len(item.output) > 1
            if item.greedy or args.sampled
        ]
        numbers: dict[tuple[int, ...], int] = {}
        for item in kept:
            numbers.setdefault(item.prompt, len(numbers))
        if not numbers:
            raise ValueError(f"{args.folder}: no finished greedy request with a prompt of this recipe's length")
        meta = {
            "fingerprint": ChatTokenizer(recipe.target, recipe.data.thinking).fingerprint.to_json(),
            "target": Path(recipe.target).name,
            "passes": [],
            "max_new_tokens": recipe.data.max_new_tokens,
            "ids": [str(i) for i in range(len(numbers))],
            "categories": ["trace"] * len(numbers),
        }
        store = TokenStore.create(recipe.data.tokens, list(numbers), meta)
        if any(store.folder.glob("responses-*.npz")):
            raise ValueError(f"{store.folder} holds responses already; use a new folder for these traces")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    answered: dict[int, int] = {}
    responses: list[Response] = []
    places: dict[tuple[int, int], Ids] = {}
    for item in kept:
        prompt = numbers[item.prompt]
        turn = answered[prompt] = answered.get(prompt, -1) + 1
        greedy_from = 0 if item.greedy else len(item.output)
        responses.append(Response(prompt, turn, np.array(item.output), greedy_from, item.ended))
        if item.accepted is not None:
            length = len(item.prompt) + len(item.output)
            places[prompt, turn] = round_places(len(item.prompt), item.accepted, length)
    store.write_replay(places)
    store.append(responses, "traces")
    tokens = sum(len(item.output) for item in kept)
    say(f"{len(responses)} answers to {len(numbers)} prompts, {tokens} tokens, rounds of {len(places)}: {store.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
