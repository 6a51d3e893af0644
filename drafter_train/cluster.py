"""The processes of one run: who am I, sums over all of us, and waiting that no collective time limit can end.

Accelerate starts the process group (one or many nodes, CPU or GPU). Gradients are summed here by hand, weighted by what
each process really had, so a process without sequences in a short last batch joins with zeros and nobody hangs.
"""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Cluster:
    """Wraps an ``accelerate.Accelerator``; with one process every method is free."""

    def __init__(self, trackers: tuple[str, ...] = (), project_dir: str = ".", device: str | None = None) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        self.accelerator: Any = Accelerator(
            cpu=device == "cpu",
            log_with=list(trackers) or None,
            project_config=ProjectConfiguration(project_dir=project_dir),
        )
        self.rank: int = self.accelerator.process_index
        self.world: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device
        # Waiting for rank 0 to save or evaluate must outlast the collectives' own time limit.
        self._patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=2)) if self.world > 1 else None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_(self, tensors: list[Tensor]) -> None:
        """Add up same-typed tensors over all processes, in place, in one collective."""
        if self.world == 1:
            return
        if len(tensors) == 1:
            dist.all_reduce(tensors[0])
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def agree(self, progress: float, save: bool, stop: bool) -> tuple[float, bool, bool]:
        """Rank 0's progress and its wish to save, and whether any process was asked to stop."""
        if self.world == 1:
            return progress, save, stop
        mine = [progress, float(save)] if self.is_main else [0.0, 0.0]
        values = torch.tensor([*mine, float(stop)], dtype=torch.float64)
        dist.all_reduce(values, group=self._patient)
        return float(values[0]), bool(values[1] > 0), bool(values[2] > 0)

    def odd_ones(self, what: str) -> list[int]:
        """The processes whose ``what`` is not that of process 0; the same list in each of them."""
        if self.world == 1:
            return []
        mine = torch.tensor(list(hashlib.sha256(what.encode()).digest()), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine, group=self._patient)
        return [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]

    def wait(self) -> None:
        """Until every process is here."""
        if self._patient is not None:
            dist.barrier(group=self._patient)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
