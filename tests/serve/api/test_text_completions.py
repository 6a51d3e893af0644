"""Text completions over HTTP: prompt forms, echo, log-probabilities, and the token routes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from drafter_train.backends import Ask, UrlBackend
from tests.serve.api.live_server import LiveServer, events


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_every_prompt_form_gives_one_choice_for_each_prompt(http: httpx.Client) -> None:
    ids = list(b"!say:abc!")
    for prompt, count in (("!say:abc!", 1), (ids, 1), (["!say:abc!"] * 2, 2), ([ids, ids, ids], 3)):
        reply = complete(http, prompt=prompt)
        assert [choice["text"] for choice in reply["choices"]] == ["abc"] * count
        assert [choice["index"] for choice in reply["choices"]] == list(range(count))
        assert reply["usage"]["prompt_tokens"] == 9 * count


@pytest.mark.parametrize("other", [{}, {"max_tokens": 5}, {"max_tokens": 0, "echo": True}])
def test_a_text_is_cut_at_max_completion_tokens_too(http: httpx.Client, other: dict[str, Any]) -> None:
    """Load clients send it to both endpoints, often beside max_tokens."""
    reply = complete(http, prompt="!say:abcdefgh!", max_completion_tokens=3, **other)
    (choice,) = reply["choices"]
    assert choice["text"] == ("!say:abcdefgh!" if "echo" in other else "") + "abc"
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 3)


def test_choices_of_a_prompt_stand_together(http: httpx.Client) -> None:
    reply = complete(http, prompt=["!say:one!", "!say:two!"], n=2)
    assert [choice["text"] for choice in reply["choices"]] == ["one", "one", "two", "two"]
    assert reply["usage"]["prompt_tokens"] == 18
    assert reply["usage"]["completion_tokens"] == 16


def test_several_prompts_stream_merged(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": ["!say:one!", "!say:three!"], "stream": True})
    texts = ["", ""]
    for chunk in events(response.text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["one", "three"]


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_repeats_the_prompt_with_its_logprobs(http: httpx.Client, streamed: bool) -> None:
    body = {"prompt": "!say:xé!", "echo": True, "logprobs": 2, "max_tokens": 3}
    if streamed:
        chunks = events(http.post("/v1/completions", json={**body, "stream": True}).text)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["text"] for choice in choices)
        logprobs: dict[str, list[Any]] = {
            name: [item for choice in choices for item in choice["logprobs"][name]] for name in choices[0]["logprobs"]
        }
    else:
        choice = complete(http, **body)["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "!say:xé!xé"
    tokens = [*"!say:x", "bytes:\\xc3", "bytes:\\xa9", "!", "x", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["tokens"] == tokens
    assert logprobs["token_logprobs"] == [None] + [-0.125] * 11
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"a": -0.25, "b": -0.75, "s": -0.125}
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 9]


def test_echo_with_no_tokens_scores_the_prompt_only(server: LiveServer, http: httpx.Client) -> None:
    reply = complete(http, prompt="abcd", echo=True, logprobs=1, max_tokens=0)
    choice = reply["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == list("abcd")
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    assert server.messages("generate")[-1]["params"]["prompt_logprobs"] == 1


def test_echo_of_token_ids_shows_special_tokens(http: httpx.Client) -> None:
    reply = complete(http, prompt=[256, 104, 105], echo=True, max_tokens=1)
    assert reply["choices"][0]["text"] == "<|im_start|>hio"


def test_a_prompt_that_leaves_room_for_one_token_works_and_one_more_is_refused(http: httpx.Client) -> None:
    reply = complete(http, prompt=[97] * 511, max_tokens=1)
    assert reply["usage"] == {
        "prompt_tokens": 511,
        "completion_tokens": 1,
        "total_tokens": 512,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert complete(http, prompt=[97] * 511)["choices"][0]["finish_reason"] == "length"
    for body in ({"prompt": [97] * 512}, {"prompt": [97] * 513}, {"prompt": [97] * 510, "max_tokens": 3}):
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "512" in response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", ["a<|im_start|>é", [97, 256, 0xC3, 0xA9]], ids=["text", "ids"])
def test_offsets_count_the_control_tokens_that_an_echo_shows(http: httpx.Client, prompt: Any) -> None:
    (choice,) = complete(http, prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"]
    assert choice["text"] == "a<|im_start|>é"
    assert choice["logprobs"]["text_offset"] == [0, 1, 13, 13]


def test_tokenize_and_detokenize_are_inverse_and_match_generation(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "né"}).json()
    assert tokens == {"count": 3, "max_model_len": 512, "tokens": [110, 0xC3, 0xA9]}
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "né"}
    messages = [{"role": "user", "content": "hi"}]
    count = http.post("/tokenize", json={"messages": messages}).json()["count"]
    answer = http.post("/v1/chat/completions", json={"messages": messages}).json()
    assert answer["usage"]["prompt_tokens"] == count
    assert http.post("/detokenize", json={"tokens": [999]}).status_code == 400
    assert http.post("/tokenize", json={}).status_code == 400
    assert http.post("/tokenize", json={"prompt": "a", "messages": messages}).status_code == 400


def test_token_ids_come_beside_the_text_when_asked_for(http: httpx.Client) -> None:
    end = complete(http, prompt="!say:abc!", return_token_ids=True)["choices"][0]["token_ids"][-1]
    body = {"prompt": ["!say:abc!", "!say:né!"], "n": 2, "return_token_ids": True}
    choices = complete(http, **body)["choices"]
    assert [choice["token_ids"] for choice in choices] == [[*b"abc", end]] * 2 + [[*"né".encode(), end]] * 2
    prompts = [list(b"!say:abc!"), list("!say:né!".encode())]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    joined: list[list[int]] = [[], [], [], []]
    asked: list[list[list[int]]] = [[], [], [], []]
    for chunk in events(http.post("/v1/completions", json={**body, "stream": True}).text):
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice["token_ids"]
            if "prompt_token_ids" in choice:
                asked[choice["index"]].append(choice["prompt_token_ids"])
    assert joined == [choice["token_ids"] for choice in choices]
    assert asked == [[choice["prompt_token_ids"]] for choice in choices]
    assert not {"token_ids", "prompt_token_ids"} & complete(http, prompt="!say:abc!")["choices"][0].keys()


def test_a_chat_gives_its_prompts_ids_once(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "!say:abc!"}], "return_token_ids": True}
    tokens = http.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"]
    reply = http.post("/v1/chat/completions", json=body).json()
    assert reply["prompt_token_ids"] == tokens
    assert reply["choices"][0]["token_ids"][:3] == list(b"abc")
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}).text)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [tokens] + [None] * (len(chunks) - 1)
    joined = [i for chunk in chunks for choice in chunk["choices"] for i in choice["token_ids"]]
    assert joined == reply["choices"][0]["token_ids"]


def test_drafter_training_can_write_through_this_server(http: httpx.Client) -> None:
    backend = UrlBackend(f"{http.base_url}/v1".replace("//v1", "/v1"), server_model(http), parallel=2)
    asks = [Ask(tuple(b"!say:abc!"), 20), Ask(tuple(b"!say:wx!"), 1)]
    first, second = backend.complete(asks)
    assert bytes(first[:3]) == b"abc"
    assert len(first) == 4
    assert bytes(second) == b"w"


def server_model(http: httpx.Client) -> str:
    return str(http.get("/v1/models").json()["data"][0]["id"])
