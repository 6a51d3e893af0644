"""Prompts of many megabytes: refused or served, while /health is answered all the time and memory stays bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.tokenizer import TooManyTokens, load_tokenizer
from tests.e2e.real_server import RealServer
from tests.tiny_models import write_model, write_tokenizer

MEGABYTES = 20_000_000
PIECE = 5000
# The bound for users is one second on a machine of their own; here others compute as well.
HEALTH_SECONDS = 3.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A context so long that 20 MB of text could fit by their size: it is the tokenizer that has to find out."""
    folder = tmp_path_factory.mktemp("long")
    write_model(folder, max_position_embeddings=1 << 21)
    with RealServer(folder, "--weights", "fp32", "--max-body-bytes", str(2 * MEGABYTES)) as live:
        yield live


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"prompt": "x" * MEGABYTES}),
        ("chat/completions", {"messages": [{"role": "user", "content": "word " * (MEGABYTES // 5)}]}),
        ("completions", {"prompt": [5] * (MEGABYTES // 3)}),
        ("completions", {"prompt": "x", "metadata": [[]] * (MEGABYTES // 4), "max_tokens": 1}),
    ],
    ids=["text", "chat", "ids", "ignored field"],
)
def test_health_answers_during_a_prompt_of_20_megabytes(server: RealServer, route: str, body: dict[str, Any]) -> None:
    found: list[httpx.Response] = []

    def ask() -> None:
        found.append(httpx.post(f"{server.base}/v1/{route}", json=body, timeout=120, trust_env=False))

    asking = threading.Thread(target=ask)
    asking.start()
    worst = 0.0
    with server.client() as http:
        while asking.is_alive():
            started = time.monotonic()
            assert http.get("/health").status_code == 200
            worst = max(worst, time.monotonic() - started)
            time.sleep(0.02)
    asking.join()
    assert worst < HEALTH_SECONDS
    assert found[0].status_code == 400
    assert found[0].json()["error"]["code"] == ("invalid_json" if "metadata" in body else "context_length_exceeded")


def test_brackets_in_a_text_are_not_counted(server: RealServer) -> None:
    text = '[{"a": "\\"[' * 20_000
    with server.client() as http:
        assert http.post("/tokenize", json={"prompt": text}).json()["count"] == len(text)


def test_a_long_text_is_counted_in_pieces_and_never_refused_when_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.tokenizer.PIECE_CHARACTERS", PIECE)
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in ("ab " * (PIECE // 2), "é" * (PIECE + 7), "x" * (2 * PIECE)):
        exact = len(text.encode())  # one token a byte
        assert len(tokenizer.encode(text, add_special_tokens=False, limit=exact)) == exact
        with pytest.raises(TooManyTokens):
            tokenizer.encode(text, add_special_tokens=False, limit=exact - 200)
