"""Writes a checkpoint with random weights of a named shape, for measuring speed where the real weights are not.

Only plain words that re-tokenise to themselves have full-size rows in the output matrix, so greedy text never ends
early, always decodes, and can be counted from the text like real output. Speed is that of the real model; acceptance
and accuracy mean nothing on it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from eval.shapes import shape_config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SHARD_BYTES = 2 * 10**9
QUIET = 1 / 64  # size of all other rows: not zero, because a tied matrix is the input embedding as well


def word_ids(tokenizer: Any, limit: int = 4096) -> list[int]:
    """Ids of tokens that are a blank and a lower-case word and encode back to themselves."""
    found: list[int] = []
    for text, index in sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]):
        if re.fullmatch(r"[ĠA-Za-z]{4,14}", text) is None:
            continue
        word = tokenizer.decode([index], skip_special_tokens=False)
        if re.fullmatch(r" [a-z]{3,12}", word) and tokenizer.encode(word, add_special_tokens=False).ids == [index]:
            found.append(index)
            if len(found) == limit:
                break
    if len(found) < 2:
        raise ValueError("the tokenizer has no plain words: it does not fit a random-weight run")
    return found


def write_random_model(
    shape: str,
    tokenizer_dir: Path,
    target: Path,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    device: str = "cpu",
) -> Path:
    """Writes config, tokenizer and sharded safetensors of ``shape`` (a known name or a config.json) into ``target`` and
    returns it."""
    config = shape_config(shape)
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, target / name)
    tokenizer: Any = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    words = [index for index in word_ids(tokenizer) if index < config["vocab_size"]]
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    writer = _ShardWriter(target)
    generator = torch.Generator(device).manual_seed(seed)
    for name, sizes in tensor_sizes(config).items():
        if len(sizes) == 1:
            tensor = torch.ones(sizes, dtype=dtype) if name.endswith("weight") else torch.zeros(sizes, dtype=dtype)
        else:
            values = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32) * 0.02
            tensor = values.to(dtype).cpu()
        output = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
        if name == output:
            kept = tensor * QUIET
            half = len(words) // 2
            # Rows in opposite pairs: one of each pair is positive, far above the quiet rest, so a word always wins.
            kept[words[:half]] = tensor[words[:half]]
            kept[words[half : 2 * half]] = -tensor[words[:half]]
            tensor = kept
        writer.add(name, tensor)
    writer.finish()
    return target


def tensor_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a llama, qwen2 or qwen3 checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        sizes[base + "input_layernorm.weight"] = (hidden,)
        sizes[base + "post_attention_layernorm.weight"] = (hidden,)
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            sizes[f"{base}self_attn.{part}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                sizes[f"{base}self_attn.{part}_proj.bias"] = (rows,)
        sizes[base + "self_attn.o_proj.weight"] = (hidden, queries)
        if config["model_type"] == "qwen3":
            sizes[base + "self_attn.q_norm.weight"] = (head_dim,)
            sizes[base + "self_attn.k_norm.weight"] = (head_dim,)
        sizes[base + "mlp.gate_proj.weight"] = (inner, hidden)
        sizes[base + "mlp.up_proj.weight"] = (inner, hidden)
        sizes[base + "mlp.down_proj.weight"] = (hidden, inner)
    sizes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        sizes["lm_head.weight"] = (config["vocab_size"], hidden)
    return sizes


class _ShardWriter:
    """Collects tensors and writes a file whenever a shard is full, so that memory stays small."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._tensors: dict[str, torch.Tensor] = {}
        self._size = 0
        self._map: dict[str, str] = {}
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor
        self._size += tensor.numel() * tensor.element_size()
        if self._size >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._tensors:
            return
        file = f"model-{len(set(self._map.values())) + 1:05d}.safetensors"
        save_file(self._tensors, str(self._target / file), metadata={"format": "pt"})
        self._map.update(dict.fromkeys(self._tensors, file))
        self._total += self._size
        self._tensors, self._size = {}, 0

    def finish(self) -> None:
        self._flush()
        index = {"metadata": {"total_size": self._total}, "weight_map": self._map}
        (self._target / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
