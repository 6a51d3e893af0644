"""By which names the one model is answered: those that it is known by, and no other."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from serve.api.model_names import accepted_names
from serve.config import ServeConfig
from tests.serve.api.live_server import HERE, LAUNCH, LiveServer, ServerProcess, chat, make_model_dir

QWEN = "Qwen/Qwen3-4B-Instruct-2507"


def names_of(folder: Path | str, known_as: str | None = None, served: str | None = None) -> frozenset[str]:
    return accepted_names(ServeConfig(model_dir=str(folder), served_model_name=served), known_as)


def test_the_repository_of_a_known_model_is_a_name_with_its_owner_and_without(tmp_path: Path) -> None:
    assert names_of(tmp_path / "model", QWEN) >= {"model", QWEN, "Qwen3-4B-Instruct-2507"}
    assert names_of(tmp_path / "model") == {"model", str(tmp_path / "model")}


def test_a_folder_of_the_hubs_cache_is_named_by_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--some-org--Model-1.5--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    for folder in (snapshot, link):
        assert names_of(folder) >= {"0" * 40, str(folder), "some-org/Model-1.5--b", "Model-1.5--b"}


def test_the_folder_as_it_was_given_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_of("./model/") == {"./model/", "model", str(tmp_path / "model")}


def test_a_folder_of_bytes_that_are_no_text_has_names_that_are(tmp_path: Path) -> None:
    assert names_of("/models/" + os.fsdecode(b"m\xff\xc3\xa9")) == {"m\ufffdé", "/models/m\ufffdé"}


def test_a_name_that_was_chosen_is_the_only_one(tmp_path: Path) -> None:
    assert names_of(tmp_path / "model", QWEN, "mine") == {"mine"}


def test_the_server_answers_to_them_with_its_own_name_and_refuses_others(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live, live.client() as http:
        for name in ("tiny-model", str(live.model_dir)):
            for path, body in (("chat/completions", chat("!say:x!")), ("completions", {"prompt": "x"})):
                reply = http.post(f"/v1/{path}", json={**body, "model": name, "max_tokens": 2})
                assert (reply.status_code, reply.json()["model"]) == (200, "tiny-model")
            assert http.get(f"/v1/models/{name}").json()["id"] == "tiny-model"
        for name in ("", "tiny", "TINY-MODEL", QWEN):
            assert http.post("/v1/chat/completions", json={**chat("x"), "model": name}).status_code == 404


@pytest.mark.model
def test_the_default_model_answers_to_its_repository(default_model_dir: Path, tmp_path: Path) -> None:
    record = tmp_path / "messages.jsonl"
    record.touch()
    engine = (str(HERE / "scripted_engine.py"), str(record), "ready")
    start = [sys.executable, "-c", LAUNCH, *engine, "--"]
    known = {**chat("!say:x!"), "model": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    command = [*start, "--model-dir", str(default_model_dir), "--port", "0"]
    with ServerProcess(command) as server, server.client() as http:
        assert http.post("/v1/chat/completions", json=known).status_code == 200
    sibling = make_model_dir(tmp_path / "sibling")
    (sibling / "config.json").write_bytes((default_model_dir / "config.json").read_bytes())
    with ServerProcess([*start, "--model-dir", str(sibling), "--port", "0"]) as server, server.client() as http:
        assert http.post("/v1/chat/completions", json=known).status_code == 404
