"""Packed matrices from a file are those that the checkpoint gives; one that does not fit is made anew, with a line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve.kernels.triton.linear import TritonLinearBuilder
from serve.kernels.triton.pack import PackedWeight
from serve.model import packed_cache
from serve.model.channel_scales import NO_SCALES, ChannelScales
from serve.model.checkpoint import Checkpoint
from serve.model.config import load_model_config
from serve.model.loader import packed_matrices, read_through_cache
from serve.model.reader import WeightReader
from serve.model.target import TargetWeights
from serve.model.triton_layers import skinny
from serve.model.weights_map import WeightsMap
from serve.parallel.split import Split
from tests.tiny_models import write_model

CPU = torch.device("cpu")
PLAN = WeightsMap("int4", (("1", 1, 1, None, "int8"), ("0.down_proj", 0, 0, "down_proj", "int8-g128")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "m", "qwen2", hidden_size=64, intermediate_size=128, tie_word_embeddings=True, scale=1.0)
    return tmp_path / "m"


def read(
    folder: Path, cache: Path, plan: WeightsMap = PLAN, scales: ChannelScales = NO_SCALES, ranks: int = 1
) -> TargetWeights:
    builder = TritonLinearBuilder(plan.default, CPU)
    with Checkpoint(folder) as checkpoint:
        reader = WeightReader(checkpoint, Split(load_model_config(folder), 0, ranks), builder, plan, scales)
        return read_through_cache(reader, folder, cache)


def same(one: TargetWeights, other: TargetWeights) -> bool:
    """Every field of every matrix, bias and norm."""
    for got, want in zip(packed_matrices(one).values(), packed_matrices(other).values(), strict=True):
        for item in fields(PackedWeight):
            values = getattr(got, item.name), getattr(want, item.name)
            alike = torch.equal(*values) if isinstance(values[0], Tensor) else values[0] == values[1]
            if not alike:
                return False
    return all(
        torch.equal(a.input_norm, b.input_norm) and torch.equal(skinny(a.qkv).bias, skinny(b.qkv).bias)  # type: ignore[arg-type]
        for a, b in zip(one.layers, other.layers, strict=True)
    )


def only(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def test_a_second_read_takes_the_file_and_none_of_the_matrices(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    first = read(folder, tmp_path / "cache")
    assert "written" in caplog.text
    taken: list[str] = []
    take = Checkpoint.take

    def noted(checkpoint: Checkpoint, name: str, *rest: Any) -> Tensor:
        taken.append(name)
        return take(checkpoint, name, *rest)

    monkeypatch.setattr(Checkpoint, "take", noted)
    second = read(folder, tmp_path / "cache")
    assert "read from the cache" in caplog.text
    assert same(first, second)
    assert not [name for name in taken if "proj.weight" in name or "embed" in name]
    load_file(only(tmp_path / "cache"))  # an ordinary safetensors file


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def blank_a_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def another_form(path: Path) -> None:
    """As a version would that knew other fields."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as opened:
        about = dict(opened.metadata())
    matrices = json.loads(about["matrices"])
    for entry in matrices.values():
        del entry["pack"]
    save_file(tensors, path, about | {"matrices": json.dumps(matrices)})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "cannot be read"),
        (blank_a_page, "are not those that were written"),
        (another_form, "lacks 'pack'"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(b"\xff" * 64), "cannot be read"),
    ],
)
def test_a_damaged_file_is_made_anew(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], words: str
) -> None:
    first = read(folder, tmp_path / "cache")
    path = only(tmp_path / "cache")
    intact = path.read_bytes()
    damage(path)
    assert same(first, read(folder, tmp_path / "cache"))
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert words in line
    assert "made anew" in line
    assert path.read_bytes() == intact


def test_what_the_bytes_follow_from_is_part_of_the_key(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    read(folder, cache)
    read(folder, cache, WeightsMap("int8"))
    read(folder, cache, PLAN, ChannelScales({}, "other"))
    read(folder, cache, PLAN, ranks=2)
    assert len(list(cache.iterdir())) == 4
    assert not caplog.records
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    changed = read(folder, cache)
    assert "made from other weights, formats or code" in caplog.text
    assert len(list(cache.iterdir())) == 4
    assert same(changed, read(folder, cache))
    caplog.clear()
    monkeypatch.setattr(packed_cache, "VERSION", 2)
    read(folder, cache)
    assert "made from other weights, formats or code" in caplog.text


def test_a_full_disk_costs_a_line(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    weights = read(folder, tmp_path / "cache")
    assert "cannot be written: No space left on device" in caplog.text
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    assert same(weights, read(folder, tmp_path / "file"))
    assert "served without it" in caplog.text
