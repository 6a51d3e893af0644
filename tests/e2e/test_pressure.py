"""A tiny model with a wrong drafter and a KV pool that is too small: ends of the context, preemption, cancellation."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.real_server import RealServer, Stream, ask, both_ways, together
from tests.serve.api.live_server import eventually

TEXT = "completions"
PAGE = 16


@pytest.fixture(scope="module")
def pressed(tiny_pair: tuple[Path, Path]) -> Iterator[RealServer]:
    """About 450 tokens of KV memory for a model of 512 positions; drafts in every round."""
    model, drafter = tiny_pair
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2], "temperature": 1.0}))
    arguments = (
        *("--weights", "fp32", "--kv-memory-mib", "1", "--page-size", str(PAGE), "--block-length", "5"),
        *("--max-batch-tokens", "32", "--max-num-seqs", "32"),
    )
    with RealServer(model, "--drafter-dir", str(drafter), *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def http(pressed: RealServer) -> Iterator[httpx.Client]:
    with pressed.client(limits=httpx.Limits(max_connections=100)) as client:
        yield client


@pytest.fixture(scope="module")
def context(http: httpx.Client) -> int:
    return int(http.get("/v1/models").json()["data"][0]["max_model_len"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return [4 + (7 * i + 13 * seed + i * i) % 250 for i in range(length)]


def greedy(length: int, seed: int = 0, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt(length, seed), "temperature": 0, "ignore_eos": True, **fields}


def idle(server: RealServer) -> bool:
    """No request is left and every page is free again."""
    running = server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")
    return running == 0 and server.metric("foretoken:kv_pages_free") == server.metric("foretoken:kv_pages") > 0


def test_the_pool_limits_the_context_and_a_request_over_it_is_refused_at_once(
    http: httpx.Client, context: int, pressed: RealServer
) -> None:
    assert context < 512
    assert context == pressed.metric("foretoken:kv_pages") * PAGE
    refused = http.post("/v1/completions", json=greedy(context, 1, max_tokens=8))
    assert refused.status_code == 400
    assert str(context) in refused.json()["error"]["message"]
    short = together(http, TEXT, [greedy(10, seed, max_tokens=4) for seed in range(10)])
    assert [answer.completion_tokens for answer in short] == [4] * 10


def test_answers_end_at_the_context_whatever_the_block_would_reach(http: httpx.Client, context: int) -> None:
    for spare in (*range(1, 9), PAGE, PAGE + 1):
        answer = ask(http, TEXT, greedy(context - spare))
        assert (answer.finish_reason, answer.completion_tokens) == ("length", spare)
        assert http.post("/v1/completions", json=greedy(context - spare, max_tokens=spare + 1)).status_code == 400


def test_every_end_token_of_every_source_ends_an_answer(http: httpx.Client) -> None:
    for end in ("0", "2"):
        body = {"prompt": prompt(5), "temperature": 0, "max_tokens": 20, "logit_bias": {end: 100}}
        answer = both_ways(http, TEXT, body)
        assert (answer.text, answer.finish_reason, answer.completion_tokens) == ("", "stop", 1)


def test_preempted_requests_lose_and_repeat_nothing(http: httpx.Client, pressed: RealServer) -> None:
    bodies = [greedy(20 + seed, seed, max_tokens=60 + seed, logprobs=2) for seed in range(16)]
    alone = [http.post("/v1/completions", json=body).json()["choices"] for body in bodies]
    before = pressed.metric("vllm:num_preemptions_total")
    streams = [Stream(http, TEXT, body) for body in bodies]
    for stream, choices in zip(streams, alone, strict=True):
        stream.join(120)
        assert stream.ended_well()
        frames = [json.loads(part[6:]) for part in stream.body.split("\n\n")[:-2]]
        parts = [frame["choices"][0] for frame in frames]
        assert "".join(part["text"] for part in parts) == choices[0]["text"]
        tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
        assert tokens == choices[0]["logprobs"]["tokens"]
    assert pressed.metric("vllm:num_preemptions_total") > before
    eventually(lambda: idle(pressed))


def test_scored_prompts_are_whole_under_pressure(http: httpx.Client, pressed: RealServer) -> None:
    bodies = [greedy(110 + 5 * seed, seed, max_tokens=60, echo=True, logprobs=0) for seed in range(8)]
    alone = [http.post("/v1/completions", json=body).json()["choices"] for body in bodies]
    before = pressed.metric("vllm:num_preemptions_total")
    streams = [Stream(http, TEXT, body) for body in bodies]
    for stream, choices in zip(streams, alone, strict=True):
        stream.join(120)
        assert stream.ended_well()
        frames = [json.loads(part[6:]) for part in stream.body.split("\n\n")[:-2]]
        scores = [
            s for f in frames if f["choices"][0]["logprobs"] for s in f["choices"][0]["logprobs"]["token_logprobs"]
        ]
        assert scores == choices[0]["logprobs"]["token_logprobs"]
    assert pressed.metric("vllm:num_preemptions_total") > before


def test_clients_that_leave_free_their_pages(pressed: RealServer) -> None:
    with pressed.client() as leaving:
        streams = [Stream(leaving, TEXT, greedy(30, seed, max_tokens=300)) for seed in range(5)]
        eventually(lambda: any(stream.body for stream in streams))
        eventually(lambda: pressed.metric("foretoken:kv_pages_free") < pressed.metric("foretoken:kv_pages"))
        for stream in streams:
            stream.leave()
    eventually(lambda: idle(pressed), 5)
    assert pressed.metric("vllm:request_success_total", finished_reason="abort") >= 1


def test_sampled_tokens_follow_the_targets_distribution(http: httpx.Client, tiny_pair: tuple[Path, Path]) -> None:
    """Chi-square over the second token, which comes from a round that verified a draft, by its log-probability."""
    draws = 480
    ids = prompt(7, 3)
    body = {"prompt": ids, "temperature": 1, "n": 16, "max_tokens": 3, "logprobs": 0, "ignore_eos": True}
    seen: Counter[int] = Counter()
    for seed in range(draws // 16):
        for choice in http.post("/v1/completions", json={**body, "seed": seed}).json()["choices"]:
            seen[math.floor(2 * choice["logprobs"]["token_logprobs"][1] + 0.123)] += 1
    model = AutoModelForCausalLM.from_pretrained(tiny_pair[0]).float().eval()
    with torch.inference_mode():
        first = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1)
        pairs = torch.tensor([[*ids, token] for token in range(len(first))])
        second = torch.log_softmax(model(pairs).logits[:, -1].double(), -1)
    expected: dict[int, float] = defaultdict(float)
    weights = (first[:, None] + second).exp() * draws
    for value, weight in zip(second.flatten().tolist(), weights.flatten().tolist(), strict=True):
        expected[math.floor(2 * value + 0.123)] += weight
    assert chi_square_p(seen, expected) > 0.001


def chi_square_p(seen: Counter[int], expected: dict[int, float]) -> float:
    """Upper tail of the chi-square statistic (Wilson-Hilferty); bins that expect fewer than 5 are put together."""
    rare = [key for key in expected if expected[key] < 5]
    bins = [(seen[key], expected[key]) for key in expected if expected[key] >= 5]
    bins.append((sum(seen.values()) - sum(s for s, _ in bins), sum(expected[key] for key in rare)))
    statistic = sum((s - e) ** 2 / e for s, e in bins)
    freedom = len(bins) - 1
    assert freedom >= 5
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))
