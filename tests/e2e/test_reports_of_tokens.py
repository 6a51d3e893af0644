"""Public bug reports about log-probabilities, token ids, penalties and biases under drafts, tried on the default model.

``http`` is a server whose every round verifies a draft, ``plain_http`` one that never drafts.
"""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from tests.e2e.real_server import chat_body, together
from tests.serve.api.live_server import events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EMOJI = "🥹🫠龜" * 3
COUNT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"


def post(http: httpx.Client, route: str, **body: Any) -> Any:
    response = http.post(route, json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, route: str, **body: Any) -> list[Any]:
    response = http.post(route, json={"temperature": 0, "stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response.content.decode("utf-8"))


def choices(chunks: list[Any]) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def ids_of(http: httpx.Client, text: str) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return found


def test_bytes_of_logprobs_join_to_the_text_of_characters_cut_across_tokens(http: httpx.Client) -> None:
    reply = post(http, CHAT, **chat(f"Repeat exactly: {EMOJI}", max_tokens=24, logprobs=True, top_logprobs=4))
    content = reply["choices"][0]["logprobs"]["content"]
    joined = bytes(byte for token in content for byte in token["bytes"])
    assert joined.decode("utf-8", "ignore").startswith(reply["choices"][0]["message"]["content"])
    for token in content:
        for shown in (token, *token["top_logprobs"]):
            assert shown["token"] != ""
            assert "\ufffd" not in shown["token"]
            assert bytes(shown["bytes"]) != b"\xef\xbf\xbd"


def test_every_token_has_its_own_record_and_alternatives_whole_and_streamed(http: httpx.Client) -> None:
    body = chat(COUNT, max_tokens=24, logprobs=True, top_logprobs=5)
    whole = post(http, CHAT, **body)
    chunks = stream(http, CHAT, **body, stream_options={"include_usage": True})
    records = whole["choices"][0]["logprobs"]["content"]
    streamed = [record for choice in choices(chunks) for record in choice["logprobs"]["content"]]
    assert streamed == records
    assert len(records) == whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
    assert all(len(record["top_logprobs"]) == 5 for record in records)
    assert len({str(record["top_logprobs"]) for record in records}) > 1
    assert any(len(choice["logprobs"]["content"]) > 1 for choice in choices(chunks)), "no chunk held several tokens"


@pytest.mark.parametrize("temperature", [0, 1])
def test_logprobs_with_drafts_are_those_without(
    http: httpx.Client, plain_http: httpx.Client, temperature: float
) -> None:
    body = chat(COUNT, max_tokens=24, logprobs=True, top_logprobs=3, temperature=temperature, seed=3)
    drafted, undrafted = (post(server, CHAT, **body)["choices"][0] for server in (http, plain_http))
    assert drafted == undrafted
    assert any(record["logprob"] < -1e-4 for record in drafted["logprobs"]["content"])


def test_ids_and_logprobs_end_with_the_stop_string_inside_a_block(http: httpx.Client, plain_http: httpx.Client) -> None:
    body = {"prompt": COUNT, "stop": [" 17,"], "max_tokens": 60, "logprobs": 1, "return_token_ids": True}
    drafted, undrafted = (post(server, TEXT, **body) for server in (http, plain_http))
    assert drafted["choices"] == undrafted["choices"]
    (choice,) = drafted["choices"]
    assert choice["finish_reason"] == "stop"
    assert " 17," not in choice["text"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == drafted["usage"]["completion_tokens"]


def test_a_stop_token_within_the_cap_wins_over_the_cap(http: httpx.Client, plain_http: httpx.Client) -> None:
    (comma,) = ids_of(http, ",")
    for cap in range(1, 9):
        body = {"prompt": COUNT[:-1], "stop_token_ids": [comma], "max_tokens": cap, "return_token_ids": True}
        drafted, undrafted = (post(server, TEXT, **body) for server in (http, plain_http))
        assert drafted["choices"] == undrafted["choices"]
        ids = drafted["choices"][0]["token_ids"]
        assert len(ids) == drafted["usage"]["completion_tokens"] <= cap
        ended = drafted["choices"][0]["finish_reason"]
        assert (ended == "stop") == (comma in ids)
        assert ids.count(comma) <= 1


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda penalty: "+".join(penalty))
def test_penalties_act_alike_with_drafts_and_a_cached_prompt(
    http: httpx.Client, plain_http: httpx.Client, penalty: dict[str, Any]
) -> None:
    body = {"prompt": COUNT, "max_tokens": 24, "return_token_ids": True, "cache_salt": str(penalty)}
    drafted = [post(http, TEXT, **body, **penalty) for _ in range(2)]
    undrafted = post(plain_http, TEXT, **body, **penalty)
    assert drafted[0]["choices"] == drafted[1]["choices"] == undrafted["choices"]
    assert drafted[0]["choices"] != post(http, TEXT, **body)["choices"], "the penalty did nothing"


def test_a_banned_token_is_never_drafted_into_the_text(http: httpx.Client, plain_http: httpx.Client) -> None:
    free = post(http, TEXT, prompt=COUNT, max_tokens=24, return_token_ids=True)["choices"][0]["token_ids"]
    banned = max(set(free), key=free.count)
    body = {"prompt": COUNT, "max_tokens": 24, "return_token_ids": True, "logit_bias": {str(banned): -100}}
    drafted, undrafted = (post(server, TEXT, **body)["choices"] for server in (http, plain_http))
    assert drafted == undrafted
    assert banned not in drafted[0]["token_ids"]


def test_a_forced_token_is_the_only_one(http: httpx.Client) -> None:
    (forced,) = ids_of(http, " rice")
    body = {"prompt": COUNT, "max_tokens": 6, "return_token_ids": True, "logit_bias": {str(forced): 100}}
    reply = post(http, TEXT, **body, logprobs=5)
    assert reply["choices"][0]["token_ids"] == [forced] * 6
    assert reply["choices"][0]["text"] == " rice" * 6


@pytest.mark.parametrize("kind", ["stop", "stop_token_ids"])
def test_no_stop_counts_before_the_least_tokens(http: httpx.Client, plain_http: httpx.Client, kind: str) -> None:
    """A stop string is read past until then; a stop token is not chosen until then."""
    (comma,) = ids_of(http, ",")
    stop: Any = {"stop": [","]} if kind == "stop" else {"stop_token_ids": [comma]}
    body = {"prompt": COUNT[:-1], "max_tokens": 40, "return_token_ids": True, **stop}
    assert post(http, TEXT, **body)["usage"]["completion_tokens"] == 1
    drafted, undrafted = (post(server, TEXT, **body, min_tokens=15) for server in (http, plain_http))
    assert drafted["choices"] == undrafted["choices"]
    assert drafted["usage"]["completion_tokens"] > 15
    assert (comma in drafted["choices"][0]["token_ids"][:15]) == (kind == "stop")


def test_ignored_ends_show_no_marker_and_reach_the_cap(http: httpx.Client, plain_http: httpx.Client) -> None:
    body = chat("Say hi.", max_tokens=80, ignore_eos=True)
    drafted, undrafted = (post(server, CHAT, **body) for server in (http, plain_http))
    assert drafted["choices"][0]["message"] == undrafted["choices"][0]["message"]
    assert drafted["usage"]["completion_tokens"] == 80
    assert drafted["choices"][0]["finish_reason"] == "length"
    assert "<|im_end|>" not in drafted["choices"][0]["message"]["content"]


@pytest.mark.parametrize("tokens", [31, 32, 33, 64, 65])
def test_scores_of_a_prompt_do_not_depend_on_what_is_cached(http: httpx.Client, tokens: int) -> None:
    prompt = [(i * 37) % 5000 + 100 for i in range(tokens)]
    body = {"prompt": [prompt], "max_tokens": 0, "echo": True, "logprobs": 2, "cache_salt": f"scores {tokens}"}
    first, second = (post(http, TEXT, **body)["choices"][0]["logprobs"] for _ in range(2))
    assert first == second
    assert first["token_logprobs"][0] is None
    assert len(first["tokens"]) == len(first["text_offset"]) == tokens
    assert all(value is not None and value <= 0 for value in first["token_logprobs"][1:])
    generated = {**body, "max_tokens": 1, "echo": False, "logprobs": None}
    assert post(http, TEXT, **generated)["usage"]["prompt_tokens"] == tokens
    assert post(http, TEXT, **body)["choices"][0]["logprobs"] == first


def test_offsets_of_an_echo_cut_its_text_where_the_tokens_do(http: httpx.Client) -> None:
    (choice,) = post(http, TEXT, prompt="The cat sat on the mat.", max_tokens=8, echo=True, logprobs=1)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    edges = [*offsets, len(choice["text"])]
    pieces = [choice["text"][a:b] for a, b in itertools.pairwise(edges)]
    assert pieces == choice["logprobs"]["tokens"]


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 0.05}, {"min_p": 0.9}], ids=str)
def test_scores_are_numbers_of_json_whatever_sampling_removes(http: httpx.Client, sampling: dict[str, Any]) -> None:
    fields = {"temperature": 1, "seed": 1, "max_tokens": 6, **sampling}
    scored = http.post(TEXT, json={"prompt": COUNT, "echo": True, "logprobs": 20, **fields})
    asked = http.post(CHAT, json=chat_body("Hi", logprobs=True, top_logprobs=20, **{**fields, "temperature": 1}))
    for response in (scored, asked):
        assert response.status_code == 200
        assert not any(word in response.text for word in ("NaN", "Infinity"))
    for record in asked.json()["choices"][0]["logprobs"]["content"]:
        assert len(record["top_logprobs"]) == 20


