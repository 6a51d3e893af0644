"""Public bug reports about what is around a request: methods, paths, connections, odd bodies, clients' habits."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.api.live_server import LiveServer, chat

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def is_error(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def talk(server: LiveServer, sent: bytes) -> bytes:
    """What comes back on one connection until the server closes it."""
    found = re.search(r"127\.0\.0\.1:(\d+)", server.base)
    assert found
    with socket.create_connection(("127.0.0.1", int(found[1])), timeout=15) as peer:
        peer.sendall(sent)
        parts = []
        while data := peer.recv(65536):
            parts.append(data)
    return b"".join(parts)


def test_a_model_whose_name_has_a_slash_is_found_by_it(tmp_path: Path) -> None:
    name = "some-org/Model-1.5:Q4"
    with LiveServer(tmp_path, "--served-model-name", name) as live, live.client() as http:
        assert [entry["id"] for entry in http.get("/v1/models").json()["data"]] == [name]
        for path in (name, "some-org%2FModel-1.5%3AQ4"):
            assert http.get(f"/v1/models/{path}").json()["id"] == name
        assert name in is_error(http.get("/v1/models/Model-1.5"), 404)
        assert http.post(CHAT, json={**chat("!say:x!"), "model": name}).json()["model"] == name
        assert name in is_error(http.post(TEXT, json={"prompt": "x", "model": "Model-1.5:Q4"}), 404)


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/health"])
def test_a_preflight_of_a_foreign_page_is_no_permission(http: httpx.Client, path: str) -> None:
    asks = {"origin": "http://elsewhere.example", "access-control-request-method": "POST"}
    response = http.options(path, headers=asks)
    is_error(response, 405)
    assert response.headers["allow"]
    assert not [name for name in response.headers if name.startswith("access-control-")]


def test_a_simple_post_of_a_foreign_page_gets_no_readable_answer(http: httpx.Client) -> None:
    headers = {"origin": "http://elsewhere.example", "content-type": "text/plain"}
    response = http.post(CHAT, content=json.dumps(chat("!say:x!")), headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/tiny-model", "/version"])
def test_head_is_answered_where_probes_send_it(http: httpx.Client, path: str) -> None:
    response = http.head(path)
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1/v1/chat/completions", "/chat/completions"]
)
def test_a_path_that_is_nearly_right_is_404_and_no_redirect(http: httpx.Client, path: str) -> None:
    response = http.post(httpx.URL(str(http.base_url) + path), json=chat("!say:x!"))
    assert "/openapi.json" in is_error(response, 404)


def test_a_query_string_changes_nothing(http: httpx.Client) -> None:
    response = http.post(f"{CHAT}?api-version=2024-08-01&x=%ff", json=chat("!say:x!"))
    assert response.json()["choices"][0]["message"]["content"] == "x"


def test_a_connection_goes_on_after_refusals_and_answers(server: LiveServer) -> None:
    def request(path: bytes, body: bytes, last: bool) -> bytes:
        close = b"connection: close\r\n" if last else b""
        return b"POST %s HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n%s" % (path, close, len(body), body)

    good = json.dumps(chat("!say:still here!")).encode()
    bodies = [b"nonsense", b"x" * 200_001, good, b"{}", json.dumps({**chat("!say:a!"), "stream": True}).encode(), good]
    sent = b"".join(request(CHAT.encode(), body, i == len(bodies) - 1) for i, body in enumerate(bodies))
    reply = talk(server, sent)
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", reply)]
    assert statuses == [400, 413, 200, 400, 200, 200]
    assert reply.count(b"still here") == 2
    assert reply.count(b"data: [DONE]") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_a_whole_answer_without_chunks(server: LiveServer, stream: bool) -> None:
    body = json.dumps({**chat("!say:old!"), "stream": stream}).encode()
    reply = talk(server, b"POST %s HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
    head, _, rest = reply.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    assert b"transfer-encoding" not in head.lower()
    if stream:
        assert rest.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(rest)["choices"][0]["message"]["content"] == "old"


def test_a_client_that_waits_for_continue_gets_it(server: LiveServer) -> None:
    body = json.dumps(chat("!say:go on!")).encode()
    head = b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    reply = talk(server, head % (CHAT.encode(), len(body)) + body)
    assert b"HTTP/1.1 200 " in reply
    assert b"go on" in reply


def test_a_body_in_chunks_with_a_byte_order_mark_is_read(http: httpx.Client) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(chat("!say:x!")).encode()
    response = http.post(CHAT, content=iter([body[:5], body[5:9], body[9:]]))
    assert response.json()["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize("encoding", ["gbk", "utf-16", "latin-1"])
def test_a_body_in_another_encoding_is_400_and_not_quoted(http: httpx.Client, encoding: str) -> None:
    text = "龜甲" if encoding == "gbk" else "naïve é"
    body = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'.encode(encoding)
    message = is_error(http.post(CHAT, content=body), 400)
    assert message.isascii()


def test_what_a_client_sends_back_of_an_answer_is_accepted(http: httpx.Client) -> None:
    """Clients append the assistant message as they got it, with every field that was null."""
    empty: dict[str, Any] = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    answered = {"role": "assistant", "content": "hello", "annotations": [], "reasoning_content": None, **empty}
    messages = [{"role": "user", "content": "a", "name": "me"}, answered, {"role": "user", "content": "!say:b!"}]
    assert http.post(CHAT, json={"messages": messages}).json()["choices"][0]["message"]["content"] == "b"
    assert http.post(CHAT, json={"messages": [*messages[:1], {**answered, "content": ""}, messages[2]]}).is_success


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "tool", "tool_call_id": "1"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": ["x"]}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "messages[0].content"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "User", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
    ],
)
def test_a_message_that_cannot_be_honoured_names_its_place(http: httpx.Client, message: Any, param: str) -> None:
    response = http.post(CHAT, json={"messages": [message]})
    is_error(response, 400)
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        (CHAT, {"response_format": "json"}, "response_format"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT, {"logit_bias": [[1, 5]]}, "logit_bias"),
        (CHAT, {"logit_bias": {" You": 6}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 1000}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": False}}, "logit_bias"),
        (CHAT, {"stream": "true"}, "stream"),
        (CHAT, {"stream": 1}, "stream"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"max_tokens": 10.0}, "max_tokens"),
        (CHAT, {"max_tokens": "10"}, "max_tokens"),
        (CHAT, {"add_generation_prompt": False}, "add_generation_prompt"),
        (CHAT, {"max_new_tokens": 10}, "max_new_tokens"),
        (TEXT, {"n_predict": 10}, "n_predict"),
        (TEXT, {"num_predict": 10}, "num_predict"),
        (TEXT, {"stop_sequences": ["x"]}, "stop_sequences"),
        (TEXT, {"max_output_tokens": 10}, "max_output_tokens"),
        (CHAT, {"max_output_tokens": 10}, "max_output_tokens"),
        (CHAT, {"max_length": 10}, "max_length"),
        (CHAT, {"min_new_tokens": 10}, "min_new_tokens"),
        (CHAT, {"stop_regex": "[.]"}, "stop_regex"),
        (CHAT, {"stopping_strings": ["x"]}, "stopping_strings"),
        (CHAT, {"no_stop_trim": True}, "no_stop_trim"),
        (TEXT, {"repetition_detection": {"min_count": 3}}, "repetition_detection"),
        (TEXT, {"top_n_sigma": 1.5}, "top_n_sigma"),
        (TEXT, {"n_probs": 5}, "n_probs"),
        (TEXT, {"tools": [{"type": "function"}]}, "tools"),
        (TEXT, {"num_beams": 3}, "num_beams"),
        (TEXT, {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        (CHAT, {"prompt": "also this"}, "prompt"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"messages": [{"role": "user", "content": "also"}]}, "messages"),
        (TEXT, {"best_of": 4, "n": 2}, "best_of"),
        (TEXT, {"suffix": "end"}, "suffix"),
        (TEXT, {"prompt": [[1, 2], "x", [3.5]]}, "prompt[2]"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": {"text": "x"}}, "prompt"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_what_others_ignore_in_silence_is_refused_by_name(
    http: httpx.Client, route: str, fields: dict[str, Any], param: str
) -> None:
    base = chat("!say:x!") if route == CHAT else {"prompt": "!say:x!"}
    response = http.post(route, json={**base, **fields})
    is_error(response, 400)
    assert str(response.json()["error"]["param"]).startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0},
        {"tools": None, "tool_choice": "none", "functions": None, "response_format": None},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True},
        {"logit_bias": {}, "stop": None, "seed": None, "n": None, "stream": None, "logprobs": None},
        {"top_n_sigma": -1, "n_probs": 0, "min_new_tokens": 0, "no_stop_trim": False, "max_output_tokens": None},
        {"stream": False, "stream_options": None, "top_logprobs": None, "max_tokens": None, "max_completion_tokens": 4},
        {"extra_body": {"top_k": 5}, "tokenizer": "x", "safety_identifier": "y", "prompt_cache_key": "z"},
    ],
)
def test_what_clients_send_by_default_is_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert http.post(CHAT, json={**chat("!say:x!"), **fields}).status_code == 200


def test_tokenize_and_detokenize_take_edges(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json()["prompt"] == ""
    is_error(http.post("/detokenize", json={"tokens": [10**9]}), 400)
    is_error(http.post("/detokenize", json={"tokens": [-1]}), 400)
    is_error(http.post("/detokenize", json={"tokens": "abc"}), 400)
    is_error(http.post("/tokenize", json={}), 400)
    is_error(http.post("/tokenize", json={"prompt": "a", "messages": [{"role": "user", "content": "a"}]}), 400)
    is_error(http.post("/tokenize", json={"prompt": "x" * 100_000}), 400)
    special = http.post("/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": special}).json()["prompt"] == "<|im_end|>"
