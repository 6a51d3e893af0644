"""The Ray Serve application made of a front and its replicas, and how it is put on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray import serve as ray_serve

from scripts.cluster.front import Front
from scripts.cluster.replica import EngineReplica
from scripts.cluster.settings import ClusterSettings
from serve.api.engine_process import ENGINE_COMMAND

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_HEALTH_PERIOD_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 75


def build(settings: ClusterSettings, engine_command: Sequence[str] = ENGINE_COMMAND) -> Any:
    """The application, for ``ray.serve.run``. Ray must be connected: it knows whether there are cards."""
    serve = settings.serve
    scaling: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas > settings.replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": settings.replicas,
                "max_replicas": settings.max_replicas,
                "target_ongoing_requests": settings.ongoing_target(),
                "upscale_delay_s": settings.upscale_delay,
                "downscale_delay_s": settings.downscale_delay,
            }
        }
    gpus = settings.gpus_of_replica(ray.cluster_resources().get("GPU", 0.0))
    engines = ray_serve.deployment(
        EngineReplica,
        name="engine",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": gpus},
        # A batch that is full spills to the next replica of the ring; beyond that requests wait in the front.
        max_ongoing_requests=serve.max_num_seqs,
        max_queued_requests=serve.max_queue,
        request_router_config={"request_router_class": ROUTER},
        graceful_shutdown_timeout_s=serve.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=_HEALTH_PERIOD_SECONDS,
        health_check_timeout_s=30.0,
        **scaling,
    )
    front = ray_serve.deployment(
        ray_serve.ingress()(Front),
        name="front",
        num_replicas=settings.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=serve.drain_seconds,
        graceful_shutdown_wait_loop_s=0.2,
    )
    text = settings.to_json()
    return front.bind(text, engines.bind(text, tuple(engine_command)))


def deploy(
    settings: ClusterSettings, engine_command: Sequence[str] = ENGINE_COMMAND, *, every_node: bool = False
) -> None:
    """Put the application on the cluster, or change the one that is there; returns when every replica can answer.

    What differs from before is replaced a replica at a time, each after its running requests. Raises RuntimeError with
    Ray's reason when it does not get there.
    """
    ray_serve.start(
        proxy_location="EveryNode" if every_node else "HeadOnly",
        http_options={
            "host": settings.serve.host,
            "port": settings.serve.port,
            "keep_alive_timeout_s": KEEP_ALIVE_SECONDS,
        },
    )
    ray_serve.run(build(settings, engine_command), name=settings.name, route_prefix=settings.route_prefix)
