"""Tensor cores for ``tl.dot`` on Turing (compute capability 7.5), and the self-test that says whether they are used.

Triton from 3.3 on still *lowers* a version 2.1 MMA layout to Turing's m16n8k8, but no longer *chooses* it: dots become
float32 FMAs, right and many times too slow, without a word. So for capability 75 only, the layout passes run as for 80
with one stage (no asynchronous copies), the module's text is turned from 2.0 to 2.1 and from 80 to 75, and compilation
goes on for 75. This leans on private hooks; hence the self-test, on whose "no" the caller must use library kernels.

``TRITON_OVERRIDE_ARCH=sm75`` makes a newer card run this code: layouts are then Turing's, machine code is the card's.
Knows no kernels of this project. Triton is imported when a function is called, not before.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from dataclasses import dataclass
from typing import Any

TURING = 75
TAG = "turing-mma-1"
INSTRUCTION = "m16n8k8"


@dataclass(frozen=True)
class SelfTest:
    """ok: dots of this card run on tensor cores. line: one sentence for the log."""

    ok: bool
    line: str


def install() -> None:
    """Patches the compiler for capability 75. Call before the first launch; a second call and Triton 3.2 change
    nothing."""
    from triton.backends.nvidia.compiler import CUDABackend

    if _native() or getattr(CUDABackend, "turing_tag", None) == TAG:
        return
    make_ttgir, backend_hash = CUDABackend.make_ttgir, CUDABackend.hash

    def patched(mod: Any, metadata: Any, opt: Any, capability: int) -> Any:
        if capability != TURING or "tt.dot " not in str(mod):
            return make_ttgir(mod, metadata, opt, capability)
        return _to_turing(make_ttgir(mod, metadata, dataclasses.replace(opt, num_stages=1), 80))

    def tagged(self: Any) -> str:
        # Keeps code compiled with and without the patch apart in Triton's cache.
        return f"{backend_hash(self)}-{TAG}"

    CUDABackend.make_ttgir = staticmethod(patched)
    CUDABackend.hash = tagged
    CUDABackend.turing_tag = TAG


def self_test(capability: int) -> SelfTest:
    """Compiles one dot for the card (no launch, no driver) and looks for its tensor-core instruction."""
    if capability > TURING:
        return SelfTest(True, f"triton kernels: tensor cores native on sm_{capability}")
    if capability < TURING:
        return SelfTest(False, f"triton kernels off: sm_{capability} is older than sm_75; using cuBLAS and SDPA")
    try:
        install()
        ptx = _probe_ptx()
    except Exception as error:  # a private hook may break in any way; the answer is the same
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return SelfTest(
            False, f"triton kernels off: the sm_75 probe failed ({reason[-1][:200]}); using cuBLAS and SDPA"
        )
    if INSTRUCTION not in ptx:
        return SelfTest(False, f"triton kernels off: no {INSTRUCTION} in the sm_75 probe; using cuBLAS and SDPA")
    return SelfTest(
        True, f"triton kernels: tensor cores on sm_75 ({ptx.count(INSTRUCTION)} {INSTRUCTION} in the probe)"
    )


def _native() -> bool:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 3)


def _to_turing(mod: Any) -> Any:
    """The module with Turing's MMA layout and target in place of Ampere's. Raises TypeError for dots that have
    none."""
    from triton._C.libtriton import ir

    text = str(mod)
    for line in text.splitlines():
        if "tt.dot " in line and ("xbf16" in line or (line.count("xf32") > 2 and "xf16" not in line)):
            raise TypeError(f"this dot has no tensor-core form on sm_75: {line.strip()[:200]}")
    text = text.replace("versionMajor = 2, versionMinor = 0", "versionMajor = 2, versionMinor = 1")
    text = text.replace('"cuda:80"', f'"cuda:{TURING}"')
    context = mod.context
    handle, path = tempfile.mkstemp(suffix=".ttgir")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        turned = ir.parse_mlir_module(path, context)
    finally:
        os.unlink(path)
    turned.context = context
    return turned


def _probe_ptx() -> str:
    from serve.kernels.triton.ahead import compile_ptx
    from serve.kernels.triton.variants import probe

    return compile_ptx(probe(), TURING)