def test_a_seed_holds_beside_requests_without_one(http: httpx.Client) -> None:
    seeded = chat("Write one odd word.", max_tokens=12, temperature=1.2, seed=42)
    free = [chat(f"Name {i} things.", max_tokens=12, temperature=1.2) for i in range(5)]
    alone = post(http, CHAT, **seeded)["choices"][0]["message"]["content"]
    beside = together(http, "chat/completions", [*free, seeded])[-1].text
    assert beside == alone


def test_choices_of_one_request_differ_and_the_first_is_that_of_a_single_one(http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.0, "seed": 11}
    several = post(http, TEXT, **body, n=6)
    texts = [choice["text"] for choice in several["choices"]]
    assert len(set(texts)) == 6
    assert post(http, TEXT, **body)["choices"][0]["text"] == texts[0]
    assert [choice["index"] for choice in several["choices"]] == list(range(6))
    merged: dict[int, str] = {}
    chunks = stream(http, TEXT, **body, n=6, stream_options={"include_usage": True})
    for choice in choices(chunks):
        merged[choice["index"]] = merged.get(choice["index"], "") + choice["text"]
    assert [merged[i] for i in range(6)] == texts
    assert sorted(c["index"] for c in choices(chunks) if c["finish_reason"]) == list(range(6))
    assert chunks[-1]["usage"]["completion_tokens"] == several["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens"] == several["usage"]["prompt_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_equal_requests_at_once_share_pages_and_nothing_else(http: httpx.Client) -> None:
    prompt = " ".join(f"item {i}," for i in range(40))
    greedy = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "cache_salt": "at once"}
    sampled = {**greedy, "temperature": 1.0}
    at_once = together(http, "completions", [greedy] * 4 + [{**sampled, "seed": i} for i in range(4)])
    alone = [post(http, TEXT, **body)["choices"][0]["text"] for body in (greedy, {**sampled, "seed": 2})]
    assert [answer.text for answer in at_once[:4]] == alone[:1] * 4
    assert at_once[6].text == alone[1]


