"""Training state on disk, and the drafter folder others can load.

``step-00001234`` appears by one rename when all of it is flushed; ``latest`` names the newest. A killed run therefore
always finds a whole state. There is no random state to keep: what is random is a function of seed and step (see
``corpus``), so the step number is the data position. This file knows no training loop.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafter_train.tokens import write_atomically
from serve.drafter.dflash import DFlashModel, parameter_shapes


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _replace_folder(part: Path, final: Path) -> None:
    _flush(part)
    if final.exists():
        shutil.rmtree(final)
    os.replace(part, final)


def save_checkpoint(
    folder: Path, model: DFlashModel, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any], keep: int
) -> Path:
    """Write ``folder/step-N`` for ``state["step"] == N``, point ``latest`` at it, and delete all but ``keep``."""
    name = f"step-{state['step']:08d}"
    part = folder / f".{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file({n: p.detach().contiguous().cpu() for n, p in model.named_parameters()}, part / "model.safetensors")
    torch.save([optimizer.state_dict() for optimizer in optimizers], part / "optimizer.pt")
    (part / "state.json").write_text(json.dumps(state), encoding="utf-8")
    _replace_folder(part, folder / name)
    write_atomically(folder / "latest", name.encode())
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder / name


def load_checkpoint(
    folder: Path, model: DFlashModel, optimizers: Sequence[torch.optim.Optimizer], recipe_sha256: str
) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint, or None without one. Raises ValueError when another recipe made it."""
    pointer = folder / "latest"
    if not pointer.exists():
        return None
    place = folder / pointer.read_text(encoding="utf-8").strip()
    state: dict[str, Any] = json.loads((place / "state.json").read_text(encoding="utf-8"))
    if state["recipe_sha256"] != recipe_sha256:
        raise ValueError(f"{place} was made by another recipe; use another train.output or remove that folder")
    model.load_state_dict(load_file(place / "model.safetensors"))
    saved = torch.load(place / "optimizer.pt", weights_only=True, map_location="cpu")
    for optimizer, entry in zip(optimizers, saved, strict=True):
        optimizer.load_state_dict(entry)
    return state


def export_drafter(folder: Path, model: DFlashModel, extra: dict[str, Any]) -> None:
    """Write a drafter folder in DFlash layout: bf16 safetensors, config.json, and ``extra`` JSON files by name."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    parameters = dict(model.named_parameters())
    tensors = {n: parameters[n].detach().to(torch.bfloat16).contiguous().cpu() for n in parameter_shapes(model.config)}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    for name, value in {"config.json": model.config.to_json(), **extra}.items():
        (part / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _replace_folder(part, folder)
