"""What an engine's heap may grow to is taken at the start, not step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from serve.engine.memory import hold_heap

ROOT = Path(__file__).parents[3]
SIZE = 8 << 20
# What steps that want several blocks at once add to the resident memory, in MiB, with a held heap and without.
PROGRAM = """
import os, re, sys, torch
from serve.engine.memory import HELD_BLOCKS, hold_heap
torch.zeros(1 << 20, dtype=torch.uint8)
def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
if sys.argv[1] == "held":
    hold_heap(os.environ)
before = resident()
for count in range(1, HELD_BLOCKS):
    blocks = [torch.zeros(7 << 20, dtype=torch.uint8) for _ in range(count)]
    del blocks
print((resident() - before) >> 20)
"""


def test_nothing_is_held_where_malloc_decides_for_itself() -> None:
    assert hold_heap({}) == 0


def test_large_steps_find_their_memory_in_what_was_held() -> None:
    def growth(how: str) -> int:
        malloc = {"MALLOC_MMAP_THRESHOLD_": str(SIZE), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, how],
            cwd=ROOT,
            env={**os.environ, **malloc},
            capture_output=True,
            check=True,
        )
        return int(ran.stdout)

    # Small things that stay split what was given back, so a few blocks may still miss: what is held is no exact fit.
    assert growth("held") < growth("not held") / 2
