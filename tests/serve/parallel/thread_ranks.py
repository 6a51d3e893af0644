"""Engines of several ranks in one process: every rank but the first is a thread, with its own gloo group, its own part
of the model and its own socket. The code is that of ranks in processes, without the seconds that a process takes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from serve.config import ServeConfig
from serve.engine.build import build_on, start_rank
from serve.engine.engine import Engine
from serve.parallel.follower import follower_of
from serve.parallel.group import RankGroup
from serve.parallel.leader import Leader
from serve.parallel.ranks import Ranks

CPU = torch.device("cpu")


def gloo_group(store: Any, rank: int, size: int) -> RankGroup:
    """One rank's view of a group whose ranks are threads. Returns when all have come."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(CPU, kind, gloo)
    return RankGroup(rank, size, group)


@contextmanager
def thread_ranks(config: ServeConfig) -> Iterator[tuple[Engine, list[BaseException]]]:
    """An engine of config.tensor_parallel ranks, and what went wrong on the others."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    failed: list[BaseException] = []
    sockets = []
    threads = []

    def follow(rank: int, sock: socket.socket) -> None:
        try:
            with sock:
                _, ready = start_rank(config, CPU, gloo_group(store, rank, config.tensor_parallel))
                follower_of(ready.runner).run(sock)
        except BaseException as error:
            failed.append(error)

    for rank in range(1, config.tensor_parallel):
        ours, theirs = socket.socketpair()
        sockets.append(ours)
        threads.append(threading.Thread(target=follow, args=(rank, theirs), daemon=True))
        threads[-1].start()
    group = gloo_group(store, 0, config.tensor_parallel)
    engine, info = build_on(Ranks(group, Leader(sockets, lambda: None)), config, CPU)
    assert info["tensor_parallel"] == config.tensor_parallel
    try:
        yield engine, failed
    finally:
        for sock in sockets:
            sock.close()
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
