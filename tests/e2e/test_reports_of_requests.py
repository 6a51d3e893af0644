"""Public bug reports about lengths, ids, scores, seeds and caches of single requests, tried on the default model.

``http`` is a server whose every round verifies a draft, ``plain_http`` one that never drafts.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.real_server import RealServer, ask, both_ways, chat_body
from tests.serve.api.live_server import events, eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COUNT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"
EMOJI = "🥹🫠龜👩\u200d👩\u200d👧"


def post(http: httpx.Client, route: str, **body: Any) -> Any:
    response = http.post(route, json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def text_of(http: httpx.Client, **body: Any) -> str:
    return str(post(http, TEXT, **{"prompt": COUNT, "max_tokens": 20, **body})["choices"][0]["text"])


def refused(http: httpx.Client, route: str, field: str, **body: Any) -> None:
    """A 400 that names the field, and a server that goes on."""
    response = http.post(route, json={"prompt": COUNT} | body if route == TEXT else body)
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]
    assert ask(http, "completions", {"prompt": "Hi", "max_tokens": 1}).completion_tokens == 1


def tokenize(http: httpx.Client, **body: Any) -> list[int]:
    return list(http.post("/tokenize", json=body).json()["tokens"])


def detokenize(http: httpx.Client, ids: list[int]) -> str:
    return str(http.post("/detokenize", json={"tokens": ids}).json()["prompt"])


# -- lengths and ends --------------------------------------------------------------------------------------------------


def test_scores_of_a_prompt_without_any_answer(http: httpx.Client) -> None:
    reply = post(http, TEXT, prompt="Your answer: Yes", max_tokens=0, echo=True, logprobs=1)
    (choice,) = reply["choices"]
    assert choice["text"] == "Your answer: Yes"
    assert len(choice["logprobs"]["token_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert reply["usage"]["completion_tokens"] == 0


def test_ids_outside_the_vocabulary_are_refused_wherever_they_are(http: httpx.Client) -> None:
    size = 49152
    refused(http, TEXT, "stop_token_ids", stop_token_ids=[size], min_tokens=3)
    refused(http, TEXT, "logit_bias", logit_bias={str(size): 5})
    refused(http, TEXT, "prompt", prompt=[size])
    assert text_of(http, stop_token_ids=[size - 1], logit_bias={str(size - 1): -5}) == text_of(http)


@pytest.mark.parametrize("least", [1, 5, 6, 7])
def test_an_end_is_allowed_exactly_from_the_least_tokens_on(
    http: httpx.Client, plain_http: httpx.Client, least: int
) -> None:
    end = tokenize(http, prompt=" 15", add_special_tokens=False)
    body = {"prompt": COUNT, "max_tokens": 16, "min_tokens": least, "stop_token_ids": end[-1:], "temperature": 0}
    drafted, plain = (ask(server, "completions", body) for server in (http, plain_http))
    assert drafted == plain
    assert drafted.completion_tokens >= least


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_prompt_of_one_token_with_few_tokens_to_come(
    http: httpx.Client, plain_http: httpx.Client, count: int
) -> None:
    body = {"prompt": [28], "max_tokens": count, "temperature": 0}
    drafted = ask(http, "completions", body)
    assert drafted == ask(plain_http, "completions", body)
    assert drafted.completion_tokens == count


@pytest.mark.parametrize("stop", ["<|im_end|>", ["<|im_end|>", "<|endoftext|>"]])
def test_the_text_of_an_end_token_as_a_stop_changes_nothing(http: httpx.Client, stop: Any) -> None:
    body = chat_body("Say hi.", max_tokens=60)
    assert both_ways(http, "chat/completions", {**body, "stop": stop}) == both_ways(http, "chat/completions", body)


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [["\n", "Alice:"], [" 14, 15, 17", " 1"], ["14, 15, 16, 17, 19"]])
def test_text_held_back_for_a_stop_is_sent_once(http: httpx.Client, stops: list[str]) -> None:
    both_ways(http, "completions", {"prompt": COUNT, "max_tokens": 30, "temperature": 0, "stop": stops})


@pytest.mark.parametrize("cap", [3, 5, 6])
def test_scores_change_no_character_however_a_text_is_cut(http: httpx.Client, cap: int) -> None:
    body = chat_body(f"Repeat exactly: {EMOJI * 3}", max_tokens=cap)
    plain = ask(http, "chat/completions", body)
    scored = both_ways(http, "chat/completions", {**body, "logprobs": True, "top_logprobs": 2, "stop": ["zzz"]})
    assert scored.text == plain.text
    assert "\ufffd" not in scored.text


def test_a_text_of_wide_characters_arrives_in_pieces(http: httpx.Client) -> None:
    prompt = "一二三四五六七八九十" * 8
    answer = both_ways(http, "completions", {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True})
    assert answer.chunks > 2


@pytest.mark.parametrize("at", [998, 999])
def test_a_wide_character_at_any_byte_of_a_prompt(http: httpx.Client, at: int) -> None:
    assert ask(http, "completions", {"prompt": "a" * at + "你一", "max_tokens": 1}).completion_tokens == 1


@pytest.mark.parametrize("text", ["Hello:World", " leading x", "  two", "a\n\n b\t", "it's 'x' .", EMOJI])
def test_ids_give_the_text_back_with_every_space(http: httpx.Client, text: str) -> None:
    ids = tokenize(http, prompt=text, add_special_tokens=False)
    assert detokenize(http, ids) == text
    assert post(http, TEXT, prompt=text, add_special_tokens=False, max_tokens=1)["usage"]["prompt_tokens"] == len(ids)


def test_control_tokens_are_shown_as_written(http: httpx.Client) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenize(http, prompt=text, add_special_tokens=False)
    assert len(ids) < 12
    assert detokenize(http, ids) == text


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_an_answer_are_those_of_its_text(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": COUNT, "max_tokens": 20, "temperature": 0, "return_token_ids": True, "stream": stream}
    response = http.post(TEXT, json=body)
    chunks = events(response.text) if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert len(ids) == 20
    assert detokenize(http, ids) == "".join(choice["text"] for choice in choices)


# -- scores ------------------------------------------------------------------------------------------------------------


def test_shown_ids_leave_the_scores_as_they_are(http: httpx.Client) -> None:
    body = chat_body(COUNT, max_tokens=8, logprobs=True, top_logprobs=2)
    assert (
        post(http, CHAT, **body, return_token_ids=True)["choices"][0]["logprobs"]
        == post(http, CHAT, **body)["choices"][0]["logprobs"]
    )


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_scores_are_as_many_as_tokens_when_a_stop_token_ends_it(http: httpx.Client, route: str) -> None:
    end = tokenize(http, prompt=",", add_special_tokens=False)
    asked = chat_body(COUNT, logprobs=True) if route == CHAT else {"prompt": COUNT, "logprobs": 0}
    reply = post(http, route, **asked, stop_token_ids=end, max_tokens=30, return_token_ids=True)
    (choice,) = reply["choices"]
    scores = choice["logprobs"]["content"] if route == CHAT else choice["logprobs"]["token_logprobs"]
    assert len(scores) == len(choice["token_ids"]) == reply["usage"]["completion_tokens"]
    if route == TEXT:
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
    ],
)
def test_every_way_to_ask_for_scores_or_for_none(http: httpx.Client, asked: dict[str, Any], shown: int | None) -> None:
    found = post(http, CHAT, **chat_body("Hi", max_tokens=2), **asked)["choices"][0]["logprobs"]
    assert (None if found is None else len(found["content"][0]["top_logprobs"])) == shown


@pytest.mark.parametrize("field", ["logprob_token_ids", "prompt_token_ids", "allowed_token_ids"])
def test_lists_of_ids_that_are_not_honoured_are_refused(http: httpx.Client, field: str) -> None:
    refused(http, TEXT, field, **{field: [5, 6]})
    refused(http, CHAT, field, **chat_body("Hi"), **{field: [5, 6]})


def test_words_to_avoid_and_formats_are_refused_and_the_engine_lives(http: httpx.Client) -> None:
    refused(http, CHAT, "bad_words", **chat_body("Hi"), bad_words=["humans", "properly"])
    refused(http, CHAT, "response_format", **chat_body("Hi"), response_format={"type": "json_object"})


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cold",
    [
        {"temperature": 0.0001},
        {"temperature": 1, "top_p": 0.0001},
        {"temperature": 2, "top_p": 0},
        {"temperature": 2, "top_k": 1},
        {"temperature": 1e-6},
    ],
)
def test_the_coldest_sampling_is_greedy(http: httpx.Client, cold: dict[str, float]) -> None:
    assert text_of(http, **cold, ignore_eos=True) == text_of(http, temperature=0, ignore_eos=True) != ""


def test_hot_sampling_is_not_greedy_by_default(http: httpx.Client) -> None:
    assert len({text_of(http, temperature=2, seed=seed, max_tokens=5) for seed in range(3)}) == 3


@pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1])
def test_a_seed_repeats_whatever_number_it_is(http: httpx.Client, seed: int) -> None:
    body = chat_body("Tell me a story.", max_tokens=12) | {"temperature": 1, "seed": seed}
    assert ask(http, "chat/completions", body) == ask(http, "chat/completions", body)


def test_two_greedy_choices_are_the_same_and_fewer_candidates_are_refused(http: httpx.Client) -> None:
    reply = post(http, TEXT, prompt=COUNT, max_tokens=8, n=2)
    assert len({choice["text"] for choice in reply["choices"]}) == 1
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    refused(http, TEXT, "best_of", n=2, best_of=1)


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1.4}])
def test_penalties_of_a_text_that_repeats_count_every_accepted_token(
    http: httpx.Client, plain_http: httpx.Client, penalty: dict[str, float]
) -> None:
    body = {"prompt": "la la la la la la la la", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **penalty}
    drafted = ask(http, "completions", body)
    assert drafted == ask(plain_http, "completions", body)
    assert drafted.text != text_of(http, prompt=body["prompt"], max_tokens=24, ignore_eos=True)


# -- batches, streams, caches, figures ---------------------------------------------------------------------------------


def test_lists_of_ids_in_a_batch_are_answered_as_each_alone(http: httpx.Client) -> None:
    prompts = [tokenize(http, prompt=text, add_special_tokens=False) for text in (COUNT, "A, B, C,", "x")]
    together = [choice["text"] for choice in post(http, TEXT, prompt=prompts, max_tokens=6)["choices"]]
    assert together == [text_of(http, prompt=prompt, max_tokens=6) for prompt in prompts]


def test_every_choice_of_a_stream_begins_with_its_role(http: httpx.Client) -> None:
    chunks = events(http.post(CHAT, json=chat_body("Hi", max_tokens=4, n=2, stream=True)).text)
    first: dict[int, Any] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        first.setdefault(choice["index"], choice["delta"].get("role"))
    assert first == {0: "assistant", 1: "assistant"}


@pytest.mark.parametrize(("options", "last"), [({}, False), (None, False), ({"include_usage": True}, True)])
def test_usage_is_streamed_when_asked_for_and_null_before_its_end(http: httpx.Client, options: Any, last: bool) -> None:
    body = chat_body("Hi", max_tokens=3, stream=True, stream_options=options)
    chunks = events(http.post(CHAT, json=body).text)
    if last:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert not any(chunk.get("usage") for chunk in chunks)


def test_a_cached_prompt_is_as_long_with_drafts_as_without_and_says_the_same(
    http: httpx.Client, plain_http: httpx.Client
) -> None:
    prompt = "One page of text that nobody has sent before, number 8231. " * 8
    cached, texts = [], []
    for server in (http, plain_http):
        for _ in range(2):
            reply = post(server, TEXT, prompt=prompt, max_tokens=16)
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
            texts.append(reply["choices"][0]["text"])
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0
    assert len(set(texts)) == 1


def test_a_client_that_leaves_a_whole_answer_frees_its_place_and_is_counted(
    http: httpx.Client, speculative: RealServer
) -> None:
    aborted = speculative.metric("vllm:request_success_total", finished_reason="abort")
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=chat_body("Count to 1000", max_tokens=2000, ignore_eos=True), timeout=1.0)
    eventually(lambda: speculative.metric("vllm:num_requests_running") == 0, 20)
    eventually(lambda: speculative.metric("vllm:kv_cache_usage_perc") == 0, 20)
    assert speculative.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1


def test_refusals_are_counted_and_tokens_are_counted_alike_in_both_places(
    http: httpx.Client, speculative: RealServer
) -> None:
    refusals = speculative.metric("foretoken:http_responses_total", code="400")
    assert http.post(CHAT, json={"messages": []}).status_code == 400
    assert speculative.metric("foretoken:http_responses_total", code="400") == refusals + 1
    before = speculative.metric("vllm:generation_tokens_total")
    in_requests = speculative.metric("vllm:request_generation_tokens_sum")
    ask(http, "completions", {"prompt": COUNT, "max_tokens": 9, "temperature": 0, "ignore_eos": True})
    assert speculative.metric("vllm:generation_tokens_total") - before == 9
    assert speculative.metric("vllm:request_generation_tokens_sum") - in_requests == 9


# -- messages ----------------------------------------------------------------------------------------------------------


def test_an_answer_of_a_tool_is_read_and_a_call_of_one_is_refused_by_name(http: httpx.Client) -> None:
    user = {"role": "user", "content": "What is the number?"}
    answer = {"role": "tool", "tool_call_id": "a", "content": "42"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {}}]}
    assert post(http, CHAT, messages=[user, answer], max_tokens=1)["usage"]["completion_tokens"] == 1
    refused(http, CHAT, "messages[1].tool_calls", messages=[user, called, answer])
    plain = {"role": "assistant", "content": "Wait.", "tool_calls": None, "function_call": None, "refusal": None}
    assert post(http, CHAT, messages=[user, plain, user], max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}, {"content": "x"}])
def test_a_message_that_lacks_something_is_refused_by_its_place(http: httpx.Client, message: dict[str, Any]) -> None:
    refused(http, CHAT, "messages[0].", messages=[message, {"role": "user", "content": "Hi"}])