def test_a_wanted_end_waits_for_the_least_tokens(http: httpx.Client) -> None:
    (end,) = http.post("/tokenize", json={"prompt": "<|im_end|>", "add_special_tokens": False}).json()["tokens"]
    body = {"prompt": COUNT, "max_tokens": 20, "logit_bias": {str(end): 100}, "return_token_ids": True}
    assert post(http, TEXT, **body)["choices"][0]["token_ids"] == [end]
    ids = post(http, TEXT, **body, min_tokens=6)["choices"][0]["token_ids"]
    assert len(ids) == 7
    assert ids.index(end) == 6


def test_prompts_of_a_batch_keep_their_order_and_their_own_answers(http: httpx.Client) -> None:
    prompts = [f"The number after {i} is" for i in range(8)]
    reply = post(http, TEXT, prompt=prompts, max_tokens=6, echo=True, n=2, temperature=0.8, seed=1)
    assert [choice["index"] for choice in reply["choices"]] == list(range(16))
    assert all(c["text"].startswith(prompts[c["index"] // 2]) for c in reply["choices"])
    greedy = post(http, TEXT, prompt=prompts, max_tokens=6)["choices"]
    assert [c["text"] for c in greedy] == [
        post(http, TEXT, prompt=prompt, max_tokens=6)["choices"][0]["text"] for prompt in prompts
    ]
