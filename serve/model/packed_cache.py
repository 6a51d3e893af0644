"""Packed matrices on disk, so that a start reads what the kernels read instead of quantising the checkpoint again.

One safetensors file for a model and its formats. Its key is made of everything the packed bytes follow from, so a file
that does not fit is found out and made anew, never trusted: the checkpoint's files (size, time, header, and samples of
their bytes), the formats, the channel scales, the card, the rank, and the source code that packs. Each tensor has a sum
that is checked on the device, which finds a page that was never written. Knows packed matrices and files; no models.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve.kernels.triton.pack import PackedWeight

VERSION = 1
"""Of the file's own form; how matrices are packed is known by the packing sources, whose text is part of the key."""
_SAMPLES, _SAMPLE_BYTES = 256, 4096
_NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8"}
_NAMES |= {torch.int32: "I32"}


class CacheFault(Exception):
    """Why a cache file cannot be used; the message is for the log."""


def cache_key(model_dir: Path, *made_of: object) -> str:
    """What packed bytes follow from, as one hash: the checkpoint in ``model_dir`` and whatever else is given."""
    digest = hashlib.sha256(f"{VERSION}|{made_of!r}".encode())
    packing = Path(__file__).parent.parent / "kernels" / "triton"
    for source in sorted(packing.glob("*.py")):
        digest.update(source.read_bytes())
    for path in (model_dir / "config.json", *sorted(model_dir.glob("*.safetensors"))):
        digest.update(_fingerprint(path))
    return digest.hexdigest()


def _fingerprint(path: Path) -> bytes:
    """Size, time of change, and samples of a file, its beginning (and so its header) and end among them."""
    about = path.stat()
    digest = hashlib.sha256(f"{path.name}|{about.st_size}|{about.st_mtime_ns}".encode())
    step = max(_SAMPLE_BYTES, about.st_size // _SAMPLES)
    with path.open("rb") as file:
        for place in (*range(0, about.st_size, step), max(0, about.st_size - _SAMPLE_BYTES)):
            file.seek(place)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def cache_path(folder: Path, model_dir: Path, *made_of: object) -> Path:
    """Where the cache of a model in these formats lies: a changed checkpoint has the same place and another key."""
    name = hashlib.sha256(repr((str(model_dir.resolve()), made_of)).encode()).hexdigest()[:16]
    return folder / f"packed-{name}.safetensors"


class PackedCache:
    """An opened cache file. Raises CacheFault for one that does not fit ``key`` or is damaged."""

    def __init__(self, path: Path, key: str, device: torch.device) -> None:
        self._path, self._device, self._stack = path, device, ExitStack()
        try:
            self._file: Any = self._stack.enter_context(safe_open(path, framework="pt", device=str(device)))
            about = self._file.metadata() or {}
            if about.get("key") != key:
                raise CacheFault(f"{path} was made from other weights, formats or code")
            self._matrices: dict[str, Any] = json.loads(about["matrices"])
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
            self._stack.close()
            raise CacheFault(f"{path} cannot be read: {error}") from None
        except CacheFault:
            self._stack.close()
            raise

    def __enter__(self) -> PackedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def take(self, name: str) -> PackedWeight:
        """The packed matrix of that name, on the device. Raises CacheFault."""
        try:
            entry = self._matrices[name]
            values: dict[str, Any] = {
                one.name: self._tensor(f"{name}.{one.name}", entry["sums"][one.name])
                if one.name in entry["sums"]
                else _dtype(entry[one.name])
                for one in fields(PackedWeight)
            }
        except (KeyError, TypeError) as error:
            raise CacheFault(f"{self._path} lacks {error} of {name}") from None
        return PackedWeight(**values)

    def _tensor(self, name: str, wanted: int) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CacheFault(f"{self._path}: {name} cannot be read: {error}") from None
        if byte_sum(tensor) != wanted:
            raise CacheFault(f"{self._path}: the bytes of {name} are not those that were written")
        return tensor


def write_cache(path: Path, key: str, matrices: Mapping[str, PackedWeight]) -> int:
    """Writes the file beside its place and then moves it there, a matrix at a time; returns its bytes. Raises OSError
    (a full disk), leaving nothing behind."""
    tensors = dict(_tensors(matrices))
    header: dict[str, Any] = {"__metadata__": {"key": key, "matrices": json.dumps(_describe(matrices))}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors.values():
                file.write(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return 8 + len(text) + end


def _tensors(matrices: Mapping[str, PackedWeight]) -> Iterator[tuple[str, Tensor]]:
    for name, packed in matrices.items():
        for one in fields(packed):
            value = getattr(packed, one.name)
            if isinstance(value, Tensor):
                yield f"{name}.{one.name}", value


def _describe(matrices: Mapping[str, PackedWeight]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, packed in matrices.items():
        values = {one.name: getattr(packed, one.name) for one in fields(packed)}
        entry: dict[str, Any] = {
            field: str(value) if isinstance(value, torch.dtype) else value
            for field, value in values.items()
            if not isinstance(value, Tensor)
        }
        entry["sums"] = {field: byte_sum(value) for field, value in values.items() if isinstance(value, Tensor)}
        found[name] = entry
    return found


def _dtype(value: Any) -> Any:
    return getattr(torch, value.removeprefix("torch.")) if isinstance(value, str) and "torch." in value else value


def byte_sum(tensor: Tensor) -> int:
    """The sum of a tensor's bytes as 32-bit words (and of the last few bytes), added up on its device."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    whole = raw.numel() // 4 * 4
    return int(raw[:whole].view(torch.int32).sum(dtype=torch.int64)) + int(raw[whole:].sum(dtype=torch.int64))
