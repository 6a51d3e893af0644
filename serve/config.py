"""Every setting of the server in one frozen dataclass, its defaults, and the command line that fills it.

The API process parses it once; the engine process receives it as JSON. This file knows no model and no HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

WEIGHT_FORMATS = ("auto", "fp32", "int8", "int4", "fp16", "bf16", "int8-g128", "int4-g32", "int4-g64", "int4-g128")
PREFILLS = ("off", "w8a8", "fp8", "auto")
PROPOSERS = ("auto", "none", "lookup", "block")


@dataclass(frozen=True)
class ServeConfig:
    """Settings of one server. Sizes are in tokens unless the name says otherwise; times are seconds."""

    model_dir: str
    drafter_dir: str | None = None
    drafter_optional: bool = False
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    weights: str = "auto"
    weights_map: str | None = None
    weights_cache: str | None = None
    prefill: str = "auto"
    kv_cache_dtype: str = "auto"
    threads: int = 0
    tensor_parallel: int = 1
    max_model_len: int = 0
    page_size: int = 32
    kv_memory_mib: int = 0
    max_num_seqs: int = 64
    max_batch_tokens: int = 0
    prefix_cache: bool = True
    proposer: str = "auto"
    lookup: bool = True
    frequent_tokens: bool = True
    graphs: bool = True
    prompt_graphs: bool | None = None
    block_length: int = -1
    max_queue: int = 256
    max_body_bytes: int = 4 * 1024 * 1024
    watchdog_seconds: float = 8.0
    restart_engine: int = 0
    drain_seconds: float = 20.0
    api_key_file: str | None = None
    trace_dir: str | None = None
    log_json: bool = False
    dev_routes: bool = False
    page: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServeConfig:
        return cls(**json.loads(text))


def readable_path(path: str) -> str:
    """A path as text that any reply or page can carry: a name of bytes that are no UTF-8 has U+FFFD in their place, and
    one that Python read as ASCII because of the locale is what it is."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# field -> (help text, argparse extras). The default is appended to every help line from the dataclass itself.
