"""Folders of models and drafters with damaged files: one error that names the file and the field, or a working engine.

Never another exception, never a crash of the process, never a long wait; a drafter that may be left out is left out
with a warning.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.api.chat import ChatTemplateError
from serve.api.sampling import GenerationConfigError, SamplingDefaults
from serve.api.text import ModelText
from serve.config import ServeConfig
from serve.engine.build import StartError, build_engine
from serve.model.checkpoint import Checkpoint
from serve.model.errors import ModelError
from serve.protocol import SamplingParams
from serve.tokenizer import TokenizerError
from tests.fuzz.damage import Damage, byte_damage, json_damage, tensor_damage
from tests.fuzz.scale import fuzz
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.tiny_models import write_model

# A start measures what a step costs, which takes seconds on a busy machine.
LONGEST_SECONDS = 60.0
MODEL_FIELDS = [
    *("hidden_size", "num_hidden_layers", "rope_parameters", "rope_scaling", "rope_theta", "layer_types", "head_dim"),
    *(
        "eos_token_id",
        "bos_token_id",
        "sliding_window",
        "use_sliding_window",
        "quantization_config",
        "dtype",
        "auto_map",
    ),
    *("partial_rotary_factor", "original_max_position_embeddings", "tie_word_embeddings", "mlp_bias", "torch_dtype"),
    *(
        "chat_template",
        "eos_token",
        "bos_token",
        "temperature",
        "top_k",
        "min_p",
        "decoder",
        "normalizer",
        "truncation",
    ),
    *("pre_tokenizer", "post_processor", "padding", "added_tokens", "vocab_size", "max_position_embeddings"),
]
DRAFTER_FIELDS = [
    *("draft_vocab_size", "target_hidden_size", "causal", "use_swa", "layer_types", "rope_scaling", "rope_parameters"),
    *(
        "dflash_config",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "head_dim",
        "rope_theta",
    ),
    *("conditional_acceptance", "max_position_embeddings", "dtype", "projector_type", "attention_bias", "hidden_act"),
]
Folder = Mapping[str, bytes]


def contents(folder: Path) -> Folder:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    sampling = {"eos_token_id": [2], "temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    return contents(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_model(folder, num_hidden_layers=5)
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = write_drafter(tmp_path_factory.mktemp("drafter"), random_drafter(drafter_config()))
    (folder / "drafter_eval.json").write_text(json.dumps({"conditional_acceptance": [0.8, 0.7, 0.6]}))
    return contents(folder)


def damage_of(file: str, fields: list[str]) -> st.SearchStrategy[Damage]:
    if file.endswith(".safetensors"):
        return tensor_damage() | byte_damage()
    return json_damage(fields) | byte_damage()


def write(folder: Path, files: Folder, file: str, damage: Damage) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(damage.apply(data) if name == file else data)


def check_message(message: str, file: str, damage: Damage) -> None:
    """One line that says where to look."""
    assert len(message) < 1000, message[:200]
    places = {
        "tokenizer_config.json": ("chat template",),
        "model.safetensors": ("tensor", "weights", ".weight", "lacks"),
    }
    assert any(word in message for word in (file, *places.get(file, ()))), (message, damage)


def serve_from(folder: Path, **settings: object) -> tuple[str, list[str]]:
    """Start an engine and answer; how it went, and the warnings. Only StartError may come out."""
    started = time.monotonic()
    config = ServeConfig(model_dir=str(folder), weights="fp32", threads=1, kv_memory_mib=4)
    engine, info = build_engine(ServeConfig(**{**vars(config), **settings}))
    engine.add("a", [5, 6, 7] * 4, SamplingParams(max_tokens=4, ignore_eos=True))
    outputs = []
    for _ in range(40):
        if not engine.has_work:
            break
        outputs += engine.step()
    engine.check()
    assert outputs[-1].finish_reason in ("length", "error")
    assert time.monotonic() - started < LONGEST_SECONDS
    return str(outputs[-1].finish_reason), list(info["warnings"])


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_damaged_model_folder_is_refused_by_file_and_field_or_serves(
    model: Folder, file: str, tmp_path: Path, tried: Callable[[str], None]
) -> None:
    @fuzz(8)
    @given(damage=damage_of(file, MODEL_FIELDS))
    def attempt(damage: Damage) -> None:
        folder = tmp_path / "case"
        write(folder, model, file, damage)
        messages = []
        try:
            serve_from(folder)
        except StartError as error:
            messages.append(str(error))
        try:
            SamplingDefaults.load(folder)
            ModelText.load(folder).close()
        except (TokenizerError, ChatTemplateError, GenerationConfigError) as error:
            messages.append(str(error))
        for message in messages:
            check_message(message, file, damage)
        tried("refused" if messages else "served")

    attempt()


@pytest.mark.parametrize("file", ["config.json", "drafter_eval.json", "model.safetensors"])
def test_a_damaged_drafter_folder_is_refused_by_name_or_left_out_aloud(
    target: Path, drafter: Folder, file: str, tmp_path: Path, tried: Callable[[str], None]
) -> None:
    @fuzz(3)
    @given(damage=damage_of(file, DRAFTER_FIELDS))
    def attempt(damage: Damage) -> None:
        folder = tmp_path / "case"
        write(folder, drafter, file, damage)
        refused = ""
        try:
            serve_from(target, drafter_dir=str(folder), block_length=3)
        except StartError as error:
            refused = str(error)
            assert str(folder) in refused
            assert len(refused) < 1000
        reason, warnings = serve_from(target, drafter_dir=str(folder), drafter_optional=True, block_length=3)
        assert reason == "length"
        assert any("WITHOUT the drafter" in warning for warning in warnings) == bool(refused)
        tried("refused" if refused else "used")

    attempt()


def index_of(weight_map: object) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


@pytest.mark.parametrize(
    "place",
    [
        *(
            "../model.safetensors",
            "/etc/passwd",
            "a/../model.safetensors",
            "./model.safetensors",
            "",
            ".",
            "..",
            "\u0000",
        ),
        *("model.safetensors\u0000", "missing.safetensors", "x" * 5000 + ".safetensors", "MODEL.safetensors", "folder"),
        *(None, 5, [], {}, True),
    ],
)
def test_an_index_that_points_anywhere_else_is_refused(model: Folder, place: object, tmp_path: Path) -> None:
    for name, data in model.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.safetensors.index.json").write_bytes(index_of({"model.norm.weight": place}))
    with pytest.raises(ModelError, match=r"index\.json"), Checkpoint(tmp_path):
        pass


def test_what_stands_in_a_files_place_is_not_waited_for(model: Folder, tmp_path: Path) -> None:
    """A pipe that nobody writes to would otherwise be read for ever."""
    import os

    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        folder = tmp_path / file
        folder.mkdir()
        for name, data in model.items():
            if name == file:
                os.mkfifo(folder / name)
            else:
                (folder / name).write_bytes(data)
        with pytest.raises(StartError, match=r"not a file|has neither"):
            serve_from(folder)


@pytest.mark.parametrize("size", [(1 << 20) + 1, 1 << 33])
def test_a_huge_file_of_settings_is_not_read(model: Folder, tmp_path: Path, size: int) -> None:
    for name, data in model.items():
        (tmp_path / name).write_bytes(data)
    with (tmp_path / "config.json").open("r+b") as file:
        file.truncate(size)  # a hole: it takes no space
    with pytest.raises(StartError, match=r"config\.json"):
        serve_from(tmp_path)


def test_rotary_fields_that_make_no_frequencies_are_refused(model: Folder, tmp_path: Path) -> None:
    for fields in (
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
        {"rope_type": "linear", "factor": 1e-300, "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e-308},
    ):
        for name, data in model.items():
            (tmp_path / name).write_bytes(data)
        settings = json.loads(model["config.json"])
        (tmp_path / "config.json").write_text(json.dumps({**settings, "rope_parameters": fields}))
        with pytest.raises(StartError, match="rotary fields"):
            serve_from(tmp_path)


def test_a_chat_template_of_bottomless_nesting_is_refused(model: Folder, tmp_path: Path) -> None:
    for name, data in model.items():
        (tmp_path / name).write_bytes(data)
    for template in ("{{ " + "(" * 20_000 + " }}", "{% if x %}" * 5000, "{{ " + "-" * 100_000 + "1 }}"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(ChatTemplateError, match="chat template"):
            ModelText.load(tmp_path)


def test_a_drafter_with_a_shorter_window_decodes_plainly_beyond_it(target: Path, tmp_path: Path) -> None:
    """No fault is counted, so the drafter still drafts for the next short text."""
    write_drafter(tmp_path, random_drafter(drafter_config(max_position_embeddings=24)))
    settings = ServeConfig(model_dir=str(target), drafter_dir=str(tmp_path), weights="fp32", threads=1, kv_memory_mib=4)
    engine, _ = build_engine(ServeConfig(**{**vars(settings), "block_length": 5}))
    engine.lookup = None

    def answer(length: int) -> int:
        engine.add("a", [5 + i % 7 for i in range(length)], SamplingParams(max_tokens=16, ignore_eos=True))
        tokens = 0
        while engine.has_work:
            tokens += sum(len(output.token_ids) for output in engine.step())
        return tokens

    assert [answer(length) for length in (40, 30, 40, 20)] == [16] * 4
    before = engine.stats()
    assert before.drafter_faults == 0
    assert answer(4) == 16
    assert engine.stats().drafts > before.drafts
