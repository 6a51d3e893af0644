"""Compiles one kernel variant ahead of time for a named card: no GPU, no driver, no tensors, no torch.

What a launch would specialise (pointers of 16-byte alignment, sizes that are multiples of 16) is stated as
attributes, so the code is what the launch compiles. Works on Triton 3.2 to 3.9, whose source objects differ.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.kernels.triton.tiles import MAX_REGISTERS

_INSTRUCTION = re.compile(
    r"\b(?:wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)|mma\.sync\.aligned\.(?:\w+\.)*?(m\d+n\d+k\d+))\b"
)


@dataclass(frozen=True)
class Variant:
    """One compilation of one kernel: signature maps arguments to Triton types ('*fp16', 'i32', 'fp32'), constants the
    rest; layouts: the capability whose register layouts to use, 0 for the target's own."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    dots: bool
    layouts: int = 0
    registers: int = MAX_REGISTERS


@dataclass(frozen=True)
class Compiled:
    """What came out. spilled: bytes of stack a thread needs. mma: tensor-core shapes in the PTX, '-' for none."""

    ptx: str
    registers: int
    spilled: int
    shared: int
    mma: str


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compiles for one compute capability (75, 80, 90). Raises whatever the compiler raises."""
    built = _build(variant, capability)
    ptx = built.asm["ptx"]
    registers, stack = _resources(built.asm["cubin"])
    return Compiled(ptx, registers, stack, built.metadata.shared, mma_shapes(ptx))


def compile_ptx(variant: Variant, capability: int) -> str:
    """The PTX alone, which needs no disassembler."""
    ptx: str = _build(variant, capability).asm["ptx"]
    return ptx


def mma_shapes(ptx: str) -> str:
    """'32x m16n8k8' and the like; several joined by a space."""
    found = Counter(wide or narrow for wide, narrow in _INSTRUCTION.findall(ptx))
    return " ".join(f"{count}x{shape}" for shape, count in sorted(found.items())) or "-"


def _build(variant: Variant, capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    options: dict[str, Any] = {"num_warps": variant.warps, "num_stages": variant.stages, "maxnreg": variant.registers}
    if variant.layouts:
        options["arch"] = f"sm{variant.layouts}"
    return triton.compile(_source(variant), target=GPUTarget("cuda", capability, 32), options=options)


def _source(variant: Variant) -> Any:
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    aligned = [i for i, name in enumerate(names) if _aligned(variant, name)]
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    try:
        return ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=attributes)
    except TypeError:  # up to Triton 3.2
        from triton.backends.compiler import AttrsDescriptor

        typed = {name: kind for name, kind in signature.items() if kind != "constexpr"}
        hints = AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16))
        return ASTSource(fn=variant.kernel, signature=typed, constants=dict(variant.constants), attrs=hints)


def _aligned(variant: Variant, name: str) -> bool:
    kind = variant.signature.get(name, "")
    return kind.startswith("*") or (kind == "i32" and name not in UNALIGNED)


UNALIGNED = ("rows", "spans", "splits", "split_tiles", "tiles", "row_tiles", "table_stride", "end", "positions")
"""Sizes a launch may not assume to be multiples of 16."""


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and stack bytes, read by the disassembler that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resources: {text[-200:]!r}")
    return int(found.group(1)), int(found.group(2))
