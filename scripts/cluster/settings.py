"""What a cluster is asked for: its own options, and those of each replica's server, which keep their names.

It knows command lines; it does not know Ray.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import yaml

from serve.api.auth import ApiKeys
from serve.config import ServeConfig, parse_config

# Options of one server that mean nothing, or something else, where Ray starts, restarts and ends the servers.
_REFUSED = {
    "restart_engine": "Ray starts a replica again whose engine failed",
    "dev_routes": "a cluster has no routes for tests",
    "trace_dir": "replicas on several machines have no folder in common",
}


class SettingsError(Exception):
    """Options that contradict each other or cannot be honoured; the message is the one line to show."""


@dataclass(frozen=True)
class ClusterSettings:
    """One application. ``max_replicas`` above ``replicas`` turns autoscaling on, from ``replicas`` upwards.

    target_ongoing: requests at one replica, running or waiting, that autoscaling aims for (0: three quarters of the
    engine's ``max_num_seqs``). cpus, gpus: what Ray sets aside for one replica; gpus -1 takes a card a rank
    where the cluster has any and the device is not the CPU. fronts: processes that take requests and choose replicas.
    needs_key: a replica without an API key must not start. stamp: another one makes Ray replace every replica.
    """

    serve: ServeConfig
    name: str = "foretoken"
    route_prefix: str = "/"
    replicas: int = 2
    max_replicas: int = 0
    target_ongoing: float = 0.0
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    cpus: float = 1.0
    gpus: float = -1.0
    fronts: int = 1
    needs_key: bool = False
    stamp: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ClusterSettings:
        values = json.loads(text)
        return cls(**{**values, "serve": ServeConfig(**values["serve"])})

    def gpus_of_replica(self, cluster_gpus: float) -> float:
        """Cards that Ray sets aside for one replica, in a cluster with ``cluster_gpus`` of them."""
        if self.gpus >= 0:
            return self.gpus
        return float(self.serve.tensor_parallel if cluster_gpus > 0 and self.serve.device != "cpu" else 0)

    def ongoing_target(self) -> float:
        return self.target_ongoing or max(1.0, 0.75 * self.serve.max_num_seqs)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ClusterSettings``; their defaults are the dataclass's."""
    default = ClusterSettings(ServeConfig(""))
    parser.add_argument("--replicas", type=int, default=default.replicas, help="engines, at the least (default: 2)")
    parser.add_argument(
        "--max-replicas", type=int, default=0, help="more engines as requests pile up, up to here (0: no autoscaling)"
    )
    parser.add_argument(
        "--target-ongoing", type=float, default=0.0, help="requests a replica to aim for (0: 3/4 of --max-num-seqs)"
    )
    parser.add_argument("--upscale-delay", type=float, default=default.upscale_delay, help="seconds (default: 10)")
    parser.add_argument("--downscale-delay", type=float, default=default.downscale_delay, help="seconds (default: 300)")
    parser.add_argument("--cpus", type=float, default=default.cpus, help="CPUs set aside for a replica (default: 1)")
    parser.add_argument(
        "--gpus",
        type=float,
        default=-1.0,
        help="cards set aside for a replica (-1: as many as --tensor-parallel, where there are any)",
    )
    parser.add_argument("--fronts", type=int, default=default.fronts, help="processes that route (default: 1)")
    parser.add_argument("--name", default=default.name, help="name of the application (default: foretoken)")
    parser.add_argument("--route-prefix", default=default.route_prefix, help="path before every route (default: /)")


def options_of(path: str) -> list[str]:
    """The options in a YAML file, as a command line has them: ``replicas: 4`` is ``--replicas 4``, ``page: false`` is
    ``--no-page``. SettingsError names the file and what is wrong in it."""
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"--config {path} must hold options as NAME: VALUE")
    options: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            options.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, (str, int, float)):
            options.append(f"--{name}={value}")
        else:
            raise SettingsError(f"--config {path}: {name} must be a text, a number, true or false")
    return options


def settings_from(
    args: argparse.Namespace, rest: Sequence[str], environ: Mapping[str, str], stamp: str = ""
) -> ClusterSettings:
    """The settings of parsed cluster options and of ``rest``, the options of ``python -m serve``.

    With a key here there must be one on every node. Raises SettingsError or KeyFileError.
    """
    serve = parse_config(rest, dict(environ))
    plain = ServeConfig("")
    for name, why in _REFUSED.items():
        if getattr(serve, name) != getattr(plain, name):
            raise SettingsError(f"--{name.replace('_', '-')} is not for a cluster: {why}")
    limits = {"replicas": (1, 1024), "fronts": (1, 64), "cpus": (0, 1024), "gpus": (-1, 64), "max_replicas": (0, 1024)}
    limits |= {"target_ongoing": (0, 1 << 20), "upscale_delay": (0, 86_400), "downscale_delay": (0, 86_400)}
    for name, (low, high) in limits.items():
        if not low <= getattr(args, name) <= high:
            raise SettingsError(f"--{name.replace('_', '-')} must be between {low} and {high}")
    if 0 < args.gpus < serve.tensor_parallel > 1:
        raise SettingsError(f"--gpus {args.gpus:g} is not enough for --tensor-parallel {serve.tensor_parallel}")
    if 0 < args.max_replicas < args.replicas:
        raise SettingsError("--max-replicas must be 0 or at least --replicas")
    if not args.route_prefix.startswith("/"):
        raise SettingsError("--route-prefix must begin with /")
    names = ("name", "route_prefix", "replicas", "max_replicas", "target_ongoing", "upscale_delay", "downscale_delay")
    chosen = {name: getattr(args, name) for name in (*names, "cpus", "gpus", "fronts")}
    needs_key = bool(ApiKeys.load(serve.api_key_file, environ))
    return ClusterSettings(serve, **chosen, needs_key=needs_key, stamp=stamp)
