"""Measures a drafter on held-out greedy responses and writes ``drafter_eval.json`` beside it.

``python -m drafter_train.evaluate --config RECIPE --drafter FOLDER`` drafts from every response position, walks the
chains greedy speculative decoding would walk, and reports acceptance length, rates per position, recall and all of it
per category; among the frequent tokens alone where the folder lists them, as the server does, with what the list costs.
Then it decodes some of the prompts for real, through the server's engine, and fails (exit 1) when the rounds it counts
and the rounds that the simulation finds in the same text differ by more than 2 %. The server seeds its block-length
controller from the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter_train.chat import ChatTokenizer
from drafter_train.corpus import Corpus, load_corpus
from drafter_train.progress import say
from drafter_train.recipe import add_recipe_arguments, recipe_from
from drafter_train.served import decode_greedily, open_engine, served_corpus, served_report
from drafter_train.simulate import simulate
from drafter_train.target import Target
from drafter_train.tokens import TokenStore, write_atomically
from drafter_train.warmstart import target_facts
from serve.drafter.checkpoint import load_drafter
from serve.drafter.dflash import DFlashModel
from serve.drafter.head import read_head_tokens

COMPARED = 40
"""Responses that tell what a list of frequent tokens costs."""


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


def served_table(served: dict[str, Any]) -> str:
    """Real decoding as text, one line per category."""
    rows = [("all", served), *served["categories"].items()]
    lines = [f"{'served':<14} {'tokens':>8} {'rounds':>8} {'tau':>6}  drafted a round"]
    for name, entry in rows:
        lines.append(
            f"{name:<14} {entry['tokens']:>8} {entry['rounds']:>8} {entry['acceptance_length']:>6.3f}  "
            f"{entry['drafted_per_round']:.2f}"
        )
    return "\n".join(lines)


def serve_and_compare(
    model: DFlashModel,
    target: Target,
    corpus: Corpus,
    args: argparse.Namespace,
    max_new: int,
    head_tokens: Tensor | None,
) -> dict[str, Any]:
    """Decode prompts spread over ``corpus`` for real; the served report with the simulation of the same text beside
    it. Raises ValueError when the engine cannot start."""
    picked = range(0, len(corpus), max(1, len(corpus) // args.served))[: args.served]
    prompts = [corpus.row(i)[: corpus.prompt_lengths[i]] for i in picked]
    categories = [corpus.categories[i] for i in picked]
    weights = args.served_weights or ("auto" if args.device.startswith("cuda") else "fp32")
    say(f"decoding {len(prompts)} prompts through the engine, weights {weights}")
    drafts = model.config.block_size - 1
    engine = open_engine(str(args.target), args.drafter, drafts, weights, args.device, args.served_sequences)
    answers = decode_greedily(engine, prompts, max_new)
    report = served_report(answers, categories)
    again = served_corpus(prompts, answers, categories)
    say(f"decoded {report['tokens']} tokens in {report['rounds']} rounds; simulating the same text")
    simulated = simulate(model, target, again, range(len(again)), recall=False, head_tokens=head_tokens)
    report["weights"] = weights
    report["simulated_on_the_same_text"] = simulated["acceptance_length"]
    report["difference"] = report["acceptance_length"] / simulated["acceptance_length"] - 1
    return report


def cost_of_list(
    model: DFlashModel, target: Target, corpus: Corpus, samples: Sequence[int], head_tokens: Tensor
) -> dict[str, Any]:
    """What guessing among ``head_tokens`` costs: acceptance length with the list and of all tokens, over up to
    ``COMPARED`` of ``samples``, spread over them."""
    picked = list(samples)[:: max(1, len(samples) // COMPARED)][:COMPARED]
    lengths = [
        simulate(model, target, corpus, picked, recall=False, head_tokens=tokens)["acceptance_length"]
        for tokens in (head_tokens, None)
    ]
    return {
        "tokens": len(head_tokens),
        "responses": len(picked),
        "acceptance_length": lengths[0],
        "acceptance_length_of_all_tokens": lengths[1],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.evaluate", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--drafter", required=True, help="drafter folder in DFlash layout")
    parser.add_argument("--limit", type=int, default=0, help="use only the first N responses (0: all)")
    parser.add_argument("--served", type=int, default=32, help="prompts to decode for real (default: 32; 0: none)")
    parser.add_argument(
        "--served-only", action="store_true", help="keep the simulation that the report holds, decode and compare alone"
    )
    parser.add_argument("--served-weights", help="engine's weight format (default: fp32 on a CPU, auto on CUDA)")
    parser.add_argument(
        "--served-sequences", type=int, default=8, help="requests decoded together at most (default: 8)"
    )
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest difference, relative (default: 0.02)")
    parser.add_argument("--out", default=None, help="where to write the report (default: DRAFTER/drafter_eval.json)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    if args.served < 0 or args.limit < 0 or args.served_sequences < 1:
        parser.error(
            f"--served and --limit must be 0 or more, --served-sequences 1 or more: {args.served}, {args.limit}, "
            f"{args.served_sequences}"
        )
    args.target = recipe.target
    try:
        dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
        target = Target.load(recipe.target, args.device, dtype)
        config, weights = load_drafter(args.drafter, target_facts(target))
        head_tokens = read_head_tokens(args.drafter, config.vocab_size)
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
    path = Path(args.out) if args.out else Path(args.drafter) / "drafter_eval.json"
    if args.served_only:
        try:
            report = json.loads((Path(args.drafter) / "drafter_eval.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            parser.error(f"--served-only needs an earlier report: {error}")
    else:
        samples = list(range(min(args.limit or len(corpus), len(corpus))))
        report = simulate(model, target, corpus, samples, head_tokens=head_tokens)
        report["head_tokens"] = config.vocab_size if head_tokens is None else len(head_tokens)
        if head_tokens is not None:
            report["frequent_tokens"] = cost_of_list(model, target, corpus, samples, head_tokens)
        report["method"] = "chain simulation from taps, greedy"
        report["block_size"] = config.block_size
        report["fingerprint"] = chat.fingerprint.to_json()
    if args.served:
        try:
            report["served"] = serve_and_compare(model, target, corpus, args, recipe.data.max_new_tokens, head_tokens)
        except ValueError as error:
            parser.error(str(error))
    write_atomically(path, (json.dumps(report, indent=2) + "\n").encode())
    print(table(report))
    say(f"wrote {path}")
    if args.served:
        served = report["served"]
        print(served_table(served))
        say(
            f"served acceptance length {served['acceptance_length']:.3f} over {served['rounds']} rounds; simulated on "
            f"the same text {served['simulated_on_the_same_text']:.3f} ({served['difference']:+.2%})"
        )
        if abs(served["difference"]) > args.tolerance:
            say(f"they differ by more than {args.tolerance:.0%}: serving and training do not run the same drafter")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
