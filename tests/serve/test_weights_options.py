"""The options of quantised weights reach the loader, and one the device cannot honour ends the start by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.config import WEIGHT_FORMATS, ServeConfig, parse_config
from serve.engine.build import StartError, build_engine
from serve.kernels.formats import CARD_FORMATS, HOST_FORMATS
from tests.tiny_models import write_model


def test_every_format_of_every_device_can_be_asked_for() -> None:
    assert set(WEIGHT_FORMATS) == {"auto", *CARD_FORMATS, *HOST_FORMATS}


def test_the_cache_comes_from_the_option_or_the_environment() -> None:
    environ = {"MODEL_DIR": "m", "FORETOKEN_WEIGHTS_CACHE": "/kept"}
    assert parse_config([], environ).weights_cache == "/kept"
    assert parse_config(["--weights-cache", "/other"], environ).weights_cache == "/other"
    assert parse_config([], {"MODEL_DIR": "m"}).weights_cache is None
    config = parse_config(["--weights-map", "map.json", "--prefill", "w8a8"], environ)
    assert ServeConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights_cache": "kept"}, "weights cache is for the Triton kernels"),
        ({"prefill": "w8a8"}, "--prefill w8a8 needs int8 matrices"),
        ({"prefill": "fp8"}, "--prefill fp8 needs the Triton kernels of a CUDA card"),
        ({"weights": "int4-g32"}, "'int4-g32' are not served on cpu"),
        ({"weights_map": "missing.json"}, r"missing\.json is missing"),
    ],
)
def test_what_a_cpu_cannot_honour_ends_the_start(tmp_path: Path, options: dict[str, str], words: str) -> None:
    write_model(tmp_path, num_hidden_layers=1)
    with pytest.raises(StartError, match=words):
        build_engine(ServeConfig(str(tmp_path), device="cpu", threads=1, **{"weights": "fp32", **options}))  # type: ignore[arg-type]


def test_an_engine_runs_by_a_map(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=1)
    (tmp_path / "weights_map.json").write_text(json.dumps({"default": "int8", "layers": {"lm_head": "fp32"}}))
    engine, facts = build_engine(ServeConfig(str(tmp_path), device="cpu", threads=1, proposer="none"))
    assert facts["weights"] == "int8"
    assert "fp32" in facts["kernel_path"]
    engine.check()
