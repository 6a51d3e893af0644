"""Where a Triton kernel is tried: small in the interpreter on the CPU, at real shapes on a card (marker ``gpu``)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """A device and the 16-bit dtype of the kernels there."""

    device: torch.device
    dtype: torch.dtype

    @property
    def real(self) -> bool:
        """True on a card, where shapes are real ones."""
        return self.device.type == "cuda"

    def randn(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape) + len(shape))
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(self.device, dtype or self.dtype)


INTERPRETER = pytest.param(("cpu", torch.float16), id="interpreter")


def _cards() -> list[object]:
    """Turing has no bfloat16 dots, so its code is tried in float16 only. The interpreter's bfloat16 dots are wrong."""
    turing = os.environ.get("TRITON_OVERRIDE_ARCH") == "sm75"
    dtypes = (torch.float16,) if turing else (torch.float16, torch.bfloat16)
    return [pytest.param(("cuda", dtype), marks=pytest.mark.gpu, id=f"card-{dtype}") for dtype in dtypes]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every kernel test runs in the interpreter and on a card; one marked ``gpu`` as a whole is for the card alone. A
    module's LEAST_CARD is the capability that its kernels need."""
    if "place" in metafunc.fixturenames:
        card_only = metafunc.definition.get_closest_marker("gpu") is not None
        arch = int(os.environ.get("TRITON_OVERRIDE_ARCH", "sm90").removeprefix("sm"))
        cards = _cards() if arch >= getattr(metafunc.module, "LEAST_CARD", 0) else []
        metafunc.parametrize("place", cards if card_only else [INTERPRETER, *cards], indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    device, dtype = request.param
    if device == "cuda":
        from serve.kernels.triton import turing

        turing.install()
    return Place(torch.device(device), dtype)


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; not a number never passes a comparison."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm())


@pytest.fixture
def relative_error() -> object:
    return error
