"""Rank 0's view of all ranks: starts the others as processes, joins the group with them, and notices when one is lost.

One engine, several processes: rank 0 is the engine process, with the scheduler, acceptance and sampling; it starts the
others as its children. Each rank loads its part of every matrix and runs the same start-up code, in step through the
collectives in it (split.py, group.py). Then the others wait on a socket of their own for the work that rank 0 announces
(mirror.py, leader.py, wire.py): the rows of a flat batch, or the packed fields of a graph that both have captured. They
compute and answer nothing (follower.py); what has to travel back does so inside the work, through NCCL or gloo.

A socket a rank, and no broadcast through the process group, because an idle engine must wait without a timeout and
without turning, and because the end of a process closes it: a lost rank is heard of at once, also while rank 0 hangs
in a collective that will never end. The ranks meet through a file in memory that all inherit: no port, nothing left.
Children die with rank 0 (their parent's end is a signal) and are in its process group, which the API process can kill.
This file knows processes; no tensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from serve.config import ServeConfig
from serve.parallel.group import ALONE, RankGroup
from serve.parallel.leader import Leader, RanksError
from serve.parallel.mirror import NO_MIRROR, Mirror

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "serve.parallel")
COLLECTIVE_MINUTES = 30
"""Longer than any rank takes to load its part; a lost rank is noticed otherwise, and sooner."""
LAST_WORDS_SECONDS = 5.0
POLL_SECONDS = 0.02
_ENVIRONMENT = {
    # Multicast over NVLink can put the cards of a host out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
_DEFAULTS = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # all ranks are on this host


@dataclass(frozen=True)
class Ranks:
    """The group, and who tells it what to run. By default there is one rank."""

    group: RankGroup = ALONE
    mirror: Mirror = NO_MIRROR


def meeting(store_fd: int, size: int) -> Any:
    """Where the ranks meet: a file in memory that all have open."""
    return dist.FileStore(f"/proc/self/fd/{store_fd}", size)  # type: ignore[attr-defined]


def join(rank: int, size: int, device: torch.device, store: Any) -> RankGroup:
    """Meets the other ranks; returns when all are there."""
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    store.set(_here(rank), "1")
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=COLLECTIVE_MINUTES),
        device_id=device if cuda else None,
    )
    group = RankGroup(rank, size, dist.group.WORLD)
    group.least(0, device)
    return group


class RankProcesses:
    """The other ranks, started. ``on_lost`` is called with a reason, once, from a thread of its own, when one ends."""

    def __init__(self, config: ServeConfig, on_lost: Callable[[str], None] | None = None) -> None:
        self._on_lost = on_lost
        self._reason: str | None = None
        self._lost = threading.Event()
        self._lock = threading.Lock()
        self._closing = False
        self._size = config.tensor_parallel
        self._store_fd = os.memfd_create("ranks")
        self.sockets: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self._size):
            self._start(rank, config)

    def _start(self, rank: int, config: ServeConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [
                    *COMMAND,
                    *("--rank", str(rank), "--fd", str(theirs.fileno()), "--store", str(self._store_fd)),
                    *("--config", config.to_json()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._store_fd),
                env={**_DEFAULTS, **os.environ, **_ENVIRONMENT},
            )
        self.sockets.append(ours)
        self.processes.append(process)
        threading.Thread(target=self._watch, args=(rank, ours, process), name=f"rank-{rank}", daemon=True).start()

    def _watch(self, rank: int, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """A rank says nothing but why it ends."""
        said = bytearray()
        with contextlib.suppress(OSError):
            while data := sock.recv(1 << 12):
                said += data
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(LAST_WORDS_SECONDS)
        reason = f"rank {rank}: {said.decode(errors='replace')}" if said else f"rank {rank} was lost ({_ending(code)})"
        with self._lock:
            if self._reason is not None or self._closing:
                return
            self._reason = reason
        log.error("%s", reason)
        self._lost.set()
        if self._on_lost is not None:
            self._on_lost(reason)

    def ready(self, device: torch.device) -> Ranks:
        """Joins the group. RanksError when a rank is lost before all have come."""
        store = meeting(self._store_fd, self._size)
        while not store.check([_here(rank) for rank in range(1, self._size)]):
            if self._lost.wait(POLL_SECONDS):
                raise RanksError(str(self._reason))
        group = join(0, self._size, device, store)
        return Ranks(group, Leader(self.sockets, self.reason))

    def reason(self) -> str | None:
        """Why a rank was lost, waiting a little for word of it: its end breaks a collective before it is understood."""
        self._lost.wait(LAST_WORDS_SECONDS)
        return self._reason

    def close(self) -> None:
        """Ends the other ranks."""
        with self._lock:
            self._closing = True
        for sock, process in zip(self.sockets, self.processes, strict=True):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            process.kill()
            process.wait()
            sock.close()
        os.close(self._store_fd)


def _here(rank: int) -> str:
    return f"here-{rank}"


def _ending(code: int | None) -> str:
    if code is None:
        return "it closed its socket"
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"
