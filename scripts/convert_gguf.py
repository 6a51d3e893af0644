"""A llama-family GGUF file as a Hugging Face model folder.

Weights are stored as float32: ``scale * code + minimum`` of every group of 32 stays exact, so an asymmetric int4
quantisation over the same groups finds the codes of a Q4_1 source again. This file knows the two formats. It does not
know where the GGUF comes from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


class ConversionError(Exception):
    """The GGUF is not of the kind this converter knows; the message names what differs."""


def unpermute(rows: Any, heads: int) -> Any:
    """Undoes the row order of q and k in llama-family GGUFs: rotary pairs (2i, 2i+1) go back to (i, i + half).

    ``rows``: array ``(heads * head_dim, ...)``; the same shape comes back.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``. Raises ConversionError."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    prefix, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    if prefix == "blk" and index.isdigit() and rest in _LAYER_NAMES:
        return f"model.layers.{index}.{_LAYER_NAMES[rest]}"
    raise ConversionError(f"the GGUF holds a tensor a llama model does not have: {name}")


def write_weights(reader: Any, config: dict[str, Any], path: Path, say: Callable[[str], None]) -> None:
    """Streams every tensor, dequantised to float32, into one safetensors file: one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        size = 4 * int(np.prod(shape))
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        header[hugging_face_name(tensor.name)] = entry
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    total = len(reader.tensors)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for count, tensor in enumerate(reader.tensors, start=1):
            values = dequantize(tensor.data, tensor.tensor_type).astype("<f4", copy=False)
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                values = unpermute(values, heads[kind])
            file.write(np.ascontiguousarray(values).tobytes())
            if count == total or count % 90 == 0:
                say(f"converted {count} of {total} tensors")


def model_config(field: Callable[[str], Any], tied: bool) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM from GGUF metadata; ``field(key)`` gives a value or raises ConversionError."""

    def shortest(value: float) -> float:  # GGUF keeps float32; 9.99999975e-06 is meant to be 1e-05
        return float(str(np.float32(value)))

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": shortest(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(field("llama.rope.freq_base")),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": field("llama.embedding_length") ** -0.5,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def write_tokenizer(field: Callable[[str], Any], folder: Path) -> None:
    """tokenizer.json (byte-level BPE, digits one by one) and tokenizer_config.json (chat template, special tokens)."""
    if (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        raise ConversionError("the GGUF's tokenizer is not the byte-level BPE with single digits this converter builds")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    special = [i for i, kind in enumerate(kinds) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": field("llama.context_length"),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[field("tokenizer.ggml.eos_token_id")],
            "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
            "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
            "added_tokens_decoder": {str(i): {"content": tokens[i], **flags} for i in special},
            "chat_template": field("tokenizer.chat_template"),
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def convert(gguf_path: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Writes the five files of the model into ``folder`` (which exists); ``say`` gets progress lines.

    Raises ConversionError.
    """
    reader = GGUFReader(gguf_path)

    def field(key: str) -> Any:
        found = reader.get_field(key)
        if found is None:
            raise ConversionError(f"the GGUF has no field {key}")
        return found.contents()

    if field("general.architecture") != "llama":
        raise ConversionError(f"the GGUF holds a {field('general.architecture')} model, expected llama")
    config = model_config(field, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    write_tokenizer(field, folder)
    write_weights(reader, config, folder / "model.safetensors", say)
