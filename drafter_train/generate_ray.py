"""Generation over a Ray cluster: ``python -m drafter_train.generate_ray --shards 8 -- --config RECIPE``.

Ray Data hands the shards to tasks, a card each where there are any; a task runs what a task of the Slurm array runs, so
the files are the same byte for byte, and either goes on where the other stopped. What stands behind ``--`` goes to
``drafter_train.generate``. The token store has to be on a file system that every node sees. It knows no model.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from drafter_train import generate
from drafter_train.progress import say
from scripts.ray_connection import connect


def run_shard(row: dict[str, Any], arguments: list[str], shards: int) -> dict[str, Any]:
    """Write one shard in this process: its number and the exit code of ``drafter_train.generate``."""
    shard = int(row["id"])
    try:
        code = generate.main([*arguments, "--shard", f"{shard}/{shards}"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    return {"shard": shard, "code": code}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.generate_ray", description=__doc__)
    parser.add_argument("--shards", type=int, required=True, help="as many as the array has tasks")
    parser.add_argument("--at-once", type=int, default=0, help="most shards at the same time (0: what fits)")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs set aside for a shard (default: 1)")
    parser.add_argument("--gpus", type=float, default=-1.0, help="cards for a shard (-1: one, where there are any)")
    parser.add_argument("--address", help="a running Ray cluster (auto, or HOST:PORT); else one is started here")
    parser.add_argument("arguments", nargs="*", help="behind --: the options of drafter_train.generate")
    args = parser.parse_args(argv)
    if args.shards < 1:
        parser.error("--shards must be at least 1")
    if any(option == "--shard" or option.startswith("--shard=") for option in args.arguments):
        parser.error("--shard is given by --shards: every shard is written")
    import ray
    import ray.data

    connect(args.address or None, own={}, joined={})
    try:
        gpus = args.gpus if args.gpus >= 0 else float(ray.cluster_resources().get("GPU", 0) > 0)
        ray.data.DataContext.get_current().enable_progress_bars = False
        done = ray.data.range(args.shards, override_num_blocks=args.shards).map(
            run_shard,
            fn_kwargs={"arguments": args.arguments, "shards": args.shards},
            num_cpus=args.cpus,
            num_gpus=gpus or None,
            concurrency=args.at_once or None,
        )
        codes = {row["shard"]: row["code"] for row in done.take_all()}
    finally:
        ray.shutdown()
    left = sorted(shard for shard, code in codes.items() if code != 0)
    if left:
        say(f"not finished: shards {', '.join(map(str, left))}; run the same command again for the rest")
    return max(int(code) for code in codes.values())


if __name__ == "__main__":
    sys.exit(main())
