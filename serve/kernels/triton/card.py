"""Which card a tensor is on, as the tile tables name it. Knows no kernels."""

from __future__ import annotations

import os
import re

import torch

INTERPRETED = 90
"""What a tensor outside CUDA counts as: under Triton's interpreter tiles matter for semantics only."""


def capability(device: torch.device) -> int:
    """Compute capability as a number (7.5 -> 75), or the one code is generated for when TRITON_OVERRIDE_ARCH names
    it."""
    override = re.fullmatch(r"sm(\d+)", os.environ.get("TRITON_OVERRIDE_ARCH", ""))
    if override is not None:
        return int(override.group(1))
    if device.type != "cuda":
        return INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
