"""Weight formats by name: how many bits a code has and how many neighbours share a scale. Knows names and bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

INT4_GROUP = 64
"""Of a format that is called just int4."""
HOST_FORMATS = ("fp32", "int8", "int4")
"""No 16-bit formats on a CPU: their rounded sums hide from the start-up trial that a row depends on its batch. How the
host groups its codes is its own affair."""
CARD_FORMATS = ("fp16", "bf16", "fp32", "int8", "int8-g128", "int4", "int4-g32", "int4-g64", "int4-g128")


@dataclass(frozen=True)
class StoredFormat:
    """bits of a code (of a float: 32 or 16); group: neighbours in a row that share a scale, 0 for the whole row."""

    bits: int
    group: int = 0

    @property
    def integer(self) -> bool:
        return self.bits <= 8


def stored_format(name: str) -> StoredFormat:
    """What a format's name says; ``int4`` is int4-g64. Raises ValueError for another name."""
    match = re.fullmatch(r"(int8|int4)(?:-g(32|64|128))?|fp32|fp16|bf16", name)
    if match is None:
        raise ValueError(f"no weight format {name!r}")
    if match[1] is None:
        return StoredFormat(32 if name == "fp32" else 16)
    bits = int(match[1].removeprefix("int"))
    return StoredFormat(bits, int(match[2]) if match[2] else INT4_GROUP if bits == 4 else 0)


def stored_bytes(name: str, rows: int, depth: int) -> int:
    """Bytes of a matrix [rows, depth] as the GPU kernels store it: codes, and four bytes for each scale. int4 falls to
    smaller groups, then to int8, where the depth is no multiple."""
    form = fitting(stored_format(name), depth)
    scales = rows * (depth // form.group if form.group else 1) if form.integer else 0
    return rows * depth * form.bits // 8 + 4 * scales


def fitting(form: StoredFormat, depth: int) -> StoredFormat:
    """The format a matrix of this depth gets: groups that divide it, else smaller ones, else int8 with a scale a
    row."""
    if not form.group or (form.bits == 8 and depth % form.group == 0):
        return form
    if form.bits == 8 or depth % 64:
        return StoredFormat(8)
    return form if depth % form.group == 0 else StoredFormat(4, 64 if form.group > 64 else 32)
