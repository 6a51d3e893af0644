"""A weights map gives each matrix its format, later keys over earlier ones, and refuses what it cannot honour by the
field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.kernels.formats import CARD_FORMATS, HOST_FORMATS, stored_bytes
from serve.kernels.triton.linear import TritonLinearBuilder
from serve.model.errors import ModelError
from serve.model.loader import Storage, load_target
from serve.model.weights_map import BESIDE, check_for_card, read_weights_map
from tests.tiny_models import write_model

CPU = torch.device("cpu")


def written(folder: Path, **fields: Any) -> Path:
    path = folder / "map.json"
    path.write_text(json.dumps(fields))
    return path


def test_later_keys_win_and_the_rest_is_the_default(tmp_path: Path) -> None:
    layers = {"*.down_proj": "int8", "0": "int8-g128", "2-3": "int4-g32", "3.o_proj": "int8", "lm_head": "int8"}
    plan = read_weights_map(written(tmp_path, default="int4", layers=layers), 4, CARD_FORMATS, None)
    assert plan.layer(0, "down_proj") == "int8-g128"
    assert plan.layer(1, "down_proj") == "int8"
    assert plan.layer(2, "down_proj") == "int4-g32"
    assert plan.layer(3, "o_proj") == "int8"
    assert plan.layer(1, "qkv_proj") == "int4"
    assert plan.head_format == "int8"
    assert plan.describe(4) == "4 matrices int8-g128, 3 matrices int4, 7 matrices int4-g32, 2 matrices int8, head int8"
    same = read_weights_map(written(tmp_path, layers=layers), 4, CARD_FORMATS, "int4")
    assert same.text(4) == plan.text(4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"default": "int5"}, "default must be one of"),
        ({"default": "int8", "layer": {}}, "'layer' is not a field"),
        ({"layers": {}}, "default is missing"),
        ({"default": "int8", "layers": []}, "layers must be an object"),
        ({"default": "int8", "layers": {"4": "int8"}}, r"layers\['4'\]: the model has layers 0 to 3"),
        ({"default": "int8", "layers": {"3-1": "int8"}}, "the model has layers 0 to 3"),
        ({"default": "int8", "layers": {"0": 8}}, r"layers\['0'\] must be one of"),
        ({"default": "int8", "layers": {"first": "int8"}}, "a key is LAYER"),
        ({"default": "int8", "layers": {"0.mlp": "int8"}}, "no matrix 'mlp'"),
        ({"default": "int8", "layers": {"0.": "int8"}}, "no matrix ''"),
        ({"default": "int8", "layers": {"*.v_proj": "int8"}}, "a part of qkv_proj"),
        ({"default": "int8", "scales": "../s.safetensors"}, "scales must name"),
    ],
)
def test_what_it_cannot_honour_is_refused_by_field(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_weights_map(written(tmp_path, **fields), 4, CARD_FORMATS, None)


def test_a_card_computes_in_one_float_and_looks_up_whole_rows(tmp_path: Path) -> None:
    for fields, words in (
        ({"default": "int8", "layers": {"0": "fp16"}}, r"layers\['0'\] is fp16, but this map computes in bf16"),
        ({"default": "int4", "layers": {"lm_head": "int4"}}, r"layers\['lm_head'\] is int4; the head is int8 or bf16"),
    ):
        plan = read_weights_map(written(tmp_path, **fields), 4, CARD_FORMATS, None)
        with pytest.raises(ModelError, match=words):
            check_for_card(plan, "bf16", "map")
    plan = read_weights_map(written(tmp_path, default="bf16", layers={"0": "int4"}), 4, CARD_FORMATS, None)
    check_for_card(plan, "bf16", "map")


@pytest.mark.parametrize("name", [name for name in CARD_FORMATS if name != "fp32"])
@pytest.mark.parametrize("depth", [256, 192, 96])
def test_bytes_are_those_that_packing_takes(name: str, depth: int) -> None:
    linear = TritonLinearBuilder(name, CPU).build(torch.randn(48, depth))
    assert linear.nbytes == stored_bytes(name, 48, depth)


def test_a_map_beside_the_weights_is_taken_unless_a_format_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, hidden_size=64, intermediate_size=96)
    (tmp_path / BESIDE).write_text(json.dumps({"default": "int4", "layers": {"1.down_proj": "int8"}}))
    caplog.set_level("INFO")
    model = load_target(tmp_path, device=CPU)
    kinds = [layer.down.kind.split()[0] for layer in model._parts.layers]
    assert kinds == ["int4", "int8"]
    assert model._parts.layers[1].qkv.kind.startswith("int4")
    assert "1 matrices int8" in caplog.text
    plain = load_target(tmp_path, device=CPU, weights="fp32")
    assert plain.weights == "fp32"
    assert "is not looked at" in caplog.text


def test_a_map_and_a_format_that_contradict_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    path = written(tmp_path, default="int8")
    with pytest.raises(ModelError, match="but --weights fp32 was asked for"):
        load_target(tmp_path, device=CPU, storage=Storage("fp32", path))
    with pytest.raises(ModelError, match="must be one of fp32, int8, int4 on this device"):
        load_target(tmp_path, device=CPU, storage=Storage("auto", written(tmp_path, default="int4-g32")))
    assert HOST_FORMATS == ("fp32", "int8", "int4")
    with pytest.raises(ModelError, match="cache is for the Triton kernels"):
        load_target(tmp_path, device=CPU, storage=Storage("int8", cache=tmp_path))
    with pytest.raises(ModelError, match="--prefill w8a8 needs int8 matrices"):
        load_target(tmp_path, device=CPU, storage=Storage("int8", prefill="w8a8"))
