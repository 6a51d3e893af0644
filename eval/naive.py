"""The deliberately naive reference server: one lock, one ``generate`` at a time, one token a chunk.

It is the yardstick of the paired baseline, so it stays simple and correct: transformers' own model, greedy or sampled,
text from a token streamer. It knows nothing of the engine it is compared with.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from eval.options import model_folder

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class NaiveModel:
    """A transformers model behind one lock. Greedy at temperature 0, sampled otherwise."""

    def __init__(self, model_dir: str, device: str, dtype: str, threads: int = 0) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.device = device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=_DTYPES[dtype])
        self.model = model.to(device).eval()
        self.lock = threading.Lock()

    def prompt_ids(self, messages: Sequence[dict[str, Any]]) -> torch.Tensor:
        """[1, length] int64 ids of the chat with the generation prompt."""
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([ids], dtype=torch.int64, device=self.device)

    def generate(self, ids: torch.Tensor, max_tokens: int, temperature: float, ignore_eos: bool, streamer: Any) -> int:
        """Runs one generation under the lock; returns how many tokens it made."""
        options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": temperature > 0, "streamer": streamer}
        if temperature > 0:
            options["temperature"] = temperature
        if ignore_eos:
            options["min_new_tokens"] = max_tokens
        with self.lock, torch.inference_mode():
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return int(output.shape[1] - ids.shape[1])


def build_app(naive: NaiveModel, name: str) -> FastAPI:
    """The routes a measuring client needs: /health, /v1/models and chat completions, streaming or not."""
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "root": name}]}

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any]) -> Response:
        messages, max_tokens = body.get("messages"), int(body.get("max_tokens") or 256)
        if not isinstance(messages, list) or not messages:
            raise HTTPException(400, "messages must be a non-empty list")
        ids = naive.prompt_ids(messages)
        pieces = _run(naive, ids, max_tokens, float(body.get("temperature") or 0.0), bool(body.get("ignore_eos")))
        if body.get("stream"):
            return StreamingResponse(_events(pieces, name, int(ids.shape[1])), media_type="text/event-stream")
        texts: list[str] = []
        count = 0
        for piece in pieces:
            if isinstance(piece, int):
                count = piece
            else:
                texts.append(piece)
        message = {"role": "assistant", "content": "".join(texts)}
        reason = "length" if count >= max_tokens else "stop"
        usage = _usage(int(ids.shape[1]), count)
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return JSONResponse({"object": "chat.completion", "model": name, "choices": [choice], "usage": usage})

    return app


def _run(naive: NaiveModel, ids: torch.Tensor, limit: int, temperature: float, ignore_eos: bool) -> Iterator[str | int]:
    """Pieces of text as they are made, then the number of tokens; raises what the generation raised."""
    streamer = TextIteratorStreamer(naive.tokenizer, skip_prompt=True, skip_special_tokens=True)
    result: SimpleQueue[int | BaseException] = SimpleQueue()

    def work() -> None:
        try:
            result.put(naive.generate(ids, limit, temperature, ignore_eos, streamer))
        except BaseException as fault:
            result.put(fault)
            streamer.on_finalized_text("", stream_end=True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for text in streamer:
        if text:
            yield text
    thread.join()
    outcome = result.get()
    if isinstance(outcome, BaseException):
        raise outcome
    yield outcome


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _events(pieces: Iterator[str | int], name: str, prompt_tokens: int) -> Iterator[str]:
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": name,
    }

    def event(payload: dict[str, Any]) -> str:
        return f"data: {json.dumps({**head, **payload})}\n\n"

    first = True
    for piece in pieces:
        if isinstance(piece, int):
            end = {"index": 0, "delta": {}, "finish_reason": "stop"}
            yield event({"choices": [end]}) + event({"choices": [], "usage": _usage(prompt_tokens, piece)})
            break
        delta = {"role": "assistant", "content": piece} if first else {"content": piece}
        first = False
        yield event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield "data: [DONE]\n\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.naive", description=__doc__)
    parser.add_argument(
        "--model-dir", type=model_folder, required=True, help="folder with config.json, tokenizer and safetensors"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on (default: 8001)")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: cuda if there is one"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", *_DTYPES), help="default: fp32 on a CPU, fp16 on CUDA"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    args = parser.parse_args(argv)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    dtype = ("fp32" if device == "cpu" else "fp16") if args.dtype == "auto" else args.dtype
    naive = NaiveModel(str(args.model_dir), device, dtype, args.threads)
    uvicorn.run(
        build_app(naive, args.model_dir.resolve().name),
        host=args.host,
        port=args.port,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
