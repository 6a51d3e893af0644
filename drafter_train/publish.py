"""Publishes a drafter and pins it: ``python -m drafter_train.publish --config RECIPE --repo OWNER/NAME``.

Checks the token and the folder first, writes the model card, creates the repository, uploads, asks for the final
commit, downloads that commit again as a grader would, compares every hash, loads it against the target, and only then
writes ``manifest.json``. Whatever fails, the folder stays as it is and the message says where; run the same command
again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path

from drafter_train.card import make_card
from drafter_train.hub import GRADER_PATTERNS, Hub, HubError, Patience, belongs
from drafter_train.progress import say
from drafter_train.recipe import Recipe, add_recipe_arguments, recipe_from
from drafter_train.target import read_target_config
from drafter_train.tokens import write_atomically
from serve.drafter.checkpoint import DrafterError, TargetFacts, load_drafter
from serve.drafter.head import read_head_tokens


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def facts_of(target: str) -> TargetFacts:
    """What a drafter has to agree with, from the target's config.json. Raises OSError or ValueError."""
    config = read_target_config(target)
    return TargetFacts(config.hidden_size, config.num_layers, config.vocab_size)


def compare(sent: Path, received: Path) -> None:
    """Every file of ``sent`` that the grader's filter lets through is in ``received`` with the same bytes, and nothing
    else is. Raises HubError naming the file."""
    ours = {name for name in _names(sent) if belongs(name, GRADER_PATTERNS)}
    theirs = _names(received)
    if ours != theirs:
        odd = sorted(ours ^ theirs)[0]
        if odd in ours:
            raise HubError(f"{odd} is not in the published revision")
        raise HubError(f"{odd} is only in the published revision, of an earlier drafter: delete it on the hub first")
    for name in sorted(ours):
        if file_sha256(sent / name) != file_sha256(received / name):
            raise HubError(f"{name} came back with other bytes than were sent")


def _names(folder: Path) -> set[str]:
    """Files below ``folder`` by their path in it; what the hub's client keeps for itself is hidden."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not path.parts[0].startswith(".")}


def check_drafter(folder: Path, facts: TargetFacts) -> None:
    """DrafterError unless the folder is a whole drafter for that target, its list of tokens included."""
    load_drafter(folder, facts)
    read_head_tokens(folder, facts.vocab_size)


def publish(recipe: Recipe, folder: Path, repo: str, manifest: Path, hub: Hub, private: bool = False) -> str:
    """The pinned commit. Raises HubError, DrafterError, OSError or ValueError; ``manifest`` is then untouched."""
    say(f"{hub.endpoint}: the token is {hub.check_token(repo)}'s and may write to {repo}")
    facts = facts_of(recipe.target)
    check_drafter(folder, facts)
    card = make_card(folder, recipe.publish, repo, repo.partition("/")[2])
    write_atomically(folder / "README.md", card.encode())
    hub.create(repo, private)
    hub.upload(repo, folder, f"Block drafter for {recipe.publish.base_model}")
    revision = hub.final_revision(repo)
    with tempfile.TemporaryDirectory(prefix="drafter-") as name:
        received = Path(name) / "drafter"
        names = hub.download(repo, revision, received)
        compare(folder, received)
        check_drafter(received, facts)
    say(f"{repo} at {revision}: {len(names)} files came back unchanged and load")
    entry = {"drafter_hf_repo": repo, "revision": revision}
    write_atomically(manifest, (json.dumps(entry, indent=2) + "\n").encode())
    return revision


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.publish", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--drafter", type=Path, help="drafter folder (default: the recipe's train.output/final)")
    parser.add_argument("--repo", help="OWNER/NAME on the hub (default: the recipe's publish.repo)")
    parser.add_argument("--manifest", type=Path, default=Path("manifest.json"), help="file that pins the commit")
    parser.add_argument("--private", action="store_true", help="the repository is private; a grader cannot read it")
    parser.add_argument("--attempts", type=int, default=4, help="tries of a call that fails for a passing reason")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds before the second try, then doubled")
    parser.add_argument("--check-token", action="store_true", help="only check that the token may write, then exit")
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    repo = args.repo or recipe.publish.repo
    if not repo:
        parser.error("--repo OWNER/NAME is missing and the recipe has no publish.repo")
    if not 1 <= args.attempts <= 20 or not 0 <= args.pause <= 600:
        parser.error(f"--attempts must be 1 to 20 and --pause 0 to 600, got {args.attempts} and {args.pause}")
    folder = args.drafter or Path(recipe.train.output) / "final"
    try:
        hub = Hub(patience=Patience(args.attempts, args.pause))
        if args.check_token:
            say(f"{hub.endpoint}: the token is {hub.check_token(repo)}'s and may write to {repo}")
            return 0
        revision = publish(recipe, folder, repo, args.manifest, hub, args.private)
    except (HubError, DrafterError, OSError, ValueError, KeyError) as error:
        say(f"not published: {re.sub(r'hf_[A-Za-z0-9]+', 'hf_***', str(error))}")
        say(f"the drafter is untouched in {folder}; {args.manifest} was not written; run the same command again")
        return 1
    say(f"wrote {args.manifest}: {repo} at {revision}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
