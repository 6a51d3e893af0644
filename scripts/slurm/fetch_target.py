"""Downloads the recipe's target where there is a network: ``python -m scripts.slurm.fetch_target --config RECIPE``.

The repository is ``publish.base_model``, the commit ``publish.base_revision`` (empty: what main is at now, which is
printed so that the recipe can name it), the folder ``target``. Safetensors, configs and tokenizer only: no pickle, no
code. Run it again and only what is missing is fetched. Jobs then need no network.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

from drafter_train.progress import say
from drafter_train.recipe import Recipe, add_recipe_arguments, recipe_from

PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja", "LICENSE*")


class FetchError(RuntimeError):
    """The target cannot be fetched; the message says why."""


def fetch(recipe: Recipe) -> str:
    """Fill the target's folder; the commit it is at. Raises FetchError, and what the hub's client raises."""
    from huggingface_hub import HfApi

    repo = recipe.publish.base_model
    if not repo:
        raise FetchError("publish.base_model must name the target's repository")
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise FetchError("HF_HUB_OFFLINE is set; this is the step that needs the network")
    api: Any = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    revision = str(api.repo_info(repo, revision=recipe.publish.base_revision or "main").sha)
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise FetchError(f"{repo} is at {revision!r}, which is not a commit of 40 hex digits")
    say(f"{repo} at {revision} to {recipe.target}")
    api.snapshot_download(repo, revision=revision, local_dir=recipe.target, allow_patterns=list(PATTERNS))
    if not list(Path(recipe.target).glob("*.safetensors")):
        raise FetchError(f"{repo} at {revision} holds no safetensors")
    return revision


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.slurm.fetch_target", description=__doc__)
    add_recipe_arguments(parser)
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    import httpx

    try:
        revision = fetch(recipe)
    except (FetchError, httpx.HTTPError, OSError, ValueError) as error:
        say(f"not fetched: {re.sub(r'hf_[A-Za-z0-9]+', 'hf_***', str(error))}; run the same command again to go on")
        return 1
    if revision != recipe.publish.base_revision:
        say(f"name it in the recipe: publish.base_revision: {revision}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
