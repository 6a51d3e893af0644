"""The model card of a drafter folder, from what its files say: ``python -m drafter_train.card --config RECIPE --drafter
FOLDER`` writes ``README.md``. Nothing in it is typed by hand but the recipe's ``publish`` section. This file knows no
network and no weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drafter_train.progress import say
from drafter_train.recipe import PublishConfig, add_recipe_arguments, recipe_from
from drafter_train.tokens import write_atomically

_CARD = """---
license: {license}
base_model: {base_model}
library_name: transformers
tags:
- speculative-decoding
- dflash
- draft-model
---

# {title}

A block drafter for speculative decoding of **{base_model}** ({base_revision}). It reads the outputs of target layers
{target_layer_ids} (0-based) and drafts {drafts} tokens in one pass of {layers} layers ({megabytes:.1f} MB, bf16). It
cannot write text by itself: embedding and output head are the target's, and the target verifies every token, so the
text is the target's own.

Plain DFlash layout (arXiv 2602.06036): {tensors} tensors, block of {block_size} (one known token and {drafts} masks),
mask token id {mask_token_id}, full attention, no remote code.{extras}

## How many tokens a round gives

Greedy decoding; acceptance length counts the target's own token of each round. {method}

| category | tokens | acceptance length | first draft right | survival at positions 1 to {drafts} |
|---|---|---|---|---|
{table}

The right token is among the drafter's 16 best at position 1 in {recall:.0%} of all places. These rates
(`drafter_eval.json`) are also what the server's block-length controller starts from.{listed}

## What it was trained on

{trained}

{data}

## How

{how}

## Use

This project's server (the folder may be local or downloaded):

```
MODEL_DIR=path/to/target sh start_server.sh --drafter-dir path/to/this/folder
```

vLLM:

```
vllm serve {base_model} --speculative-config \\
  '{{"method": "dflash", "model": "{repo}", "num_speculative_tokens": {drafts}}}'
```

SGLang:

```
python -m sglang.launch_server --model-path {base_model} \\
  --speculative-algorithm DFLASH --speculative-draft-model-path {repo}
```

The last two read the same layout; this drafter was measured with this project only.

## Limits

Trained on the outputs of one checkpoint under one chat template: a fine-tune of the target, another system prompt
style, long contexts (over {max_length} tokens) and high temperatures lower the acceptance length, never the quality.
"""


def _row(name: str, entry: dict[str, Any]) -> str:
    survival = " ".join(f"{x:.2f}" for x in entry["survival"])
    first = entry["conditional_acceptance"][0]
    return f"| {name} | {entry['tokens']:,} | **{entry['acceptance_length']:.2f}** | {first:.0%} | {survival} |"


def _how(training: dict[str, Any]) -> str:
    recipe, train = training["recipe"], training["recipe"]["train"]
    start = recipe["init"]["source"]
    if start == "target_layers":
        layers = recipe["init"]["layers"]
        start = f"copies of target layers {layers}" if layers else "copies of the target's last layers"
    elif start == "checkpoint":
        start = "an earlier drafter of the same target"
    loss = f"cross-entropy with {'D-PACE' if train['loss'] == 'dpace' else 'position decay'} weights"
    if train["kl_weight"]:
        loss += f", {train['kl_weight']:.0%} of the label replaced by the target's distribution"
    optimizer = {"muon": "Muon (matrices) and AdamW (norms)", "adamw": "AdamW"}[train["optimizer"]]
    return (
        f"{training['steps']:,} steps of {train['batch_sequences']} sequences, up to {train['anchors']} blocks each, "
        f"in {training['seconds']:.0f} s; start: {start}; loss: {loss}; {optimizer}, peak "
        f"rate {train['lr']:g}, cosine to {train['final_lr']:g} of it; the target's hidden states come from the frozen "
        "target in the same process."
    )


def _extras(folder: Path) -> str:
    """What lies beside the plain layout, for this project's server alone; empty without it."""
    path = folder / "extras" / "head_tokens.safetensors"
    if not path.exists():
        return ""
    with safe_open(path, framework="pt") as file:
        count = file.get_slice("token_ids").get_shape()[0]
    return (
        f" Beside it, for this project's server alone,\n`extras/{path.name}`: the {count:,} tokens most frequent in "
        "the target's own answers, among which it\nguesses, for a smaller output head."
    )


def _listed(report: dict[str, Any]) -> str:
    """Which tokens the rates were taken over, and what the list of frequent ones costs; empty without a list."""
    cost = report.get("frequent_tokens")
    if cost is None:
        return ""
    kept, whole = cost["acceptance_length"], cost["acceptance_length_of_all_tokens"]
    over = "the listed tokens" if report["head_tokens"] == cost["tokens"] else "the whole vocabulary"
    return (
        f" They were taken\nover {over}; over {cost['responses']} of the answers, guessing among the "
        f"{cost['tokens']:,} listed tokens gives\n{kept:.2f} where all give {whole:.2f} ({kept / whole - 1:+.1%})."
    )


def make_card(folder: Path, publish: PublishConfig, repo: str, title: str) -> str:
    """The card's text. Raises OSError or ValueError when config.json, drafter_eval.json or training.json is missing or
    not JSON, and ValueError when the recipe names no base model."""
    if not publish.base_model:
        raise ValueError("publish.base_model must name the target's repository: the card needs it")
    config, report, training = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("config.json", "drafter_eval.json", "training.json")
    )
    drafts = config["block_size"] - 1
    rows = [_row("**all**", report), *(_row(name, entry) for name, entry in report["categories"].items())]
    served = report.get("served")
    method = f"{report['responses']} held-out prompts; {report['method']}."
    if served:
        method += (
            f" Real decoding through the server's engine gives {served['acceptance_length']:.3f} where the chain "
            f"simulation of the text it wrote gives {served['simulated_on_the_same_text']:.3f}."
        )
    passes = training["recipe"]["data"]["passes"]
    kinds = {True: "greedy", False: "sampled for a first part and greedy from there"}
    how_answered = " and ".join(dict.fromkeys(kinds[p["sampled_tokens"] == [0, 0]] for p in passes))
    return _CARD.format(
        license=publish.license,
        base_model=publish.base_model,
        base_revision=publish.base_revision or "revision not stated",
        title=title,
        target_layer_ids=config["dflash_config"]["target_layer_ids"],
        drafts=drafts,
        layers=config["num_hidden_layers"],
        megabytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6,
        tensors=3 + 11 * config["num_hidden_layers"],
        block_size=config["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        method=method,
        extras=_extras(folder),
        table="\n".join(rows),
        listed=_listed(report),
        recall=report["recall"]["16"][0],
        trained=(
            f"{training['sequences']:,} responses of the target itself ({training['tokens']:,} tokens, prompts "
            f"included; up to {training['recipe']['data']['max_new_tokens']} new tokens each; {how_answered}), "
            "token ids kept as produced."
        ),
        data=publish.data.strip() or "The recipe names no prompt sources.",
        how=_how(training),
        repo=repo,
        max_length=training["recipe"]["data"]["max_length"],
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.card", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--drafter", required=True, type=Path, help="folder with config, evaluation and training.json")
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    try:
        repo = recipe.publish.repo or "path/to/this/folder"
        text = make_card(args.drafter, recipe.publish, repo, f"{args.drafter.resolve().name} block drafter")
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{args.drafter}: {error}")
    write_atomically(args.drafter / "README.md", text.encode())
    say(f"wrote {args.drafter / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
