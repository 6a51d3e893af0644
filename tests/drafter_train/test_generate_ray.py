"""Generation over Ray Data writes what the shards of an array write, byte for byte."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drafter_train.generate import main as generate
from drafter_train.generate_ray import main
from tests.conftest import ROOT
from tests.tiny_models import write_model

SHARDS = 2


def write_recipe(folder: Path, target: Path, name: str) -> Path:
    prompts = [{"prompt": f"Say {word}."} for word in ("one", "twenty", "three hundred", "no", "a")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    data = {
        "prompts": str(folder / "prompts.jsonl"),
        "eval_prompts": str(folder / "prompts.jsonl"),
        "tokens": str(folder / name),
        "eval_tokens": str(folder / f"{name}-eval"),
        "max_new_tokens": 20,
        "passes": [{}, {"sampled_tokens": [3, 6]}],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": "g", "target": str(target), "data": data, "train": {"max_steps": 1}}))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npz")}


def test_shards_over_ray_are_those_of_the_array_byte_for_byte(tmp_path: Path) -> None:
    write_model(tmp_path / "target", "llama", seed=4, num_hidden_layers=2)
    by_array = write_recipe(tmp_path, tmp_path / "target", "array")
    for shard in range(SHARDS):
        assert generate(["--config", str(by_array), "--shard", f"{shard}/{SHARDS}", "--device", "cpu"]) == 0
    by_ray = write_recipe(tmp_path, tmp_path / "target", "ray")
    environ = {"OMP_NUM_THREADS": "1", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", "drafter_train.generate_ray", "--shards", str(SHARDS), "--at-once", "1")
    subprocess.run(
        [*command, "--", "--config", str(by_ray), "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, **environ},
        check=True,
        timeout=400,
    )
    wanted = files(tmp_path / "array")
    assert sum(name.startswith("responses-") for name in wanted) == 2 * SHARDS  # a file a pass
    assert files(tmp_path / "ray") == wanted


@pytest.mark.parametrize("arguments", [["--shards", "0"], ["--shards", "2", "--", "--shard", "0/2"]])
def test_a_shard_cannot_be_given_twice_and_there_is_at_least_one(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
