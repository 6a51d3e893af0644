"""The default model with its released drafter, over HTTP: text, ends, and the same answers as without drafts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from tests.e2e.real_server import RealServer, Stream, ask, both_ways, chat_body, together
from tests.serve.api.live_server import eventually

CHAT, TEXT = "chat/completions", "completions"
QUESTIONS = ("What is the capital of France?", "Say hi.", "Which colour is the sky?")


def test_an_openai_client_streams_an_answer_with_usage_and_speculation_figures(speculative: RealServer) -> None:
    client = openai.OpenAI(base_url=speculative.base + "/v1", api_key="none", max_retries=0)
    (model,) = client.models.list().data
    ask_for: dict[str, Any] = {
        "model": model.id,
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "temperature": 0,
        "max_tokens": 12,
    }
    whole = client.chat.completions.create(**ask_for)
    assert "Paris" in (whole.choices[0].message.content or "")
    chunks = list(client.chat.completions.create(**ask_for, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    figures = (whole.model_extra or {})["metrics"]["speculative_decoding"]
    assert figures["num_draft_tokens"] > 0
    assert speculative.metric("vllm:spec_decode_num_draft_tokens_total") > 0


def test_prompt_tokens_are_those_of_the_models_own_template(http: httpx.Client, default_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    messages = [{"role": "user", "content": "Hi"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ask(http, CHAT, chat_body("Hi", max_tokens=1)).prompt_tokens == len(expected)


def test_characters_of_many_tokens_arrive_whole_at_every_cap(http: httpx.Client) -> None:
    prompt = "🥹" * 8
    texts = [
        both_ways(http, TEXT, {"prompt": prompt, "temperature": 0, "max_tokens": cap}).text for cap in range(1, 13)
    ]
    assert "\ufffd" not in "".join(texts)
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert any(ord(character) > 0xFFFF for character in texts[-1])


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_a_stop_string_never_shows_and_text_held_back_is_released(http: httpx.Client, route: str) -> None:
    prompt = "Write this line once: lemon river copper window"
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 9}
    body |= {"messages": [{"role": "user", "content": prompt}]} if route == CHAT else {"prompt": prompt}
    free = both_ways(http, route, body).text
    stop = free[len(free) // 2 :][:9]
    stopped = both_ways(http, route, {**body, "stop": [stop]})
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[: free.index(stop)]
    held = both_ways(http, route, {**body, "stop": [free[-7:] + " qqq"]})
    assert held.text == free


def test_finish_reasons_and_exact_token_counts(http: httpx.Client) -> None:
    ended = both_ways(http, CHAT, chat_body("Say hi.", max_tokens=100))
    assert ended.finish_reason == "stop"
    assert "<|" not in ended.text
    for cap in (1, 2, 5):
        capped = both_ways(http, CHAT, chat_body("Count from 1 to 50.", max_completion_tokens=cap))
        assert (capped.finish_reason, capped.completion_tokens) == ("length", cap)


def test_answers_are_the_same_with_the_drafter_and_without(http: httpx.Client, plain_http: httpx.Client) -> None:
    word = "tomato " * 30
    bodies = [chat_body(question, max_tokens=40) for question in QUESTIONS]
    bodies.append(chat_body(f"Repeat: {word}", max_tokens=40))
    for body in bodies:
        assert ask(http, CHAT, body) == ask(plain_http, CHAT, body)


def test_sampled_answers_with_a_seed_are_the_same_with_the_drafter_and_without(
    http: httpx.Client, plain_http: httpx.Client
) -> None:
    body = chat_body("Tell me a story.", max_tokens=16) | {"temperature": 1.0}
    answers = [ask(http, CHAT, {**body, "seed": seed}) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] == ask(plain_http, CHAT, {**body, "seed": 1})
    assert answers[0].text != answers[2].text


def test_a_stop_string_inside_a_block_counts_no_token_after_it(http: httpx.Client, plain_http: httpx.Client) -> None:
    body = {"prompt": "1, 2, 3, 4, 5, 6, 7, 8,", "temperature": 0, "stop": [" 12,"]}
    free = both_ways(http, TEXT, {**body, "max_tokens": 40})
    assert replace(ask(plain_http, TEXT, {**body, "max_tokens": 40}), chunks=free.chunks) == free
    assert (free.text, free.finish_reason) == (" 9, 10, 11,", "stop")
    for cap in range(free.completion_tokens - 2, free.completion_tokens + 8):
        cut = ask(http, TEXT, {**body, "max_tokens": cap})
        complete = cap >= free.completion_tokens
        assert cut.finish_reason == ("stop" if complete else "length")
        assert cut.completion_tokens == min(cap, free.completion_tokens)
        assert not complete or cut.text == free.text


def test_requests_side_by_side_answer_as_they_do_alone(http: httpx.Client) -> None:
    words = ("zebra", "quartz", "lantern", "violin")
    bodies = [{"prompt": f"{word} " * 12, "temperature": 0, "max_tokens": 16} for word in words]
    bodies += [{"prompt": f"Once upon a time, a {word}", "temperature": 0, "max_tokens": 16} for word in words]
    alone = [ask(http, TEXT, body) for body in bodies]
    assert together(http, TEXT, bodies) == alone


def test_bad_requests_disturb_no_running_stream(http: httpx.Client) -> None:
    body = {"prompt": "The sea", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    expected = ask(http, TEXT, body).text
    stream = Stream(http, TEXT, body)
    eventually(lambda: bool(stream.body), 60)
    bad = ["-1", "1e999", "NaN", '"x"', "[]"]
    raw = [f'{{"messages":[{{"role":"user","content":"x"}}],"temperature":{value}}}' for value in bad]
    raw += [
        '{"messages":[{"role":"user","content":"x"}],"top_p":-1}',
        '{"messages":[{"role":"user","content":"x"}],"logit_bias":{"99999999":5}}',
        '{"messages":[{"role":"user","content":"\\ud800"}]}',
        '{"messages":[]}',
        "[" * 100_000,
        "",
    ]
    for content in raw:
        response = http.post(f"/v1/{CHAT}", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, content[:80]
        assert response.json()["error"]["message"]
    for prompt in ([999_999_999], [-1], [], "", [""]):
        assert http.post(f"/v1/{TEXT}", json={"prompt": prompt, "max_tokens": 1}).status_code == 400
    assert http.post(f"/v1/{CHAT}", json=chat_body("x", model="no-such-model")).status_code == 404
    assert ask(http, TEXT, {**body, "temperature": 1e-6}).text == expected
    stream.join(60)
    assert stream.ended_well()
    frames = [json.loads(part[6:]) for part in stream.body.split("\n\n")[:-2]]
    assert "".join(frame["choices"][0]["text"] for frame in frames) == expected
    assert http.get("/health").status_code == 200


def test_prompts_at_and_over_the_context_and_bodies_over_the_limit(http: httpx.Client) -> None:
    context = http.get("/v1/models").json()["data"][0]["max_model_len"]
    over = http.post(f"/v1/{TEXT}", json={"prompt": [5] * (context + 1), "max_tokens": 1})
    assert over.status_code == 400
    assert str(context) in over.json()["error"]["message"]
    text = http.post(f"/v1/{TEXT}", json={"prompt": "word " * 190_000, "max_tokens": 1})
    assert text.status_code == 400
    assert str(context) in text.json()["error"]["message"]
    big = http.post(f"/v1/{TEXT}", json={"prompt": "x" * 20_000_000, "max_tokens": 1})
    assert big.status_code == 413
    assert http.get("/health").status_code == 200


def test_answers_in_float32_are_token_identical_with_the_drafter_and_without(
    default_model_dir: Path, released_drafter_dir: Path
) -> None:
    bodies = [{"prompt": text, "temperature": 0, "max_tokens": 24, "logprobs": 0} for text in ("1, 2, 3,", "Dear Sir")]
    arguments = ("--weights", "fp32", "--drafter-dir", str(released_drafter_dir), "--block-length", "7")
    found = []
    with RealServer(default_model_dir, *arguments) as server, server.client() as http:
        for speculation in (True, False):
            before = server.metric("vllm:spec_decode_num_draft_tokens_total")
            replies = [http.post(f"/v1/{TEXT}", json={**body, "speculation": speculation}).json() for body in bodies]
            found.append([reply["choices"][0]["logprobs"]["tokens"] for reply in replies])
            assert (server.metric("vllm:spec_decode_num_draft_tokens_total") > before) is speculation
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == [24, 24]
