"""layer.c from Python: its structures, its functions, and the threads that torch's OpenMP runtime lends it.

Calls release the GIL. Pointers are taken from contiguous float32 and int64 CPU tensors whose owner keeps them alive for
the call; ``pointer`` checks that once. Knows the ABI, not the order of a forward.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import Tensor

from serve.kernels.native.build import Built, NativeUnavailable

TILE_ROWS = 8  # query rows that share one pass over K and V; bounds the memory for scores
_INT, _PTR = ctypes.c_int64, ctypes.c_void_p
_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class Step(ctypes.Structure):
    """What all layers of one step share; see layer.c."""

    _fields_ = [
        *((name, _INT) for name in ("rows", "hidden", "inner", "heads", "kv_heads", "head_dim", "page_size")),
        *((name, _INT) for name in ("tiles", "threads", "wide_attention")),
        ("eps", ctypes.c_double),
        *((name, _PTR) for name in ("fork", "x", "halves", "peak", "q", "mixed", "turns", "positions", "slots")),
        *((name, _PTR) for name in ("visible", "tile", "tables")),
    ]


class Layer(ctypes.Structure):
    """One layer's vectors (bias and norm pointers may be None) and the bits of each matrix's halves."""

    _fields_ = [
        *((name, _PTR) for name in ("input_norm", "mlp_norm", "qk_norm", "qkv_bias", "output_bias")),
        *((name, _PTR) for name in ("gate_up_bias", "down_bias")),
        *((name, _INT) for name in ("qkv_bits", "output_bits", "gate_up_bits", "down_bits")),
    ]


_FUNCTIONS = {
    "layer_open": (_PTR, _PTR, _PTR, _PTR),
    "layer_attend": (_PTR, _PTR, _PTR, _PTR),
    "layer_middle": (_PTR, _PTR, _PTR),
    "layer_gate": (_PTR, _PTR, _PTR),
    "layer_close": (_PTR, _PTR, _PTR),
    "head_open": (_PTR, _PTR, _INT),
    "head_close": (_PTR, _PTR, _PTR, _INT, _INT),
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
        self.open = self._library.layer_open
        self.attend = self._library.layer_attend
        self.middle = self._library.layer_middle
        self.gate = self._library.layer_gate
        self.close = self._library.layer_close
        self.head_open = self._library.head_open
        self.head_close = self._library.head_close


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
