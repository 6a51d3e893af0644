"""How many processor cores this process may use, which is often less than the machine has.

A job of a cluster is bound to some of a node's cores, and a container has a quota of processor time. A thread for each
core of the machine then waits for the others at every barrier. It does not know what the threads do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUP_OF_PROCESS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def bound_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # a system that binds no process


def usable_cores(group_of_process: Path = _GROUP_OF_PROCESS, groups: Path = _GROUPS) -> int:
    """``bound_cores``, or the whole cores that the time quota of this process's control groups (version 2) is worth
    where that is less; at least 1."""
    return max(1, min([bound_cores(), *(int(quota) for quota in _quotas(group_of_process, groups))]))


def _quotas(group_of_process: Path, groups: Path) -> Iterator[float]:
    """The quota of its group and of those around it, in cores; nothing where there is none or none can be read."""
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        names = [line[3:] for line in group_of_process.read_text().splitlines() if line.startswith("0::")]
    for name in names or ["/"]:
        # A group outside of what a container sees of them is written with "..": what it sees is then all there is.
        inside = PurePosixPath("/") if ".." in name else PurePosixPath(name)
        for folder in (inside, *inside.parents):
            with contextlib.suppress(OSError, ValueError):
                time, _, period = (groups / str(folder).lstrip("/") / "cpu.max").read_text().partition(" ")
                if time != "max":
                    yield int(time) / max(1, int(period))
