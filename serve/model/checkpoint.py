"""Tensors of a safetensors checkpoint by name, single file or sharded, read one at a time from a memory map.

Knows files, names and shapes; not what a tensor means to a model.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve.json_file import shown
from serve.model.config import read_json
from serve.model.errors import ModelError
from serve.parallel.split import Part

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """Open with ``with``. ``take`` checks shape and finiteness; ``untaken`` lists what nobody asked for."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = Path(model_dir)
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        self._taken: set[str] = set()

    def __enter__(self) -> Checkpoint:
        try:
            for file, promised in weight_files(self.model_dir).items():
                self._open(file, promised)
        except OSError as error:
            self._stack.close()
            raise ModelError(f"{self.model_dir} cannot be read: {error.strerror or error}") from None
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, file: str, promised: set[str]) -> None:
        path = self.model_dir / file
        if not path.is_file():
            raise ModelError(f"{path} is missing or not a file, but {INDEX} names it")
        try:
            opened = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            names = set(opened.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}") from None
        if promised - names:
            raise ModelError(f"{path} lacks tensor {min(promised - names)}, which {INDEX} says it holds")
        for name in names:
            if name in self._where:
                raise ModelError(f"tensor {name} is in more than one file, {file} among them")
            self._where[name] = opened

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """The tensor of this shape, or the part of it that is all that is read, in its stored dtype. Raises ModelError
        naming it and both shapes, or for a bad value."""
        try:
            stored = self._shaped(name, shape)
            tensor: Tensor = self._where[name].get_tensor(name) if part is None else _sliced(stored, part)
        except ModelError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"tensor {name} cannot be read: {error}") from None
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ModelError(f"tensor {name} has dtype {tensor.dtype}; float32, float16 and bfloat16 are served")
        # A sum over finite 16- or 32-bit weights is finite in float64; one NaN or inf spoils it.
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise ModelError(f"tensor {name} has values that are not finite")
        self._taken.add(name)
        return tensor

    def pass_over(self, name: str, shape: tuple[int, ...]) -> None:
        """As ``take``, but the values are had from elsewhere and are not read."""
        self._shaped(name, shape)
        self._taken.add(name)

    def _shaped(self, name: str, shape: tuple[int, ...]) -> Any:
        if name not in self._where:
            raise ModelError(f"tensor {name} is missing; config.json asks for it with shape {list(shape)}")
        stored = self._where[name].get_slice(name)
        if (found := tuple(stored.get_shape())) != shape:
            raise ModelError(f"tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
        return stored

    def untaken(self) -> list[str]:
        return sorted(set(self._where) - self._taken)


def weight_files(model_dir: Path) -> dict[str, set[str]]:
    """File name -> tensor names its index promises (none for a single file). Raises ModelError without either."""
    if (model_dir / INDEX).exists():
        index = read_json(model_dir / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ModelError(f"{INDEX}: weight_map must be a non-empty object")
        files: dict[str, set[str]] = {}
        for tensor, file in index.items():
            if not _is_plain_name(file):
                raise ModelError(f"{INDEX}: {tensor} points to {shown(file)}, not a .safetensors file of this folder")
            files.setdefault(file, set()).add(tensor)
        return files
    if (model_dir / SINGLE).is_file():
        return {SINGLE: set()}
    raise ModelError(f"{model_dir} has neither {SINGLE} nor {INDEX}; only safetensors weights are served")


def _sliced(stored: Any, part: Part) -> Tensor:
    wanted = slice(part.start, part.start + part.count)
    tensor: Tensor = stored[wanted] if part.axis == 0 else stored[:, wanted]
    return tensor


def _is_plain_name(file: Any) -> bool:
    """A name of this folder: no way out of it, and nothing that an operating system refuses as a name."""
    plain = isinstance(file, str) and Path(file).name == file and "\0" not in file and len(file) < 256
    return plain and file.endswith(".safetensors")
