"""Which card a tensor is on, as the tile tables name it. Knows no kernels."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import torch

from serve.kernels.triton.tiles import MAX_REGISTERS, dependent_launch

INTERPRETED = 90
"""What a tensor outside CUDA counts as: under Triton's interpreter tiles matter for semantics only."""


def capability(device: torch.device) -> int:
    """Compute capability as a number (7.5 -> 75), or the one code is generated for when TRITON_OVERRIDE_ARCH names
    it."""
    named = os.environ.get("TRITON_OVERRIDE_ARCH")
    override = re.fullmatch(r"sm(\d+)", named) if named else None
    if override is not None:
        return int(override.group(1))
    if device.type != "cuda":
        return INTERPRETED
    return _capability(device)


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def launch_options(
    device: torch.device, warps: int, stages: int = 1, layouts: int = 0, registers: int = MAX_REGISTERS
) -> dict[str, Any]:
    """Keyword arguments every launch ends with. PDL: the kernel may start before the one ahead of it ends, and waits.
    layouts: the capability whose register layouts to use, 0 for the card's own. Not to be changed: made once."""
    cuda = device.type == "cuda"
    return _options(cuda, cuda and dependent_launch(capability(device)), warps, stages, layouts, registers)


@cache
def _options(cuda: bool, dependent: bool, warps: int, stages: int, layouts: int, registers: int) -> dict[str, Any]:
    early = dependent and _knows("launch_pdl")
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "PDL": early}
    if early:
        options["launch_pdl"] = True
    if layouts and cuda and _knows("arch"):
        options["arch"] = f"sm{layouts}"
    return options


@cache
def _knows(option: str) -> bool:
    """Whether this Triton has the launch option (dependent launch: from 3.4 on)."""
    from triton.backends.nvidia.compiler import CUDAOptions

    return option in CUDAOptions.__dataclass_fields__
