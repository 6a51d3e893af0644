from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from drafter_train.hub import GRADER_LIMIT_BYTES, HubError
from eval.rehearse_archive import Manifest
from eval.rehearse_drafter import code_faults, fetch, hub_drafter, local_drafter
from scripts.hub_stand_in import TOKEN, HubStandIn

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "drafter"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"abc")
    (path / "modeling.py").write_text("never fetched")
    (path / "README.md").write_text("never fetched")
    return path


def test_only_what_a_grader_fetches_counts(folder: Path, tmp_path: Path) -> None:
    facts = local_drafter(folder)
    assert facts.files == {"config.json": 2, "model.safetensors": 3}
    assert facts.weights_sha256 == {"model.safetensors": ABC}
    assert facts.faults() == []
    fetch(None, folder, tmp_path / "mounted")
    assert sorted(path.name for path in (tmp_path / "mounted").iterdir()) == ["config.json", "model.safetensors"]


def test_an_oversized_drafter_is_named(folder: Path) -> None:
    facts = local_drafter(folder)
    largest = {**facts.files, "model.safetensors": GRADER_LIMIT_BYTES - facts.files["config.json"]}
    assert replace(facts, files=largest).faults() == []
    os.truncate(folder / "model.safetensors", GRADER_LIMIT_BYTES - 1)
    (fault,) = local_drafter(folder).faults()
    assert fault.kind == "oversized drafter"
    assert str(GRADER_LIMIT_BYTES) in fault.message


def test_a_drafter_without_weights_or_with_code_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Drafter"}}))
    assert [fault.kind for fault in local_drafter(folder).faults()] == ["drafter without weights"]
    assert [fault.kind for fault in code_faults(folder)] == ["drafter with code"]


def test_a_pinned_drafter_comes_from_the_hub_at_that_commit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with HubStandIn() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.store.private["student/d"] = False
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        sha = hub.store.commit("student/d", files)
        hub.store.commit("student/d", {"model.safetensors": b"later"})
        manifest = Manifest("student/d", sha)
        facts = hub_drafter(manifest)
        assert facts.files == {"config.json": 2, "model.safetensors": 3}
        assert facts.weights_sha256 == {"model.safetensors": ABC}
        fetch(manifest, None, tmp_path / "mounted")
        assert (tmp_path / "mounted" / "model.safetensors").read_bytes() == b"abc"
        with pytest.raises(HubError):
            hub_drafter(Manifest("student/d", "f" * 40))
