"""How the device's memory is spent, part by part, as one block of the log; and the host's, held from the start.

Knows no models: it reads the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

RESERVE = 0.03
"""Part of the device's memory that stays free: what libraries take later, and fragments."""
MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
"""What glibc reads from the environment: larger blocks go back to the system when they are freed, smaller ones stay."""
HELD_BLOCKS = 4
"""Blocks just below that size which a step may hold at once: logits of the target or the drafter, a copy, activations,
and what lies between them."""


def hold_heap(environment: Mapping[str, str]) -> int:
    """Take from the system now what steps would take from it one unusually large step at a time, and hand it to malloc,
    which keeps it. Returns the bytes; 0 where no threshold is set, and malloc decides for itself."""
    size = int(environment.get(MMAP_THRESHOLD, 0)) // 2  # well below it: malloc's own bytes count too
    if size <= 0:
        return 0
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    # One after the other, with nothing in between that would keep them apart once they are free.
    blocks = [ctypes.c_void_p(library.malloc(ctypes.c_size_t(size))) for _ in range(2 * HELD_BLOCKS)]
    taken = [block for block in blocks if block]
    for block in taken:
        ctypes.memset(block, 1, size)
    for block in taken:
        library.free(block)
    return size * len(taken)


@dataclass
class MemorySpent:
    """Notes what each part took since the note before. On a CPU everything is zero and nothing is said."""

    device: torch.device
    parts: dict[str, tuple[int, str]] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    _used: int = 0

    def __post_init__(self) -> None:
        self.note("before", "the driver's part, and other processes")

    def note(self, name: str, remark: str = "") -> None:
        """``name`` took what has gone since the last note."""
        if self.device.type == "cuda":
            free, total = self._free()
            self.parts[name] = (total - free - self._used, remark)
            self._used = total - free
            self.reserved.pop(name, None)

    def note_weights(self, copies: int = 0) -> None:
        """As ``note``, with what loading took for a while beyond the weights themselves. copies: bytes of them that
        are second copies for prompts, which have a line of their own."""
        if self.device.type == "cuda":
            extra = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
            self.note("weights", f"{_gib(extra)} more while they were loaded")
            if copies:
                size, remark = self.parts["weights"]
                self.parts["weights"] = (size - copies, remark)
                self.parts["copies"] = (copies, "of matrices, in fp8 for prompts")

    def reserve(self, name: str, nbytes: int) -> None:
        """``name`` will take ``nbytes`` later: they are kept out of ``room``. A note of that name ends it."""
        self.reserved[name] = nbytes

    def room(self) -> int:
        """Bytes that are free now and promised to nobody."""
        free, total = self._free()
        return max(0, free - sum(self.reserved.values()) - int(RESERVE * total))

    def _free(self) -> tuple[int, int]:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return free, total

    def describe(self) -> str:
        """One line a part, each beginning with "memory"; one line where there is nothing to say."""
        if self.device.type != "cuda":
            return "memory: pages are taken from the host as they are written"
        free, total = self._free()
        kept = [f"memory {name}: {_gib(size)} kept free" for name, size in self.reserved.items()]
        parts = [
            f"memory {name}: {_gib(size)}{f' ({remark})' if remark else ''}"
            for name, (size, remark) in self.parts.items()
        ]
        return "\n".join([f"memory total: {_gib(total)}", *parts, *kept, f"memory free: {_gib(free)}"])

    def to_json(self) -> dict[str, int]:
        return {name: size for name, (size, _) in self.parts.items()} | {
            f"{name}_reserved": size for name, size in self.reserved.items()
        }


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
