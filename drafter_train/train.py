"""Trains a drafter: ``python -m drafter_train.train --config RECIPE`` (or under ``accelerate launch``).

The frozen target runs in the same process and its hidden states feed the drafter at once; nothing is cached. Stop it in
any way and run the same command again: it goes on from the last whole checkpoint. SIGTERM and SIGUSR1 save first and
exit 0. The result is ``<output>/final``, a drafter folder in DFlash layout; metrics are in ``<output>/metrics.jsonl``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from drafter_train.folder_lock import only_writer
from drafter_train.hub import Hub, HubError
from drafter_train.progress import say
from drafter_train.recipe import add_recipe_arguments, recipe_from
from drafter_train.trainer import TrainingError, train


def check_token_early(repo: str) -> None:
    """Find out now, not after days, that the drafter cannot be published. Raises HubError; offline it only says so."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        say(f"HF_HUB_OFFLINE is set: whether the token may write to {repo} was not checked")
        return
    say(f"the token is {Hub().check_token(repo)}'s and may write to {repo}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.train", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument(
        "--max-seconds", type=float, default=None, help="sets train.max_seconds: annealed within this time"
    )
    parser.add_argument("--device", default=None, help="cpu forces the CPU; otherwise accelerate chooses")
    parser.add_argument("--stop-after", type=int, default=0, help="save and exit after this many steps of this run")
    args = parser.parse_args(argv)
    if args.max_seconds is not None:
        args.overrides.append(f"train.max_seconds={args.max_seconds}")
    recipe = recipe_from(args, parser)
    if recipe.publish.repo and os.environ.get("RANK", "0") == "0":
        try:
            check_token_early(recipe.publish.repo)
        except HubError as error:
            say(f"training not started: {error}")
            return 1
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda received, _frame: asked.append(received))
        for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    # Rank 0 writes; the others have nothing to lock.
    alone = only_writer(Path(recipe.train.output)) if os.environ.get("RANK", "0") == "0" else nullcontext()
    try:
        with alone:
            finished = train(recipe, device=args.device, stop=lambda: bool(asked), stop_after=args.stop_after)
    except (TrainingError, ValueError, OSError) as error:
        say(f"training stopped: {error}")
        return 1
    finally:
        # A job script ignores SIGUSR1 for what it starts: a second one must not kill an exit that takes its time.
        for number, handler in before.items():
            signal.signal(number, handler)
    if not finished:
        place = Path(recipe.train.output)
        say(f"saved in {place}; to go on run: python -m drafter_train.train {' '.join(argv or sys.argv[1:])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
