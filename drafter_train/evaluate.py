"""Measures a drafter on held-out greedy responses and writes ``drafter_eval.json`` beside it.

``python -m drafter_train.evaluate --config RECIPE --drafter FOLDER`` drafts from every response position, walks the
chains greedy speculative decoding would walk, and reports acceptance length, rates per position, recall and all of it
per category. The server seeds its block-length controller from the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from drafter_train.chat import ChatTokenizer
from drafter_train.corpus import load_corpus
from drafter_train.progress import say
from drafter_train.recipe import add_recipe_arguments, recipe_from
from drafter_train.simulate import simulate
from drafter_train.target import Target
from drafter_train.tokens import TokenStore, write_atomically
from drafter_train.warmstart import target_facts
from serve.drafter.checkpoint import load_drafter
from serve.drafter.dflash import DFlashModel


def table(report: dict[str, Any]) -> str:
    """The report as text, one line per category."""
    rows = [("all", report), *report["categories"].items()]
    lines = [f"{'category':<14} {'tokens':>8} {'rounds':>8} {'tau':>6}  survival"]
    for name, entry in rows:
        survival = " ".join(f"{x:.2f}" for x in entry["survival"])
        lines.append(
            f"{name:<14} {entry['tokens']:>8} {entry['rounds']:>8} {entry['acceptance_length']:>6.3f}  {survival}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.evaluate", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--drafter", required=True, help="drafter folder in DFlash layout")
    parser.add_argument("--limit", type=int, default=0, help="use only the first N responses (0: all)")
    parser.add_argument("--out", default=None, help="where to write the report (default: DRAFTER/drafter_eval.json)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    try:
        dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
        target = Target.load(recipe.target, args.device, dtype)
        config, weights = load_drafter(args.drafter, target_facts(target))
        store = TokenStore(recipe.data.eval_tokens)
        chat = ChatTokenizer(recipe.target, recipe.data.thinking)
        differences = chat.fingerprint.differences(store.meta["fingerprint"])
        if differences:
            raise ValueError(
                f"{store.folder} was written with another chat setup than {recipe.target}: {differences[0]}"
            )
        corpus = load_corpus(store, recipe.data.max_length)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model = DFlashModel(config)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    model.to(args.device)
    samples = list(range(min(args.limit or len(corpus), len(corpus))))
    report = simulate(model, target, corpus, samples)
    report["method"] = "chain simulation from taps, greedy"
    report["block_size"] = config.block_size
    report["fingerprint"] = chat.fingerprint.to_json()
    path = Path(args.out) if args.out else Path(args.drafter) / "drafter_eval.json"
    write_atomically(path, (json.dumps(report, indent=2) + "\n").encode())
    print(table(report))
    say(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
