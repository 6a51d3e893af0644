"""Bad requests: each is a 4xx that names its field, and the server goes on."""

from __future__ import annotations

import concurrent.futures
import json
import time
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.api.schemas import ChatRequest, CompletionRequest
from tests.serve.api.live_server import LiveServer, chat

HUGE = "9" * 500


def refused(response: httpx.Response, param: str | None, status: int = 400) -> str:
    """Assert an OpenAI error object about ``param``; its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert param is None or param in error["message"]
    return str(error["message"])


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -1, "0"),
        ("temperature", 2.1, "2"),
        ("temperature", "x", "number"),
        ("temperature", "0.5", "number"),
        ("temperature", True, "number"),
        ("temperature", [], "number"),
        ("top_p", -0.1, "0"),
        ("top_p", 1.5, "1"),
        ("top_k", -2, "-1"),
        ("top_k", 1.5, "integer"),
        ("min_p", 1.1, "1"),
        ("max_tokens", 0, "1"),
        ("max_tokens", -1, "1"),
        ("max_tokens", 1e3, "integer"),
        ("max_tokens", 10**30, "2147483647"),
        ("max_tokens", 600, "512"),
        ("max_completion_tokens", 600, "512"),
        ("min_tokens", -1, "0"),
        ("n", 0, "1"),
        ("n", 17, "16"),
        ("seed", 1 << 63, "9223372036854775807"),
        ("seed", 1.0, "integer"),
        ("stop", [""], "1"),
        ("stop", ["x"] * 17, "16"),
        ("stop", "x" * 257, "256"),
        ("stop", [1], "string"),
        ("stop_token_ids", [300], "299"),
        ("stop_token_ids", [-1], "0"),
        ("presence_penalty", 2.5, "2"),
        ("frequency_penalty", -2.5, "-2"),
        ("repetition_penalty", 0, "0.01"),
        ("repetition_penalty", 5e-324, "0.01"),
        ("logit_bias", {"99999999": 5}, "299"),
        ("logit_bias", {"-1": 5}, "digits"),
        ("logit_bias", {"²": 5}, "digits"),
        ("logit_bias", {"1": 101}, "100"),
        ("logit_bias", {"1": "x"}, "100"),
        ("logit_bias", {str(i): 1 for i in range(301)}, "300"),
        ("logit_bias", [], "object"),
        ("stream", 1, "boolean"),
        ("stream_options", {"include_usage": True}, "stream"),
        ("stream_options", {"include_provenance": "yes"}, "boolean"),
        ("speculation", "no", "boolean"),
        ("cache_salt", "x" * 300, "256"),
        ("model", 5, "string"),
        ("top_logprobs", 2, "logprobs"),
        ("top_logprobs", 21, "20"),
        ("messages", [], "1"),
        ("messages", "hi", "list"),
    ],
)
def test_a_wrong_value_is_refused_by_field_and_limit(http: httpx.Client, field: str, value: Any, limit: str) -> None:
    response = http.post("/v1/chat/completions", json={**chat("!say:x!"), field: value})
    where = response.json()["error"]["param"]
    assert where.split("[")[0].split(".")[0] == field
    assert limit in refused(response, where)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0].type"),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "y"}}],
            },
            "messages[0].content[1].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "prefix": True}, "messages[0].prefix"),
        ("hi", "messages[0]"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused(http: httpx.Client, message: Any, param: str) -> None:
    refused(http.post("/v1/chat/completions", json={"messages": [message]}), param)


def test_a_refusal_of_the_chat_template_is_passed_on(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    text = refused(http.post("/v1/chat/completions", json={"messages": messages}), "messages")
    assert "system must come first" in text


@pytest.mark.parametrize("roles", [["user", "user"], ["system"], ["assistant"], ["system", "user", "tool", "user"]])
def test_an_order_of_roles_that_the_template_takes_is_answered(http: httpx.Client, roles: list[str]) -> None:
    body = {"messages": [{"role": role, "content": "x"} for role in roles]}
    assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "ok then"


@pytest.mark.parametrize(
    ("field", "value", "inert"),
    [
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("tools", [{"type": "function"}], []),
        ("tool_choice", "auto", "none"),
        ("functions", [{}], []),
        ("modalities", ["text", "audio"], ["text"]),
        ("audio", {"voice": "a"}, None),
        ("prediction", {"type": "content"}, None),
        ("reasoning_effort", "high", "none"),
        ("chat_template", "x", None),
        ("chat_template_kwargs", {"add_generation_prompt": False}, {}),
        ("chat_template_kwargs", {"enable_thinking": False, "m": 1}, {"enable_thinking": False}),
        ("chat_template_kwargs", [], None),
        ("guided_json", {}, None),
        ("structured_outputs", {"json": {}}, {}),
        ("use_beam_search", True, False),
        ("continue_final_message", True, False),
        ("skip_special_tokens", False, True),
        ("best_of", 2, 1),
        ("length_penalty", 0.5, 1.0),
        ("echo", True, False),
        ("suffix", "x", ""),
    ],
)
def test_what_is_not_done_is_refused_unless_it_asks_for_nothing(
    http: httpx.Client, field: str, value: Any, inert: Any
) -> None:
    refused(http.post("/v1/chat/completions", json={**chat("!say:x!"), field: value}), field)
    assert http.post("/v1/chat/completions", json={**chat("!say:x!"), field: inert}).status_code == 200


def test_what_only_the_other_endpoint_does_is_refused_by_name(http: httpx.Client) -> None:
    of_chats = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}
    of_texts = {"prompt": "x", "echo": True, "best_of": 2, "add_special_tokens": True}
    chat_fields, text_fields = set(ChatRequest.model_fields), set(CompletionRequest.model_fields)
    # Settings that no template reads ask for nothing, and a text has no template.
    assert set(of_chats) == chat_fields - text_fields - {"chat_template_kwargs"}
    assert set(of_texts) == text_fields - chat_fields
    for name, value in of_chats.items():
        refused(http.post("/v1/completions", json={"prompt": "!say:x!", name: value}), name)
    for name, value in of_texts.items():
        refused(http.post("/v1/chat/completions", json={**chat("!say:x!"), name: value}), name)


def test_settings_of_the_template_are_checked_for_tokenize_too(http: httpx.Client) -> None:
    given = {**chat("x"), "chat_template_kwargs": {"enable_thinking": False}}
    assert http.post("/tokenize", json=given).json() == http.post("/tokenize", json=chat("x")).json()
    refused(http.post("/tokenize", json={**chat("x"), "chat_template_kwargs": {"m": 1}}), "chat_template_kwargs")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
        ({"prompt": ["x", 5]}, "prompt[1]"),
        ({"prompt": [5, "x"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [999999999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**25]}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 400}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"prompt": "x", "min_tokens": 600}, "min_tokens"),
    ],
)
def test_a_wrong_completion_is_refused(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    refused(http.post("/v1/completions", json=body), param)


def test_another_model_is_404_on_both_endpoints(http: httpx.Client) -> None:
    for path, body in (("chat/completions", chat("x")), ("completions", {"prompt": "x"})):
        refused(http.post(f"/v1/{path}", json={**body, "model": "no-such-model"}), "model", 404)
    refused(http.get("/v1/models/no-such-model"), "model", 404)
    assert http.get("/v1/models/tiny-model").json()["id"] == "tiny-model"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[1]",
        b"5",
        b"null",
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"temperature": -1e999}',
        b'{"temperature": 0.' + HUGE.encode() + b"e" + HUGE.encode() + b"}",
        b'{"seed": ' + HUGE.encode() + b"}",
        b'{"prompt": "\\ud83d"}',
        b'{"\\udc00": 1}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\xbd"}',
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b'{"prompt": "x", "metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": "\x00"}',
    ],
)
def test_what_is_not_strict_json_is_refused(http: httpx.Client, body: bytes) -> None:
    refused(http.post("/v1/completions", content=body), None)


def test_any_content_type_will_do_and_a_pair_of_surrogates_is_a_character(http: httpx.Client) -> None:
    body = b'{"prompt": "!say:\\ud83d\\ude00!"}'
    response = http.post("/v1/completions", content=body, headers={"content-type": "text/plain"})
    assert response.json()["choices"][0]["text"] == "😀"
    gzipped = http.post("/v1/completions", content=body, headers={"content-encoding": "gzip"})
    refused(gzipped, "content-encoding", 415)


def test_a_body_over_the_limit_is_413_with_and_without_a_declared_length(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "x" * 300_000}).encode()
    assert "200000" in refused(http.post("/v1/completions", content=body), None, 413)
    assert "200000" in refused(http.post("/v1/completions", content=iter([body[:9], body[9:]])), None, 413)
    brackets = http.post("/v1/completions", content=b"[" * 10_000_000)
    refused(brackets, None, 413)


def test_text_too_long_for_the_context_is_refused_and_health_answers_meanwhile(
    server: LiveServer, http: httpx.Client
) -> None:
    body = {"prompt": "x" * 190_000}
    with server.client() as other, concurrent.futures.ThreadPoolExecutor(4) as pool:
        posts = [pool.submit(lambda: server.client().post("/v1/completions", json=body)) for _ in range(4)]
        while not all(post.done() for post in posts):
            started = time.monotonic()
            assert other.get("/health").status_code == 200
            assert time.monotonic() - started < 1
    for post in posts:
        assert "512" in refused(post.result(), "prompt")


def test_unknown_routes_and_methods_are_error_objects(http: httpx.Client) -> None:
    refused(http.get("/nope"), None, 404)
    refused(http.get("/docs"), None, 404)
    refused(http.get("/v1/models/"), "model", 404)
    refused(http.get("/v1/chat/completions"), None, 405)
    refused(http.delete("/health"), None, 405)


def test_the_schema_documents_every_field_with_its_bounds(server: LiveServer, http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert not [line for line in server.errors if "Duplicate" in line]
    bodies = {
        path: document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
    }
    assert "$ref" not in json.dumps(bodies)
    chat_fields = bodies["/v1/chat/completions"]["properties"]
    assert {"type": "integer", "minimum": 1, "maximum": 16} in chat_fields["n"]["anyOf"]
    assert {"messages", "max_completion_tokens", "logit_bias", "min_p", "stop"} <= set(chat_fields)
    assert {"prompt", "echo", "best_of"} <= set(bodies["/v1/completions"]["properties"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "seed",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "echo",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
    "cache_salt",
    "return_token_ids",
    "speculation",
    "add_special_tokens",
    "response_format",
    "tools",
    "user",
    "suffix",
    "tokens",
]
NEARLY = st.sampled_from(
    [-1, 0, 1, 2, 16, 17, 20, 21, 300, 1e-9, 0.5, 1e308, 1 << 63, "", "x", [], {}, [0], ["x"], [[1]]]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "x"]) | JSON, "content": st.text(max_size=5) | JSON}
)
BODY = st.dictionaries(st.sampled_from(FIELDS), NEARLY | JSON, max_size=6)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
    base=st.sampled_from([{}, {"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}]),
    messages=st.none() | st.lists(MESSAGE, max_size=3),
    fields=BODY,
)
def test_no_body_is_answered_with_a_server_error(
    http: httpx.Client, path: str, base: dict[str, Any], messages: Any, fields: dict[str, Any]
) -> None:
    body = {**base, **({} if messages is None else {"messages": messages}), **fields}
    response = http.post(path, content=json.dumps(body))
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert http.get("/health").status_code == 200


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=60))
def test_no_bytes_are_answered_with_a_server_error(http: httpx.Client, body: bytes) -> None:
    assert 400 <= http.post("/v1/completions", content=body).status_code < 500
