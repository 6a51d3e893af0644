"""Linear layers in every weight format, all with one face: float32 rows in, float32 rows out, row by row the same bits.

On a CPU the fast ways are private torch operators, so each is probed on the real matrix and replaced by a plain product
with a fixed row count when it is missing or refuses the shape. This file knows formats, not what a matrix is for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.exact_int8 import exact_int8_op
from serve.kernels.native.grouped import GroupedProduct
from serve.kernels.native.ops import NativeLibrary
from serve.kernels.native.pack import GROUP as NATIVE_GROUP
from serve.kernels.quantize import GROUP, Factors, quantize_int4, quantize_int8
from serve.kernels.row_policy import RowOp, RowPolicy, find_row_policy

DENSE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Linear:
    """y = x W^T + b: x [T, in_features] float32 -> [T, out_features] float32.

    ``kind`` names the kernel in use; ``nbytes`` is what the weight occupies and so what one step reads.
    """

    def __init__(self, op: RowOp, policy: RowPolicy, kind: str, shape: tuple[int, int], nbytes: int) -> None:
        self.op = op
        self.policy = policy
        self._any_rows = policy == RowPolicy()
        self.kind = kind
        self.out_features, self.in_features = shape
        self.nbytes = nbytes

    def __call__(self, x: Tensor) -> Tensor:
        # The common case without a detour: a decode step makes a hundred of these calls.
        return self.op(x) if self._any_rows else self.policy.apply(self.op, x)


def _packed_fp32(weight: Tensor, bias: Tensor | None) -> tuple[RowOp, str, int]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous())
    product = torch.ops.mkldnn._linear_pointwise.default

    def op(x: Tensor) -> Tensor:
        result: Tensor = product(x, packed, bias, "none", [], "")
        return result

    return op, "fp32 packed (oneDNN)", weight.numel() * 4


def _exact_int8(weight: Tensor, bias: Tensor | None) -> tuple[RowOp, str, int]:
    op = exact_int8_op(weight, bias)
    return op, f"int8 weights, {2 * op.bits}-bit activations, integer sums", weight.numel()


def _int8(weight: Tensor, bias: Tensor | None) -> tuple[RowOp, str, int]:
    codes, scale = quantize_int8(weight)
    scale = scale.bfloat16()
    product = torch.ops.aten._weight_int8pack_mm.default

    def op(x: Tensor) -> Tensor:
        y: Tensor = product(x.bfloat16(), codes, scale).float()
        return y if bias is None else y.add_(bias)

    return op, "int8 weights, bf16 activations", codes.numel()


def _int4(weight: Tensor, bias: Tensor | None) -> tuple[RowOp, str, int]:
    codes, scale_and_zero = quantize_int4(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def op(x: Tensor) -> Tensor:
        y: Tensor = product(x.bfloat16(), packed, GROUP, scale_and_zero).float()
        return y if bias is None else y.add_(bias)

    return op, f"int4 weights in groups of {GROUP}, bf16 activations", packed.numel() + scale_and_zero.numel() * 2


def _dense(weight: Tensor, bias: Tensor | None) -> tuple[RowOp, str, int]:
    dtype = weight.dtype
    bias = None if bias is None else bias.to(dtype)

    def op(x: Tensor) -> Tensor:
        return F.linear(x.to(dtype), weight, bias).float()

    return op, f"{str(dtype).removeprefix('torch.')} dense", weight.numel() * dtype.itemsize


def _grouped(library: NativeLibrary, weight: Tensor, bias: Tensor | None, bits: int) -> tuple[RowOp, str, int]:
    op = GroupedProduct(library, weight, bias, bits)
    return op, f"int{bits} weights in groups of {NATIVE_GROUP}, 16-bit activations, in C", op.nbytes


_Kernel = Callable[[Tensor, Tensor | None], tuple[RowOp, str, int]]
# Ways to serve a format on a CPU; the first that this torch, this host and the matrix's shape allow is used.
_CPU_KERNELS: dict[str, tuple[_Kernel, ...]] = {
    "fp32": (_packed_fp32,),
    "int8": (_exact_int8, _int8, _packed_fp32),
    "int4": (_int4, _packed_fp32),
}

_NATIVE_BITS = {"int8": 8, "int4": 4}


class LinearBuilder:
    """Makes Linear layers of one weight format on one device, remembering the row policy of each shape it has tried."""

    packs_for: tuple[object, ...] = ()
    """What the packed bytes of a matrix follow from beside the matrix and its format."""
    gives_rows = False
    """Whether single rows of its matrices can be looked up, so that a tied embedding needs no table of its own."""

    def __init__(self, weights: str, device: torch.device, native: NativeLibrary | None = None) -> None:
        """native: the C layers' library, which then runs the integer formats of a CPU."""
        self.weights = weights
        self.device = device
        self._native = native
        self._policies: dict[tuple[Any, ...], RowPolicy] = {}
        self.kinds: dict[str, RowPolicy] = {}

    def build(
        self, weight: Tensor, bias: Tensor | None = None, weights: str | None = None, factors: Factors | None = None
    ) -> Linear:
        """weight [N, K] (any float dtype, on the CPU), bias [N] or None, in this builder's format or in ``weights``;
        factors: applied to the weight first."""
        weight = weight if factors is None else factors.applied(weight)
        shape = (weight.shape[0], weight.shape[1])
        weights = self.weights if weights is None else weights
        bias = None if bias is None else bias.float().contiguous()
        if self.device.type != "cpu":
            dense = weight.to(self.device, DENSE_DTYPES[weights])
            op, kind, nbytes = _dense(dense, None if bias is None else bias.to(self.device))
            return self._finish(op, RowPolicy(), kind, shape, nbytes)
        for kernel in self._kernels(weights):
            made = _probe(kernel, weight, bias)
            if made is not None:
                op, kind, nbytes = made
                return self._finish(op, self._policy(op, kind, shape, bias is not None), kind, shape, nbytes)
        op, kind, nbytes = _dense(weight.float().contiguous(), bias)
        return self._finish(op, self._policy(op, kind, shape, bias is not None), kind, shape, nbytes)

    def build_packed(self, packed: Any, bias: Tensor | None = None) -> Linear:
        """A matrix that is packed already. Raises TypeError: only the Triton kernels' matrices are kept in files."""
        raise TypeError("matrices of this device are not kept packed")

    def _kernels(self, weights: str) -> tuple[_Kernel, ...]:
        if self._native is None or weights not in _NATIVE_BITS:
            return _CPU_KERNELS[weights]
        return partial(_grouped, self._native, bits=_NATIVE_BITS[weights]), *_CPU_KERNELS[weights]

    def describe(self) -> str:
        """The kernels in use, each with the strictest row policy of its shapes."""
        return ", ".join(f"{kind} ({policy.describe()})" for kind, policy in self.kinds.items())

    def _policy(self, op: RowOp, kind: str, shape: tuple[int, int], has_bias: bool) -> RowPolicy:
        key = (kind, shape, has_bias)
        if key not in self._policies:
            self._policies[key] = find_row_policy(op, shape[1])
        return self._policies[key]

    def _finish(self, op: RowOp, policy: RowPolicy, kind: str, shape: tuple[int, int], nbytes: int) -> Linear:
        seen = self.kinds.get(kind, policy)
        self.kinds[kind] = max(seen, policy, key=lambda one: (one.fixed, one.floor))
        return Linear(op, policy, kind, shape, nbytes)


def _probe(kernel: _Kernel, weight: Tensor, bias: Tensor | None) -> tuple[RowOp, str, int] | None:
    """The kernel on this matrix, or None when this torch lacks the operator or it refuses the shape."""
    if not _fits(kernel, weight):
        return None
    try:
        made = kernel(weight, bias)
        made[0](torch.zeros(1, weight.shape[1]))
    except (RuntimeError, AttributeError, NotImplementedError, ValueError):
        return None
    return made


def _fits(kernel: _Kernel, weight: Tensor) -> bool:
    """What the operators take but do not always check."""
    if kernel is _int4:
        return weight.shape[0] % 16 == 0 and weight.shape[1] % GROUP == 0
    if kernel is _int8:
        return weight.shape[0] % 16 == 0 and weight.shape[1] % 32 == 0
    return True
