"""layer.c from Python: its structures, its functions, and the threads that torch's OpenMP runtime lends it.

Calls release the GIL. Pointers are taken from contiguous CPU tensors whose owner keeps them alive for the call;
``pointer`` checks that once. Knows the ABI, not the order of a forward.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve.kernels.native.build import Built, NativeUnavailable

TILE_ROWS = 8  # query rows that share one pass over K and V; bounds the memory for scores
_INT, _PTR = ctypes.c_int64, ctypes.c_void_p
_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class Matrix(ctypes.Structure):
    """See step.h. ``bias`` may be None."""

    _fields_ = [
        *((name, _PTR) for name in ("data", "bias")),
        *((name, _INT) for name in ("outputs", "width", "bits")),
        ("unit", ctypes.c_double),
    ]


class Step(ctypes.Structure):
    """What all layers of one step share; see step.h."""

    _fields_ = [
        *((name, _INT) for name in ("rows", "hidden", "inner", "heads", "kv_heads", "head_dim", "page_size")),
        *((name, _INT) for name in ("tiles", "threads", "halves")),
        ("eps", ctypes.c_double),
        *((name, _PTR) for name in ("fork", "x", "codes", "sums", "scale", "y", "q", "mixed", "turns", "positions")),
        *((name, _PTR) for name in ("slots", "visible", "tile", "tables")),
    ]


class Layer(ctypes.Structure):
    """One layer's vectors (qk_norm may be None) and matrices."""

    _fields_ = [
        *((name, _PTR) for name in ("input_norm", "mlp_norm", "qk_norm")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
    ]


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "layers_forward": (_PTR, _PTR, _INT, _PTR, _PTR),
    "head_forward": (_PTR, _PTR, _PTR),
    "best_forward": (_PTR, _PTR, _PTR, _PTR),
    "context_forward": (_PTR, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR),
    "matrix_forward": (_PTR, _PTR),
}


class NativeLibrary:
    """The functions of layer.c. Each returns nothing and raises MemoryError when its scratch memory is refused."""

    def __init__(self, built: Built) -> None:
        """Raises NativeUnavailable when the file does not load."""
        try:
            self._library = ctypes.CDLL(str(built.library))
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
                function.errcheck = _check
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"{built.library.name} does not load: {error}") from error
        self.compiler = built.compiler
        self.fork = _fork()
        self.layers = self._library.layers_forward
        self.head = self._library.head_forward
        self.best = self._library.best_forward
        self.context = self._library.context_forward
        self.matrix = self._library.matrix_forward


class Operand:
    """The memory that a product's rows are split into, for up to ``rows`` rows of up to ``width`` numbers, as codes of
    16 bits (two ``halves``) or of 8."""

    def __init__(self, rows: int, width: int, halves: int = 2) -> None:
        groups = rows * width // 32
        self.halves = halves
        self.codes = torch.empty(halves * rows * width, dtype=torch.int8)
        self.sums = torch.empty(groups)
        self.scale = torch.empty(rows if halves == 2 else groups)

    def fill(self, step: Step) -> None:
        """Makes the step point here."""
        step.halves = self.halves
        step.codes = pointer(self.codes, torch.int8)
        step.sums, step.scale = pointer(self.sums), pointer(self.scale)


def pointers(tensors: Sequence[Tensor | None]) -> Any:
    """An array of the float32 tensors' addresses."""
    return (_PTR * len(tensors))(*map(pointer, tensors))


def _check(result: int, function: object, arguments: object) -> None:
    if result:
        raise MemoryError("no memory for the native layer's scratch space")


def _fork() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded (Intel's and LLVM's have it too), or None:
    then all work stays on the calling thread."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/" in line}
    loaded = [path for path in paths if os.path.basename(path).startswith(_RUNTIMES)]
    home = str(Path(torch.__file__).resolve().parent.parent / "torch")
    loaded.sort(key=lambda path: (not path.startswith(home), path))
    for path in loaded:
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def pointer(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """The address of a contiguous CPU tensor of ``dtype``; None for None. Raises ValueError for any other tensor."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"need a contiguous {dtype} tensor on the CPU, got {tensor.dtype} on {tensor.device}")
    return tensor.data_ptr()
