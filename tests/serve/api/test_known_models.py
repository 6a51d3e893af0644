from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from serve.api import known_models
from serve.api.known_models import KNOWN, identify
from serve.api.text import ModelText
from serve.tokenizer import load_tokenizer
from tests.serve.api.live_server import HERE, LAUNCH, ServerProcess, make_model_dir

QWEN = "Qwen/Qwen3-4B-Instruct-2507"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = PLAIN.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


def qwen_config(**changes: Any) -> dict[str, Any]:
    facts = json.loads(KNOWN.read_text())[QWEN]
    settings = {key: value for key, value in facts["settings"].items() if key != "rope_type"}
    return {**facts["shape"], **settings, "rope_scaling": None, "eos_token_id": 256, **changes}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the config of the known model; the list is told this folder's (small) tokenizer and end token."""
    model = make_model_dir(tmp_path / "model")
    write(model)
    facts = json.loads(KNOWN.read_text())
    facts[QWEN]["tokenizer_sha256"] = hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
    facts[QWEN]["end_token_ids"] = sorted(load_tokenizer(model).end_token_ids)
    listed = tmp_path / "known.json"
    listed.write_text(json.dumps(facts))
    monkeypatch.setattr(known_models, "KNOWN", listed)
    return model


def write(model: Path, template: str = PLAIN, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps(qwen_config(**changes)))
    settings = {"chat_template": template, "eos_token": "<|im_end|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


def warning(model: Path) -> str:
    text = ModelText.load(model)
    try:
        return identify(model, text).warning() or ""
    finally:
        text.close()


def test_the_known_model_is_known_without_a_warning(folder: Path) -> None:
    text = ModelText.load(folder)
    found = identify(folder, text)
    text.close()
    assert (found.name, found.differences, found.warning()) == (QWEN, (), None)


def test_rotary_settings_in_the_newer_place_are_the_same_model(folder: Path) -> None:
    write(folder, rope_theta=None, rope_parameters={"rope_theta": 5_000_000.0, "rope_type": "default"})
    assert warning(folder) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_theta": 1_000_000, "max_position_embeddings": 40960}, "rope_theta is 1000000, not 5000000"),
        ({"max_position_embeddings": 32768}, "max_position_embeddings is 32768, not 262144"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"eos_token_id": 5}, "an answer ends at tokens"),
    ],
)
def test_a_sibling_is_named_by_what_differs(folder: Path, change: dict[str, Any], said: str) -> None:
    write(folder, **change)
    line = warning(folder)
    assert line.startswith(f"WRONG MODEL? This folder has the shape of {QWEN}")
    assert said in line
    assert "\n" not in line


def test_a_thinking_template_is_a_sibling_with_and_without_jinja2(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, THINKING)
    assert "a thinking model" in warning(folder)
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    assert "a thinking model" in warning(folder)


def test_another_prompt_or_tokenizer_is_a_sibling(folder: Path) -> None:
    write(folder, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "its chat template writes 'Hi' for 'Hi'" in warning(folder)
    write(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert "tokenizer.json has SHA-256" in warning(folder)


def test_a_template_that_fails_is_a_sibling(folder: Path) -> None:
    write(folder, "{{ raise_exception('only tools') }}")
    assert "fails on a plain message (only tools)" in warning(folder)


def test_models_of_other_shapes_are_none_of_our_business(folder: Path) -> None:
    write(folder, hidden_size=1024, rope_theta=1)
    assert warning(folder) == ""


@pytest.mark.model
def test_the_default_model_is_known(default_model_dir: Path) -> None:
    text = ModelText.load(default_model_dir)
    found = identify(default_model_dir, text)
    text.close()
    assert (found.name, found.differences) == ("HuggingFaceTB/SmolLM2-135M-Instruct", ())


def test_the_server_warns_in_one_line_and_serves(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "model")
    write(model, rope_theta=1_000_000)
    record = tmp_path / "messages.jsonl"
    record.touch()
    engine = (str(HERE / "scripted_engine.py"), str(record), "ready")
    command = [sys.executable, "-c", LAUNCH, *engine, "--", "--model-dir", str(model), "--port", "0"]
    with ServerProcess(command) as server, server.client() as client:
        assert client.get("/health").status_code == 200
    assert sum("WRONG MODEL?" in line for line in server.errors) == 1
