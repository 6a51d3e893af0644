"""Random requests, many at once on too few pages with drafts in every round, against one at a time without drafts.

Penalties, biases, least tokens, stops, log-probabilities, several choices and sampling with a seed are mixed; whatever
is asked, text, ids, scores and ends are those of plain decoding.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.real_server import RealServer
from tests.fuzz.scale import ENVIRONMENT_NAME, cases
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.tiny_models import write_model

AT_ONCE = 16
VOCABULARY = 260


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, RealServer]]:
    folder = tmp_path_factory.mktemp("drafts")
    write_model(folder / "model", num_hidden_layers=5)
    write_drafter(folder / "drafter", random_drafter(drafter_config()))
    common = ("--weights", "fp32", "--page-size", "16", "--max-num-seqs", "32", "--max-body-bytes", "300000")
    few_pages = ("--kv-memory-mib", "1", "--max-batch-tokens", "32", "--block-length", "5")
    with (
        RealServer(folder / "model", "--drafter-dir", str(folder / "drafter"), *common, *few_pages) as drafting,
        RealServer(folder / "model", "--proposer", "none", *common, "--kv-memory-mib", "4") as plain,
    ):
        yield drafting, plain


def random_body(rng: random.Random) -> dict[str, Any]:
    """A completions request; prompts repeat themselves, so that lookup drafts are often right."""
    cycle = [rng.randrange(4, VOCABULARY) for _ in range(rng.randint(1, 12))]
    length = rng.choice([1, 15, 16, 17, 31, 33, rng.randint(2, 150)])
    body: dict[str, Any] = {
        "prompt": (cycle * length)[:length],
        "max_tokens": rng.randint(1, 60),
        "seed": rng.getrandbits(40),
    }
    options: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0, 0, 0.3, 1.0, 2.0]),
        "top_k": lambda: rng.choice([1, 5, 40]),
        "top_p": lambda: rng.choice([0.1, 0.7, 0.95]),
        "min_p": lambda: rng.choice([0.02, 0.3]),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.uniform(0.5, 2),
        "logit_bias": lambda: {
            str(rng.randrange(VOCABULARY)): rng.uniform(-100, 100) for _ in range(rng.randint(1, 5))
        },
        "min_tokens": lambda: rng.randint(0, body["max_tokens"]),
        "ignore_eos": lambda: True,
        "stop": lambda: [rng.choice("abcdefghij ") * rng.randint(1, 2) for _ in range(rng.randint(1, 3))],
        "stop_token_ids": lambda: [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))],
        "logprobs": lambda: rng.choice([0, 1, 5]),
        "n": lambda: rng.randint(1, 3),
        "echo": lambda: True,
        "cache_salt": lambda: rng.choice("ab"),
    }
    for name, make in options.items():
        if rng.random() < (0.6 if name == "temperature" else 0.25):
            body[name] = make()
    return {**body, "return_token_ids": True}


def outcome(http: httpx.Client, body: dict[str, Any]) -> Any:
    response = http.post("/v1/completions", json=body)
    assert response.status_code < 500, response.text
    reply = response.json()
    if response.status_code != 200:
        return reply
    return reply["choices"], reply["usage"]["completion_tokens"], reply["usage"]["prompt_tokens"]


def test_whatever_is_asked_many_at_once_with_drafts_is_answered_as_plainly_and_alone(
    servers: tuple[RealServer, RealServer], tried: Callable[[str], None], tmp_path: Path
) -> None:
    rng = random.Random(None if ENVIRONMENT_NAME in os.environ else 1)
    drafting, plain = servers
    bodies = [random_body(rng) for _ in range(cases(24))]
    limits = httpx.Limits(max_connections=AT_ONCE)
    with drafting.client(limits=limits) as one, plain.client() as other, ThreadPoolExecutor(AT_ONCE) as pool:
        for body, drafted in zip(bodies, pool.map(lambda body: outcome(one, body), bodies), strict=True):
            assert drafted == outcome(other, body), body
            tried("refused" if "error" in drafted else "answered")
    assert drafting.metric("vllm:spec_decode_num_draft_tokens_total") > 0
