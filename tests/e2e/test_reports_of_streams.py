"""Public bug reports about stop strings, odd texts, streams and clients that leave, tried on the default model."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.real_server import RealServer, Stream, ask, both_ways, chat_body
from tests.serve.api.live_server import events, eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COUNT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"


def text_body(**fields: Any) -> dict[str, Any]:
    return {"prompt": COUNT, "temperature": 0, "max_tokens": 40, **fields}


@pytest.mark.parametrize("stops", [[" 17", " 15", " 16"], [" 15, 16", " 15"], [" 15", " 15, 16"], [" 15", " 15"]])
def test_the_stop_that_comes_first_in_the_text_ends_it(http: httpx.Client, stops: list[str]) -> None:
    answer = both_ways(http, "completions", text_body(stop=stops))
    assert answer.text == " 14,"
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["5, 1", " 1", "6,", ", 17"])
def test_a_stop_string_need_not_begin_or_end_with_a_token(
    http: httpx.Client, plain_http: httpx.Client, stop: str
) -> None:
    free = ask(http, "completions", text_body()).text
    answer = both_ways(http, "completions", text_body(stop=[stop]))
    assert answer.text == free[: free.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.completion_tokens == ask(plain_http, "completions", text_body(stop=[stop])).completion_tokens


def test_a_stop_that_never_comes_changes_nothing_and_sends_no_empty_chunks(http: httpx.Client) -> None:
    free = ask(http, "completions", text_body()).text
    stops = ["Observation:", "\nAction Input", " 15, 16, 18", "zzz"]
    response = http.post(TEXT, json=text_body(stop=stops, stream=True))
    parts = [choice for chunk in events(response.text) for choice in chunk["choices"]]
    assert "".join(part["text"] for part in parts) == free
    assert all(part["text"] for part in parts[:-1])
    assert all("finish_reason" in part for part in parts)
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_is_refused_since_every_token_would_match(http: httpx.Client, stop: Any) -> None:
    response = http.post(TEXT, json=text_body(stop=stop))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_is_no_stop(http: httpx.Client, stop: Any) -> None:
    assert ask(http, "completions", text_body(stop=stop)) == ask(http, "completions", text_body())


def test_a_stop_string_in_the_prompt_or_across_its_end_stops_nothing(http: httpx.Client) -> None:
    free = ask(http, "completions", text_body()).text
    for stop in ("12, 13,", "13, 14", ", 13, 14"):
        assert both_ways(http, "completions", text_body(stop=[stop])).text == free
        assert ask(http, "completions", text_body(stop=[stop], echo=True)).text == COUNT + free


TEXTS = [
    "寫一首關於勇敢的水手的詩",
    "🤷🏽‍♀️" * 5,
    "a" * 600,
    " " * 3000,
    "\n\n\n\t\r\n\u2028\u0085\u00a0",
    "\x00\x01\x1b[31m\x7f",
    "e\u0301" * 30 + "\u200d\ufeff\u202e",
    '\\u0041 \\n {"a": [1, 2]} </s> [INST] <<SYS>> data: [DONE]\n\n',
    "\U0010ffff\ue000\ufffd",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_any_text_is_answered_and_survives_the_tokeniser(http: httpx.Client, text: str) -> None:
    started = time.monotonic()
    answer = both_ways(http, "chat/completions", chat_body(text, max_tokens=2))
    assert answer.completion_tokens <= 2
    ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
    assert time.monotonic() - started < 60


def test_wild_sampling_streams_nothing_but_json_and_utf8(http: httpx.Client) -> None:
    body = {"prompt": "\U0001f979", "temperature": 2, "top_p": 1, "max_tokens": 40, "ignore_eos": True, "seed": 7}
    response = http.post(TEXT, json={**body, "stream": True, "logprobs": 3})
    lines = [line for line in response.content.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert lines[-1] == b"data: [DONE]"
    assert text == http.post(TEXT, json=body).json()["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_a_status_and_never_an_event(http: httpx.Client, stream: bool) -> None:
    context = http.get("/v1/models").json()["data"][0]["max_model_len"]
    response = http.post(CHAT, json=chat_body("Hi", max_tokens=context, stream=stream))
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_usage_of_every_chunk_grows_and_ends_at_the_total(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http.post(TEXT, json=text_body(stream=True, stream_options=options)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-2:] == [40, 40]
    assert all(
        chunk["usage"]["total_tokens"] == n + chunk["usage"]["prompt_tokens"]
        for chunk, n in zip(chunks, counts, strict=True)
    )
    assert chunks[-1]["choices"] == []


def test_a_client_that_leaves_during_a_long_prompt_costs_nobody_anything(
    http: httpx.Client, speculative: RealServer
) -> None:
    before = speculative.metric("vllm:num_requests_running")
    answer = ask(http, "completions", text_body())
    ids = [1000 + i * 7919 % 40000 for i in range(4000)]
    for wait in (0.02, 0.2, 0.6):
        with pytest.raises(httpx.TimeoutException):
            http.post(TEXT, json={"prompt": ids, "max_tokens": 8}, timeout=wait)
    assert ask(http, "completions", text_body()) == answer
    eventually(lambda: speculative.metric("vllm:num_requests_running") == before == 0)
    eventually(lambda: speculative.metric("vllm:kv_cache_usage_perc") == 0)


def test_clients_that_leave_at_any_event_leave_others_alone(http: httpx.Client, speculative: RealServer) -> None:
    whole = ask(http, "completions", text_body()).text
    stayers = [Stream(http, "completions", text_body()) for _ in range(3)]
    for pieces in (1, 2, 5, 8):
        with http.stream("POST", TEXT, json=text_body(stream=True)) as response:
            for count, _ in enumerate(response.iter_lines()):
                if count >= pieces:
                    break
    for stayer in stayers:
        stayer.join(60)
        assert stayer.ended_well()
        parts = [choice["text"] for chunk in events(stayer.body) for choice in chunk["choices"]]
        assert "".join(parts) == whole
    eventually(lambda: speculative.metric("vllm:num_requests_running") == 0)


def test_a_turn_of_the_assistant_at_the_end_is_a_turn_like_any_other(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    begun = [*messages, {"role": "assistant", "content": "  The capital is "}]
    counts = [
        http.post("/tokenize", json={"messages": asked}).json()["count"]
        for asked in (messages, begun, [*begun, {"role": "user", "content": "Go on."}])
    ]
    assert counts[0] < counts[1] < counts[2]
    response = http.post(CHAT, json={"messages": begun, "max_tokens": 4, "continue_final_message": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"
