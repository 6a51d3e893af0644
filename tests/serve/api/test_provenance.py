"""The opt-in account of token sources in streams, and the way out of speculation, against the scripted engine."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.serve.api.live_server import LiveServer, chat, events

ASKED = {"stream": True, "stream_options": {"include_provenance": True}}


def entries(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [entry for choice in choices for entry in choice.get("provenance", [])]


def test_every_token_has_its_source_and_the_texts_join_to_the_answer(http: httpx.Client) -> None:
    body = chat("!say:aé龜🫠z end! !chunk:3!", **ASKED)
    chunks = events(http.post("/v1/chat/completions", json=body).text)
    found = entries(chunks)
    tokens = [token for entry in found for token in entry["tokens"]]
    text = "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"])
    assert "".join(token["text"] for token in tokens) == text == "aé龜🫠z end"
    assert bytes(token["id"] for token in tokens[:-1]).decode() == text
    assert (tokens[-1]["id"], tokens[-1]["source"]) == (257, "target")
    assert found[0]["round"] is None
    for entry in found[1:]:
        sources = [token["source"] for token in entry["tokens"]]
        assert entry["round"] == {"proposer": "block", "drafted": 7, "accepted": sources.count("block")}
        assert sources == sorted(sources)  # accepted drafts, then the target's own


def test_completions_have_it_too_and_the_echo_is_no_part_of_it(http: httpx.Client) -> None:
    body = {"prompt": "!say:hello!", "echo": True, **ASKED}
    chunks = events(http.post("/v1/completions", json=body).text)
    told = "".join(token["text"] for entry in entries(chunks) for token in entry["tokens"])
    assert told == "hello"
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "!say:hello!" + told


def test_each_choice_has_its_own(http: httpx.Client) -> None:
    chunks = events(http.post("/v1/chat/completions", json=chat("!say:abcdef! !slow:0.01!", n=2, **ASKED)).text)
    for index in range(2):
        assert "".join(t["text"] for e in entries(chunks, index) for t in e["tokens"]) == "abcdef"


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_provenance": False}])
def test_nothing_is_added_unless_asked_for(http: httpx.Client, options: dict[str, bool] | None) -> None:
    text = http.post("/v1/chat/completions", json=chat("!say:hi!", stream=True, stream_options=options)).text
    assert "provenance" not in text


def test_the_openai_client_streams_past_it(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=server.base + "/v1", api_key="-", max_retries=0)
    stream = client.chat.completions.create(
        model=server.model_dir.name,
        messages=[{"role": "user", "content": "!say:hello there!"}],
        stream=True,
        extra_body={"stream_options": {"include_provenance": True}, "speculation": False},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello there"
    assert (chunks[0].choices[0].model_extra or {})["provenance"][0]["round"] is None
    assert server.messages("generate")[-1]["params"]["speculation"] is False
