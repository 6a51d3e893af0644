"""Chat completions over HTTP, whole and streamed, against the scripted engine."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from tests.serve.api.live_server import LiveServer, chat, events


def stream(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post("/v1/chat/completions", json={**body, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_the_first_chunk_carries_the_role_and_the_first_text(http: httpx.Client) -> None:
    chunks = stream(http, chat("!say:hello there! !slow:0.05!"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "he"}
    assert all("role" not in delta for delta in deltas[1:])
    assert all(delta["content"] for delta in deltas)


def test_nothing_is_sent_before_the_first_text(http: httpx.Client) -> None:
    started = time.monotonic()
    body = chat("!say:🫠x! !slow:0.2! !chunk:1!", stream=True)
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        first = next(response.iter_text())
        # Four tokens make the first character.
        assert time.monotonic() - started >= 0.8
    assert events(first + "\n\ndata: [DONE]\n\n")[0]["choices"][0]["delta"] == {"role": "assistant", "content": "🫠"}


def test_a_stream_has_one_id_and_one_finish_reason_at_its_end(http: httpx.Client) -> None:
    chunks = stream(http, chat("!say:hello there!"))
    assert len({chunk["id"] for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


@pytest.mark.parametrize("cap", [1, 2, 3, 5, 8, 30])
def test_joined_deltas_equal_the_whole_answer_at_every_cap(http: httpx.Client, cap: int) -> None:
    body = chat("!say:aé龜🫠z! !chunk:3!", max_tokens=cap, temperature=0)
    whole = http.post("/v1/chat/completions", json=body).json()
    chunks = stream(http, body)
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert whole["usage"]["completion_tokens"] == min(cap, 12)


def test_an_answer_without_text_is_one_chunk_with_role_and_finish(http: httpx.Client) -> None:
    chunks = stream(http, chat("!say:🫠!", max_tokens=2))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}]
    assert chunks[0]["choices"][0]["finish_reason"] == "length"


def test_usage_comes_in_a_last_chunk_without_choices_and_only_when_asked(http: httpx.Client) -> None:
    body = chat("!say:hello!")
    for unasked in ({}, {"stream_options": {"include_usage": None, "continuous_usage_stats": None}}):
        assert all("usage" not in chunk for chunk in stream(http, {**body, **unasked}))
    chunks = stream(http, {**body, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert chunks[-1]["usage"] == http.post("/v1/chat/completions", json=body).json()["usage"]


def test_continuous_usage_grows_with_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, chat("!say:hello!", stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [2, 4, 6, 6]


def test_speculation_figures_are_in_the_usage_chunk_and_the_whole_reply(http: httpx.Client) -> None:
    expected = {
        "mean_acceptance_length": pytest.approx(1 + 5 / 3),
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 0, 0, 1, 0, 0, 0],
        "acceptance_histogram_by_draft_length": {"2": [1, 0, 0], "4": [0, 1, 0, 0, 1]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 10,
        "num_spec_tokens": 7,
    }
    chunks = stream(http, chat("!say:hello!", stream_options={"include_usage": True}))
    assert chunks[-1]["metrics"]["speculative_decoding"] == expected
    assert all("metrics" not in chunk for chunk in chunks[:-1])
    whole = http.post("/v1/chat/completions", json=chat("!say:hello!")).json()
    assert whole["metrics"]["speculative_decoding"] == expected


def test_several_choices_stream_merged_and_count_the_prompt_once(http: httpx.Client) -> None:
    body = chat("!say:abcdef! !slow:0.01!", n=3, stream_options={"include_usage": True})
    chunks = stream(http, body)
    assert [text_of(chunks, i) for i in range(3)] == ["abcdef"] * 3
    finishes = [(c["index"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [(0, "stop"), (1, "stop"), (2, "stop")]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 21
    assert (
        usage["prompt_tokens"]
        == http.post("/v1/chat/completions", json=chat("!say:abcdef! !slow:0.01!")).json()["usage"]["prompt_tokens"]
    )
    assert "metrics" not in chunks[-1]


def test_choices_of_one_seed_have_different_seeds_that_repeat(server: LiveServer, http: httpx.Client) -> None:
    def seeds(**fields: Any) -> list[int]:
        before = len(server.messages("generate"))
        http.post("/v1/chat/completions", json=chat("x", **fields)).raise_for_status()
        return [message["params"]["seed"] for message in server.messages("generate")[before:]]

    first = seeds(seed=5, n=3)
    assert first[0] == 5
    assert len(set(first)) == 3
    assert seeds(seed=5, n=3) == first
    assert seeds() != seeds()


def test_logprobs_have_tokens_bytes_and_the_alternatives_asked_for(http: httpx.Client) -> None:
    body = chat("!say:é!", logprobs=True, top_logprobs=2)
    content = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content[:2]] == [[0xC3], [0xA9]]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "b"]
    streamed = [entry for chunk in stream(http, body) for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    without = http.post("/v1/chat/completions", json=chat("!say:x!", logprobs=True)).json()
    assert all(entry["top_logprobs"] == [] for entry in without["choices"][0]["logprobs"]["content"])


def test_text_parts_equal_the_plain_string_in_every_role(http: httpx.Client) -> None:
    def prompt_tokens(content: Any, role: str) -> int:
        messages = [{"role": role, "content": content}, {"role": "user", "content": "x"}]
        response = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens"])

    for role in ("system", "developer", "user", "assistant", "tool"):
        assert prompt_tokens([{"type": "text", "text": "one two"}], role) == prompt_tokens("one two", role)
    assert prompt_tokens([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "user") > 0


def test_every_sampling_field_reaches_the_engine(server: LiveServer, http: httpx.Client) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "seed": -7,
        "stop": ["zz", "yy", "zz"],
        "stop_token_ids": [5],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"65": 3},
        "ignore_eos": True,
        "min_tokens": 2,
        "logprobs": True,
        "top_logprobs": 4,
        "cache_salt": "salt",
        "speculation": False,
    }
    body = chat("x", max_tokens=100, max_completion_tokens=9, **fields)
    http.post("/v1/chat/completions", json=body).raise_for_status()
    message = server.messages("generate")[-1]
    assert message["cache_salt"] == "salt"
    params = message["params"]
    assert params["seed"] == (-7) & ((1 << 63) - 1)
    assert {name: params[name] for name in params if name != "seed"} == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "stop": ["zz", "yy"],
        "stop_token_ids": [5],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": [[65, 3.0]],
        "ignore_eos": True,
        "min_tokens": 2,
        "logprobs": 4,
        "prompt_logprobs": None,
        "speculation": False,
        "provenance": False,
    }


def test_nulls_and_unknown_fields_mean_not_given(server: LiveServer, http: httpx.Client) -> None:
    ignored = {
        "user": "u",
        "metadata": {},
        "store": True,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "zzz": 1,
    }
    nulls = dict.fromkeys(["temperature", "max_tokens", "stop", "seed", "n", "stream", "tools", "response_format"])
    body = chat("!say:hi!", **ignored, **nulls, model=server.model_dir.name)
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    params = server.messages("generate")[-1]["params"]
    prompt_tokens = response.json()["usage"]["prompt_tokens"]
    assert params["temperature"] == 1.0
    assert params["max_tokens"] == 512 - prompt_tokens


def test_a_hair_above_zero_temperature_is_greedy(server: LiveServer, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json=chat("x", temperature=1e-6)).raise_for_status()
    assert server.messages("generate")[-1]["params"]["temperature"] == 0.0


def test_the_openai_client_reads_whole_and_streamed_answers(server: LiveServer) -> None:
    with openai.OpenAI(base_url=server.base + "/v1", api_key="unused", max_retries=0) as client:
        model = client.models.list().data[0].id
        messages: Any = [{"role": "user", "content": "!say:héllo wörld!"}]
        whole = client.chat.completions.create(model=model, messages=messages)
        assert whole.choices[0].message.content == "héllo wörld"
        parts = list(
            client.chat.completions.create(
                model=model, messages=messages, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "héllo wörld"
        assert parts[-1].usage == whole.usage
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="no-such-model", messages=messages)
        assert missing.value.code == "model_not_found"
        completion = client.completions.create(model=model, prompt="!say:abc!", logprobs=1)
        assert completion.choices[0].text == "abc"


def test_defaults_come_from_the_generation_config(tmp_path: Any) -> None:
    defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    with LiveServer(tmp_path, generation_config=defaults) as live, live.client() as http:
        http.post("/v1/chat/completions", json=chat("x")).raise_for_status()
        http.post("/v1/chat/completions", json=chat("x", temperature=0, top_k=0)).raise_for_status()
        first, second = (message["params"] for message in live.messages("generate"))
        assert [first[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")] == [0.7, 0.8, 20, 1.05]
        assert [second[name] for name in ("temperature", "top_p", "top_k")] == [0, 0.8, 0]
