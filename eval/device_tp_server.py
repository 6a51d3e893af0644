"""The real server with a model split over ranks: the text it writes beside that of one rank, and the loss of a rank.

A small model with random weights, whose words stand far above the rest, so that text is ids. Knows HTTP and processes;
no tensors but those of the checkpoint it writes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from eval.device_http import prompt_ids
from eval.random_model import write_random_model
from eval.servers import ManagedServer, descendants, our_server, parent_of

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
FORMATS = ("fp32", "bf16")
PROMPTS = (5, 17, 40, 100, 300, 700)
TOKENS = 64
SECONDS = 120.0


def server_facts(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """How many answers of several ranks are those of one, by weight format; and what happens when a rank is killed
    while it answers."""
    (scratch / "config.json").write_text(json.dumps(SMALL))
    device = options.device
    model = write_random_model(
        str(scratch / "config.json"), options.tokenizer_dir, scratch / "small", torch.bfloat16, device=device
    )
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        waiting = {
            (weights, ranks): pool.submit(stack.enter_context, _server(model, device, weights, ranks))
            for weights in FORMATS
            for ranks in (1, options.ranks)
        }
        servers = {key: future.result() for key, future in waiting.items()}
        for weights in FORMATS:
            one, many = (_answers(servers[weights, ranks].url) for ranks in (1, options.ranks))
            found[f"{weights} answers"] = len(one)
            found[f"{weights} equal"] = sum(a == b for a, b in zip(one, many, strict=True))
        lost = servers[FORMATS[-1], options.ranks]
        found["lost rank"] = _lose(lost)
        found["answers after the restart equal"] = _answers(lost.url) == many
    return found


def _server(model: Path, device: str, weights: str, ranks: int) -> ManagedServer:
    arguments = ["--device", device, "--weights", weights, "--tensor-parallel", str(ranks), "--max-num-seqs", "8"]
    arguments += ["--kv-memory-mib", "512", "--max-model-len", "4096", "--served-model-name", "default"]
    if ranks > 1:
        arguments += ["--restart-engine", "1"]
    return our_server(model, f"{weights} x{ranks}", *arguments, *(("--threads", "1") if device == "cpu" else ()))


def _answers(url: str) -> list[str]:
    with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
        answers = [client.post("/v1/completions", json=_body(count)) for count in PROMPTS]
    return [str(answer.raise_for_status().json()["choices"][0]["text"]) for answer in answers]


def _body(prompt: int, tokens: int = TOKENS, stream: bool = False) -> dict[str, Any]:
    ids = prompt_ids(prompt, prompt)
    return {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}


def _lose(server: ManagedServer) -> dict[str, Any]:
    """Kill a rank while its server streams: seconds to the stream's end and to health, and the stream's last words."""
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as client:
        with client.stream("POST", "/v1/completions", json=_body(50, 3000, stream=True)) as answer:
            lines = _lines(answer)
            next(lines)
            os.kill(_rank(server), signal.SIGKILL)
            started = time.monotonic()
            last = [line for line in lines if line != "data: [DONE]"][-1]
            ended = time.monotonic() - started
        while time.monotonic() - started < SECONDS:
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health").status_code == 200:
                    break
            time.sleep(0.05)
        healthy = time.monotonic() - started
    return {"stream ended after s": ended, "healthy after s": healthy, "last frame": last[:300]}


def _lines(answer: httpx.Response) -> Iterator[str]:
    """What comes until the stream ends, in whatever way."""
    with contextlib.suppress(httpx.HTTPError):
        yield from (line for line in answer.iter_lines() if line)


def _rank(server: ManagedServer) -> int:
    """The process of rank 1: a child of the engine, which is a child of the server."""
    engine = server.child_pid()
    ranks = [pid for pid in descendants(engine) if parent_of(pid) == engine and "serve.parallel" in _command(pid)]
    if len(ranks) != 1:
        raise RuntimeError(f"the engine {engine} has the ranks {ranks}")
    return ranks[0]


def _command(pid: int) -> Sequence[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return ()