_HELP: dict[str, tuple[str, dict[str, Any]]] = {
    "model_dir": ("folder of the target model: config.json, tokenizer.json, *.safetensors (env MODEL_DIR)", {}),
    "drafter_dir": ("folder of a block drafter in DFlash layout; a mismatch with the target stops the start", {}),
    "served_model_name": ("model id clients use; the model folder's name when not given", {}),
    "host": ("address to listen on", {}),
    "port": ("port to listen on (env PORT)", {"type": int}),
    "device": ("auto, cpu or cuda", {"choices": ("auto", "cpu", "cuda")}),
    "weights": (
        "weight format; auto: on a CPU int4 where it keeps the weights exactly or there is no C compiler, else int8; "
        "on CUDA fp16 or bf16, but int8 on Turing; -gN: codes share a scale in groups of N, on CUDA (int4 is int4-g64)",
        {"choices": WEIGHT_FORMATS},
    ),
    "weights_map": (
        "JSON file with a format for each layer or matrix and input-channel scales; weights_map.json of the model's "
        "folder is taken where neither this nor --weights is given",
        {},
    ),
    "weights_cache": (
        "folder that keeps packed matrices between starts, on CUDA; made anew when it does not fit (env "
        "FORETOKEN_WEIGHTS_CACHE)",
        {},
    ),
    "prefill": (
        "w8a8: prompts run in int8 x int8 where their matrices are int8 with a scale a row, on CUDA; fp8: in fp8 x fp8 "
        "by a second copy of the matrices, on CUDA cards of capability 8.9 or more; auto: w8a8 on Turing, where the "
        "weights are scaled for it, else off",
        {"choices": PREFILLS},
    ),
    "kv_cache_dtype": (
        "K/V memory; auto: as the activations; int8: a scale a head and position, half the memory, on CUDA",
        {"choices": ("auto", "int8")},
    ),
    "threads": ("CPU threads for the engine; 0 is every core that it may use", {"type": int}),
    "tensor_parallel": (
        "ranks that share one model, a CUDA device each (on a CPU: processes); must divide its heads and widths",
        {"type": int},
    ),
    "max_model_len": ("context limit in tokens; 0 is the model's own, as far as the KV pool holds it", {"type": int}),
    "page_size": ("tokens in a KV page", {"type": int}),
    "kv_memory_mib": ("memory for KV pages in MiB, of each rank; 0 chooses by device", {"type": int}),
    "max_num_seqs": ("most sequences in one step", {"type": int}),
    "max_batch_tokens": (
        "token budget of one step, prefill chunks and decode rows together; 0 chooses by device",
        {"type": int},
    ),
    "prefix_cache": ("reuse the KV pages of equal prompt beginnings", {"action": argparse.BooleanOptionalAction}),
    "proposer": (
        "where drafts come from: none, lookup (prompt lookup), block (block drafter, lookup first) or auto "
        "(block when there is a drafter, else lookup)",
        {"choices": PROPOSERS},
    ),
    "lookup": (
        "prompt lookup, before the block drafter where there is one",
        {"action": argparse.BooleanOptionalAction},
    ),
    "frequent_tokens": (
        "the block drafter guesses among the tokens that its folder lists as frequent, where it lists them",
        {"action": argparse.BooleanOptionalAction},
    ),
    "graphs": (
        "CUDA graphs of decoding steps; without them every kernel is launched from the host",
        {"action": argparse.BooleanOptionalAction},
    ),
    "prompt_graphs": (
        "CUDA graphs of short prefill passes too, for 16-bit weights on one card; not used where one gives other bits "
        "(default: there)",
        {"action": argparse.BooleanOptionalAction},
    ),
    "block_length": ("drafted tokens verified in a round; -1 follows measured acceptance and cost", {"type": int}),
    "max_queue": ("requests waiting at most; more get 429", {"type": int}),
    "max_body_bytes": ("largest request body; more gets 413", {"type": int}),
    "watchdog_seconds": (
        "engine silence after which /health is 503 and requests fail; a step is silent after 5 times that",
        {"type": float},
    ),
    "restart_engine": (
        "start the engine process again when it dies or hangs, so many times in ten minutes; without a number 3",
        {"type": int, "nargs": "?", "const": 3},
    ),
    "drain_seconds": ("time running requests have to finish after SIGTERM", {"type": float}),
    "api_key_file": ("file with one API key a line; also env FORETOKEN_API_KEY", {}),
    "trace_dir": ("folder for one JSONL line per finished request with its rounds", {}),
    "log_json": ("log lines as JSON", {"action": argparse.BooleanOptionalAction}),
    "dev_routes": ("add POST /reset_prefix_cache (loopback only)", {"action": argparse.BooleanOptionalAction}),
    "page": ("serve the chat page at GET /", {"action": argparse.BooleanOptionalAction}),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser behind ``python -m serve``; every default it prints is the dataclass's."""
    parser = argparse.ArgumentParser(prog="python -m serve", description="OpenAI-compatible server for one model.")
    for item in fields(ServeConfig):
        if item.name not in _HELP:
            continue
        text, extras = _HELP[item.name]
        has_default = item.name != "model_dir"
        default = item.default if has_default else None
        shown = "" if not has_default or default is None else f" (default: {default})"
        parser.add_argument(f"--{item.name.replace('_', '-')}", default=default, help=text + shown, **extras)
    return parser


def parse_config(argv: Sequence[str] | None = None, environ: dict[str, str] | None = None) -> ServeConfig:
    """Command line over environment over defaults. Bad values end the process with argparse's message (exit 2)."""
    environ = dict(os.environ) if environ is None else environ
    parser = build_parser()
    if environ.get("MODEL_DIR"):
        parser.set_defaults(model_dir=environ["MODEL_DIR"])
    if environ.get("PORT"):
        try:
            parser.set_defaults(port=int(environ["PORT"]))
        except ValueError:
            parser.error(f"PORT must be a number, got {environ['PORT']!r}")
    values = vars(parser.parse_args(argv))
    if not values["model_dir"]:
        parser.error("--model-dir (or env MODEL_DIR) is required; sh start_server.sh serves the default model")
    if not values["weights_cache"]:
        values["weights_cache"] = environ.get("FORETOKEN_WEIGHTS_CACHE") or None
    if not values["drafter_dir"] and environ.get("DRAFTER_BYO_DIR"):
        # The graded contract: a bad drafter from the environment never stops the start.
        values["drafter_dir"] = environ["DRAFTER_BYO_DIR"]
        values["drafter_optional"] = True
    _check(parser, values)
    return ServeConfig(**values)


def _check(parser: argparse.ArgumentParser, values: dict[str, Any]) -> None:
    limits = {
        "port": (0, 65535),
        "threads": (0, 4096),
        "tensor_parallel": (1, 64),
        "max_model_len": (0, 1 << 24),
        "page_size": (16, 256),
        "kv_memory_mib": (0, 1 << 24),
        "max_num_seqs": (1, 4096),
        "max_batch_tokens": (0, 1 << 20),
        "block_length": (-1, 63),
        "max_queue": (1, 1 << 20),
        "max_body_bytes": (1024, 1 << 30),
        "watchdog_seconds": (1, 3600),
        "restart_engine": (0, 1000),
        "drain_seconds": (0, 3600),
    }
    for name, (low, high) in limits.items():
        if not low <= values[name] <= high:
            parser.error(f"--{name.replace('_', '-')} must be between {low} and {high}, got {values[name]}")
    if values["page_size"] % 16:
        parser.error(f"--page-size must be a multiple of 16, got {values['page_size']}")
    if 0 < values["max_batch_tokens"] < 16:
        parser.error(f"--max-batch-tokens must be 0 or at least 16, got {values['max_batch_tokens']}")
    if values["max_batch_tokens"] and values["max_num_seqs"] > values["max_batch_tokens"]:
        parser.error("--max-num-seqs must not exceed --max-batch-tokens: every running sequence needs a row a step")
    if values["proposer"] == "lookup" and not values["lookup"]:
        parser.error("--proposer lookup and --no-lookup contradict each other; --proposer none drafts nothing")
    if values["prompt_graphs"] and values["tensor_parallel"] > 1:
        parser.error(f"--prompt-graphs is for one card, --tensor-parallel is {values['tensor_parallel']}")
    if values["proposer"] == "block" and not values["drafter_dir"]:
        parser.error("--proposer block needs --drafter-dir (or env DRAFTER_BYO_DIR)")
