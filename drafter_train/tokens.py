"""The token store: prompts and the target's responses as ids, never as text that would be tokenised again.

A folder with ``prompts.npz`` (ids of every rendered prompt), ``meta.json`` (fingerprint, prompt names, categories,
passes) and any number of ``responses-*.npz``, each complete once its name is there (written aside, then renamed), so a
killed writer loses only what it had not written. This file knows no tokenizer and no model.
"""

from __future__ import annotations

import json
import os
import socket
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Response:
    """One answer of the target. ``greedy_from``: index of the first token chosen greedily (its length when none was).
    ``ended``: it closed with an end token (which is its last id), instead of reaching the length limit."""

    prompt: int
    pass_index: int
    ids: Ids
    greedy_from: int
    ended: bool


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside ``path``, flush to disk, rename: the name never stands for half a file."""
    with _aside(path) as file:
        file.write(data)


def _save(path: Path, **arrays: NDArray[Any]) -> None:
    with _aside(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


@contextmanager
def _aside(path: Path) -> Iterator[BinaryIO]:
    """A file to write beside ``path``, which gets that name at the end. What cannot be written whole (a full disk) is
    removed: there is no room for it."""
    # In containers the writers of a shared folder may well have the same number.
    part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _load(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file. Raises ValueError naming it when it is not whole."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not a whole file of arrays: {error}") from error


def _pack(rows: Sequence[Sequence[int] | Ids], vocab_size: int) -> tuple[Ids, NDArray[np.int64]]:
    """Raises ValueError for an id outside the vocabulary: the target has no row for it."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    offsets[1:] = np.cumsum([len(row) for row in rows])
    wide = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]) if rows else np.zeros(0, np.int64)
    outside = wide[(wide < 0) | (wide >= vocab_size)]
    if len(outside):
        raise ValueError(f"token {outside[0]} is outside the target's vocabulary of {vocab_size}")
    return wide.astype(dtype), offsets


class TokenStore:
    """One folder of prompts and responses for one target."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "meta.json"
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} is not a token store: no meta.json")
        self.meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        arrays = _load(self.folder / "prompts.npz")
        self._prompt_ids, self._prompt_offsets = arrays["ids"], arrays["offsets"]

    @classmethod
    def create(cls, folder: str | Path, prompts: Sequence[Sequence[int]], meta: dict[str, Any]) -> TokenStore:
        """A new store, or the one that is there when it holds the same prompts. Raises ValueError when it does not."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        ids, offsets = _pack(prompts, int(meta["fingerprint"]["vocab_size"]))
        if (folder / "meta.json").exists():
            store = cls(folder)
            same = np.array_equal(store._prompt_ids, ids) and np.array_equal(store._prompt_offsets, offsets)
            if not same or store.meta["fingerprint"] != meta["fingerprint"] or store.meta["passes"] != meta["passes"]:
                raise ValueError(
                    f"{folder} holds responses to other prompts, passes or another tokenizer; use a new folder"
                )
            for name in ("target", "max_new_tokens"):
                if store.meta.get(name) != meta.get(name):
                    raise ValueError(
                        f"{folder} holds responses with {name} {store.meta.get(name)!r}, not {meta.get(name)!r}; use a "
                        "new folder"
                    )
            return store
        _save(folder / "prompts.npz", ids=ids, offsets=offsets)
        write_atomically(folder / "meta.json", json.dumps(meta).encode())
        return cls(folder)

    @property
    def num_prompts(self) -> int:
        return len(self._prompt_offsets) - 1

    def prompt(self, index: int) -> Ids:
        row: Ids = self._prompt_ids[self._prompt_offsets[index] : self._prompt_offsets[index + 1]]
        return row

    def append(self, responses: Sequence[Response], tag: str) -> Path:
        """Write responses as one new file whose name holds ``tag`` (the shard), and return its path."""
        number = 0
        while (path := self.folder / f"responses-{tag}-{number:05d}.npz").exists():
            number += 1
        ids, offsets = _pack([item.ids for item in responses], int(self.meta["fingerprint"]["vocab_size"]))
        _save(
            path,
            ids=ids,
            offsets=offsets,
            prompt=np.array([item.prompt for item in responses], dtype=np.int32),
            pass_index=np.array([item.pass_index for item in responses], dtype=np.int16),
            greedy_from=np.array([item.greedy_from for item in responses], dtype=np.int32),
            ended=np.array([item.ended for item in responses], dtype=np.bool_),
        )
        return path

    def responses(self) -> Iterator[Response]:
        """Every response of every file, files in name order."""
        for path in sorted(self.folder.glob("responses-*.npz")):
            data = _load(path)
            starts = data["offsets"]
            for i in range(len(starts) - 1):
                yield Response(
                    prompt=int(data["prompt"][i]),
                    pass_index=int(data["pass_index"][i]),
                    ids=data["ids"][starts[i] : starts[i + 1]],
                    greedy_from=int(data["greedy_from"][i]),
                    ended=bool(data["ended"][i]),
                )

    def write_replay(self, anchors: Mapping[tuple[int, int], Ids], index: int = 0, count: int = 1) -> Path:
        """Keep where speculative decoding's rounds began in responses: for (prompt, pass_index) the ascending places in
        prompt and response together. Shard ``index`` of ``count``; what was cut into another count is removed."""
        keys = sorted(anchors)
        offsets = np.zeros(len(keys) + 1, dtype=np.int64)
        offsets[1:] = np.cumsum([len(anchors[key]) for key in keys])
        flat = np.concatenate([anchors[key] for key in keys]) if keys else np.zeros(0)
        path = self.folder / f"replay-{index:03d}of{count:03d}.npz"
        for old in self.folder.glob("replay-*.npz"):
            if not old.name.endswith(f"of{count:03d}.npz"):
                old.unlink()
        _save(
            path,
            prompt=np.array([key[0] for key in keys], dtype=np.int32),
            pass_index=np.array([key[1] for key in keys], dtype=np.int16),
            offsets=offsets,
            anchors=flat.astype(np.uint32),
        )
        return path

    def replay(self) -> dict[tuple[int, int], Ids]:
        """What ``write_replay`` kept; empty without it."""
        found: dict[tuple[int, int], Ids] = {}
        for path in sorted(self.folder.glob("replay-*.npz")):
            data = _load(path)
            starts = data["offsets"]
            for i in range(len(starts) - 1):
                key = int(data["prompt"][i]), int(data["pass_index"][i])
                found[key] = data["anchors"][starts[i] : starts[i + 1]]
        return found
