"""The naive reference server and random-weight checkpoints, on a two-layer model made here."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eval.client import Measurement, TokenizerCounter, measure, open_client, send, served_model, user_request
from eval.naive import NaiveModel, build_app
from eval.random_model import tensor_sizes, word_ids, write_random_model
from eval.servers import free_port
from eval.shapes import named_config, shape_from_config

WORDS = "river lemon copper window garden silver market winter"
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "attention_bias": False, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("tokenizer")
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([f" {WORDS} {WORDS}"] * 20, trainer)
    tokenizer.save(str(source / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "config.json").write_text(json.dumps(TINY))
    import torch

    return write_random_model(str(source), source, tmp_path_factory.mktemp("model"), torch.float32)


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    port = free_port()
    app = build_app(NaiveModel(str(checkpoint), "cpu", "fp32", threads=1), "tiny")
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def ask(url: str, checkpoint: Path, count: int = 1) -> list[Measurement]:
    async def work() -> list[Measurement]:
        async with open_client(url) as client:
            model = await served_model(client)
            records = await asyncio.gather(
                *(send(client, model, user_request(f"tell me of {n}", 12)) for n in range(count))
            )
        return [measure(record, TokenizerCounter(checkpoint)) for record in records]

    return asyncio.run(work())


def test_random_weights_write_words_that_tokenise_back_to_what_was_made(url: str, checkpoint: Path) -> None:
    (item,) = ask(url, checkpoint)
    assert (item.outcome, item.tokens, item.usage_tokens) == ("ok", 12, 12)
    assert all(word in WORDS.split() for word in item.text.split())


def test_the_naive_server_sends_one_token_a_chunk_and_serves_one_request_at_a_time(url: str, checkpoint: Path) -> None:
    items = ask(url, checkpoint, count=3)
    assert {item.outcome for item in items} == {"ok"}
    assert all(len(item.icl) >= 10 for item in items)
    spans = sorted((item.finished_at - sum(item.icl), item.finished_at) for item in items)
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    assert starts[1] >= ends[0] - 0.05
    assert starts[2] >= ends[1] - 0.05


def test_plain_answers_and_refusals(url: str, checkpoint: Path) -> None:
    async def work() -> list[Any]:
        async with open_client(url) as client:
            good = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
            return [
                await client.post("/v1/chat/completions", json=good),
                await client.post("/v1/chat/completions", json={"messages": []}),
                await client.get("/health"),
            ]

    answer, refusal, health = asyncio.run(work())
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert refusal.status_code == 400
    assert health.status_code == 200


def test_words_are_found_and_a_tokenizer_without_them_is_refused(checkpoint: Path) -> None:
    tokenizer: Any = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = word_ids(tokenizer)
    assert {tokenizer.decode([index]).strip() for index in ids} >= set(WORDS.split())
    with pytest.raises(ValueError, match="no plain words"):
        word_ids(Tokenizer(models.BPE()))


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b", "llama3-8b", "smollm2-135m"])
def test_tensor_list_and_parameter_count_agree(name: str) -> None:
    config = named_config(name)
    total = 0
    for size in tensor_sizes(config).values():
        total += size[0] * (size[1] if len(size) > 1 else 1)
    assert total == shape_from_config(config).parameters
