"""``python -m scripts.cluster --replicas 2 --model-dir DIR ...``: the server as replicas behind one address, on Ray.

The options of ``python -m serve`` stand beside the cluster's own. Without ``--address`` a cluster starts on this
machine and ends with this process; with it the application goes to a running cluster (``auto``: the one of this
machine) and stays there. Running it again with other options changes what differs, a replica at a time; ``--restart``
replaces all.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from scripts.cluster.settings import SettingsError, add_cluster_arguments, options_of, settings_from
from scripts.ray_connection import connect
from serve.api.auth import KeyFileError
from serve.api.engine_process import ENGINE_COMMAND


def main(argv: Sequence[str] | None = None, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Exit code 0, or 1 with one line on standard error. ``engine_command``: what a replica starts as its engine."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.cluster", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    add_cluster_arguments(parser)
    parser.add_argument("--address", help="a running Ray cluster (auto, or HOST:PORT); else one is started here")
    parser.add_argument("--restart", action="store_true", help="replace every replica, one at a time (with --address)")
    parser.add_argument("--remove", action="store_true", help="take the application off (with --address)")
    parser.add_argument("--cluster-cpus", type=int, default=0, help="CPUs of a cluster started here (0: all)")
    parser.add_argument("--config", help="YAML with options, NAME: VALUE; those of the command line win")
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        config = parser.parse_known_args(given)[0].config
        args, rest = parser.parse_known_args([*(options_of(config) if config else ()), *given])
        if (args.restart or args.remove) and args.address is None:
            raise SettingsError("--restart and --remove are for a running cluster: --address auto")
        stamp = str(int(time.time())) if args.restart else ""
        settings = settings_from(args, rest, os.environ, stamp)
    except (SettingsError, KeyFileError) as error:
        print(f"Foretoken cannot start: {error}", file=sys.stderr)
        return 1
    ended = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    # On a busy node the front's process needs longer than the five seconds after which Ray starts another in its place.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    # Ray is slow to import, and bad options should be refused at once.
    import ray
    from ray import serve as ray_serve
    from ray.exceptions import RayError

    from scripts.cluster.deploy import deploy

    # What the replicas of a cluster of our own write belongs on our standard error, as an engine's does.
    own = {"num_cpus": args.cluster_cpus or None, "configure_logging": False}
    connect(args.address, own, joined={"log_to_driver": False})
    try:
        if args.remove:
            ray_serve.delete(settings.name)
            return 0
        deploy(settings, engine_command, every_node=args.address is not None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        url = f"http://{settings.serve.host}:{settings.serve.port}{settings.route_prefix.rstrip('/')}"
        address = ray.get_runtime_context().gcs_address
        print(f"Foretoken ready: {url} replicas={settings.replicas} cluster={address}")
        print(f"curl {url}/v1/models", flush=True)
        if args.address is None:
            ended.wait()
            ray_serve.shutdown()
    except (RuntimeError, RayError) as error:
        print(f"Foretoken cannot start: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
