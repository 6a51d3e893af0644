"""Calibration gives loud channels finer steps: rounded outputs come nearer, and the file is one that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.calibrate import main, search
from eval.fidelity import Choice, choices
from serve.model.channel_scales import read_channel_scales
from serve.model.config import load_model_config
from tests.tiny_models import write_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads a few channels much more strongly than the others."""
    where: Path = tmp_path_factory.mktemp("calibrate")
    write_model(where, "llama", hidden_size=64, intermediate_size=128, scale=1.0, num_hidden_layers=1)
    tensors = load_file(where / "model.safetensors")
    for name in tensors:
        if "layernorm" in name:
            tensors[name][:3] = 40.0
    save_file(tensors, where / "model.safetensors")
    return where


def test_loud_channels_get_finer_steps(folder: Path) -> None:
    config = load_model_config(folder)
    weight, rows = torch.randn(48, 64), torch.randn(300, 64)
    rows[:, 5] *= 50
    power, error, scale = search(config, "qkv_proj", "int4-g32", weight, rows)
    assert power > 0
    assert error < 0.5
    assert int(scale.argmax()) == 5
    flat = search(config, "qkv_proj", "int8", weight, torch.zeros(20, 64))
    assert torch.equal(flat[2], torch.ones(64)) or flat[0] == 0
    # A row's one scale is its loud channel's: rounding the rows too wants more of the channel in the weights.
    assert (
        search(config, "qkv_proj", "int8", weight, rows, coded=True)[0]
        > search(config, "qkv_proj", "int8", weight, rows)[0]
    )
    shared = search(config, "o_proj", "int4-g32", weight, rows)
    assert shared[2].shape == (32,)


def test_the_file_is_taken_and_lowers_the_divergence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scales.safetensors"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two three\n\nfour five six seven\n")
    told = tmp_path / "told.json"
    options = ["--model", str(folder), "--prompts", str(prompts), "--tokens", "8", "--json", str(told)]
    assert main([str(out), *options]) == 0
    rows = json.loads(told.read_text())["matrices"]
    assert {row["matrix"] for row in rows} >= {"qkv_proj", "down_proj"}
    assert all(0 <= row["power"] <= 1 and row["error"] <= 1 for row in rows)
    assert "matrices scaled" in capsys.readouterr().out
    scales = read_channel_scales(out, load_model_config(folder))
    assert scales.by_matrix
    model = Choice("int4-g64", card=True, scales=out).load(folder, CPU)
    assert "int4 g64" in model.kernel_path


def test_what_is_measured_is_named() -> None:
    labels = [one.label for one in choices(["int8", "a/map.json"], True, Path("s.safetensors"), ["w8a8"])]
    assert labels[:4] == ["int8", "int8, scaled", "int8, w8a8 questions", "int8, w8a8 all"]
    assert "map.json, scaled, w8a8 all, gated rows in int8" in labels


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["x.bin"], "must end in .safetensors"),
        (["x.safetensors", "--tokens", "0"], "--tokens"),
        (["x.safetensors", "--matrices", "q_proj"], "'q_proj' is none of"),
        (["x.safetensors", "--weights", "fp16"], "must be an integer format"),
        (["x.safetensors", "--model", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert words in capsys.readouterr().err
