"""Training state on disk, and the drafter folder others can load.

``step-00001234`` appears by one rename when all of it is flushed; ``latest`` names the newest. A killed run therefore
always finds a whole state. There is no random state to keep: what is random is a function of seed and step (see
``corpus``), so the step number is the data position. This file knows no training loop.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafter_train.tokens import write_atomically
from serve.drafter.dflash import DFlashModel, parameter_shapes


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Safetensors and torch have exceptions of their own for a full disk: here it is an OSError, as everywhere."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f"{folder} cannot be written: {str(error).splitlines()[0]}") from error


def _replace_folder(part: Path, final: Path) -> None:
    """Give ``part`` the name ``final``. What had that name is moved aside first: it is never seen half deleted."""
    _flush(part)
    aside = final.with_name(f".{final.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        os.replace(final, aside)
    os.replace(part, final)
    shutil.rmtree(aside, ignore_errors=True)


def save_checkpoint(
    folder: Path, model: DFlashModel, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any], keep: int
) -> Path:
    """Write ``folder/step-N`` for ``state["step"] == N``, point ``latest`` at it, and delete all but ``keep``.

    Nothing is written when ``latest`` is that step already (a run that was resumed and stopped at once).
    """
    name = f"step-{state['step']:08d}"
    pointer = folder / "latest"
    if pointer.exists() and pointer.read_text(encoding="utf-8").strip() == name:
        return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    for dead in (*folder.glob(".*.part"), *folder.glob(".step-*.old")):  # what killed runs left
        if dead.is_dir():
            shutil.rmtree(dead, ignore_errors=True)
        else:
            dead.unlink(missing_ok=True)
    part = folder / f".{name}.part"
    part.mkdir()
    with _writing(part):
        save_file({n: p.detach().contiguous().cpu() for n, p in model.named_parameters()}, part / "model.safetensors")
        torch.save([optimizer.state_dict() for optimizer in optimizers], part / "optimizer.pt")
    (part / "state.json").write_text(json.dumps(state), encoding="utf-8")
    _replace_folder(part, folder / name)
    write_atomically(pointer, name.encode())
    for old in sorted(folder.glob("step-*"))[:-keep]:
        if old.name != name:
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
    try:
        weights = load_file(place / "model.safetensors")
        saved = torch.load(place / "optimizer.pt", weights_only=True, map_location="cpu")
    except Exception as error:  # the readers have many kinds of error for a file that is not whole
        raise ValueError(
            f"{place} cannot be read ({next(iter(str(error).splitlines()), type(error).__name__)}): write the name of "
            f"an older step into {pointer}, or remove that to begin anew"
        ) from error
    model.load_state_dict(weights)
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
    with _writing(part):
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    for name, value in {"config.json": model.config.to_json(), **extra}.items():
        (part / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _replace_folder(part, folder)
