"""Packing a matrix takes, beside its result, at most 0.3 GB of the device for a while: every format, scaled or not, at
the shapes of a model of 4 B parameters.

The device is torch's ``meta``, whose tensors have sizes and no bytes; its storages are counted while they live.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serve.kernels.formats import CARD_FORMATS
from serve.kernels.quantize import Factors
from serve.kernels.triton.linear import TritonLinearBuilder
from serve.kernels.triton.shift import gated_shift

META = torch.device("meta")
LIMIT = 300_000_000
SHAPES = {"qkv_proj": (6144, 2560), "gate_up_proj": (19456, 2560), "down_proj": (2560, 9728), "lm_head": (151936, 2560)}

HEADS = ("fp16", "bf16", "int8")
CASES = [
    (weights, matrix)
    for weights in CARD_FORMATS
    for matrix in SHAPES
    if weights != "fp32" and (matrix != "lm_head" or weights in HEADS)
]


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the meta storages that some tensor holds, now and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.device.type == "meta":
                self._hold(one)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not self._holders[key]:
            self.now += size
            self.most = max(self.most, self.now)
        self._holders[key] += 1
        weakref.finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            self.now -= size


@contextmanager
def living() -> Iterator[Living]:
    with Living() as mode:
        yield mode


def test_what_lives_is_counted() -> None:
    with living() as mode:
        one = torch.empty(1000, device=META)
        two = one.view(10, 100) + 1
        assert mode.now == 8000
        del one
        del two
        assert (mode.now, mode.most) == (0, 8000)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("weights", "matrix"), CASES)
def test_packing_takes_little_beside_its_result(weights: str, matrix: str, scaled: bool) -> None:
    rows, depth = SHAPES[matrix]
    weight = torch.zeros(1, 1, dtype=torch.bfloat16).expand(rows, depth)
    factors = Factors(torch.ones(rows), torch.ones(depth)) if scaled else None
    builder = TritonLinearBuilder(weights, META)
    with living() as mode:
        linear = builder.build(weight, factors=factors)
    assert mode.now == linear.nbytes
    assert mode.most - mode.now < LIMIT


def test_the_bound_of_the_gated_product_takes_as_little() -> None:
    """It is computed at load, from the packed matrix."""
    rows, depth = SHAPES["gate_up_proj"]
    packed = TritonLinearBuilder("int8", META).build(torch.zeros(1, 1).expand(rows, depth)).skinny.weight
    with living() as mode, pytest.raises((NotImplementedError, RuntimeError)):
        gated_shift(packed, None, torch.ones(depth, device=META))  # ends where it asks for a number
    assert 0 < mode.most < LIMIT
