from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.client import (
    ChatRequest,
    EventSplitter,
    Measurement,
    Record,
    measure,
    open_client,
    send,
    user_request,
    was_buffered,
)
from eval.load import run_closed, run_open
from tests.eval.stub_server import WordCounter, running_stub


def record(events: list[tuple[float, dict[str, Any] | str]], sent: float = 10.0, planned: float = 10.0) -> Record:
    data = tuple((at, body if isinstance(body, str) else json.dumps(body)) for at, body in events)
    return Record(user_request("hi", 8), planned, sent, events[-1][0], data, 200, None)


def text(piece: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": reason}]}


def ask(url: str, request: ChatRequest | None = None) -> Record:
    async def work() -> Record:
        async with open_client(url) as client:
            return await send(client, "stub", request or user_request("hi", 8))

    return asyncio.run(work())


def test_times_of_one_stream_by_definition(counter: WordCounter) -> None:
    item = measure(
        record(
            [
                (10.0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
                (10.5, text("one two")),
                (10.9, text(" three four five")),
                (11.0, text(" six", "length")),
                (11.0, {"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 3}}),
                (11.2, "[DONE]"),
            ]
        ),
        counter,
    )
    assert item.outcome == "ok"
    assert item.ttft == pytest.approx(0.5)
    assert item.tokens == 6
    assert item.usage_tokens == 7
    assert item.tpot == pytest.approx(0.5 / 5)
    assert item.icl == pytest.approx([0.4, 0.1])
    assert item.itl_amortised == pytest.approx([0.4 / 3] * 3 + [0.1])
    assert item.latency == pytest.approx(1.2)
    assert item.finish_reason == "length"


def test_a_token_belongs_to_the_chunk_in_which_it_ends(counter: WordCounter) -> None:
    item = measure(record([(11.0, text("uni")), (12.0, text("corn and")), (13.0, text(" more"))]), counter)
    assert item.tokens == 3
    assert len(item.itl_amortised) == 3 - 0
    assert sum(item.itl_amortised) == pytest.approx(sum(item.icl))


@given(st.lists(st.sampled_from(["a", "b ", " c", " ", "de f", "\n"]), min_size=1, max_size=12))
def test_any_chunking_counts_every_token_once_and_shares_out_all_the_time(pieces: list[str]) -> None:
    pieces = [*pieces, "end"]
    events: list[tuple[float, dict[str, Any] | str]] = [(10.0 + at, text(piece)) for at, piece in enumerate(pieces)]
    item = measure(record(events), WordCounter())
    assert len(item.token_times) == item.tokens
    assert sorted(item.token_times) == list(item.token_times)
    assert sum(item.itl_amortised) == pytest.approx(sum(item.icl))


def test_waiting_in_the_client_is_part_of_the_latency_from_the_plan(counter: WordCounter) -> None:
    item = measure(record([(12.0, text("a")), (12.0, "[DONE]")], sent=11.0, planned=8.0), counter)
    assert item.client_wait == pytest.approx(3.0)
    assert item.latency == pytest.approx(1.0)
    assert item.latency_from_plan == pytest.approx(4.0)


def test_one_chunk_has_no_tpot(counter: WordCounter) -> None:
    assert measure(record([(12.0, text("a b c"))]), counter).tpot is None


@given(st.lists(st.sampled_from(["plain", "zwei Zeilen", "ünïcode 漢字"]), min_size=1, max_size=6), st.integers(1, 7))
def test_events_survive_any_split_of_the_bytes(texts: list[str], size: int) -> None:
    stream = "".join(f": note\r\nevent: x\ndata: {item}\n\n" for item in texts).encode()
    splitter = EventSplitter()
    found = [data for at in range(0, len(stream), size) for data in splitter.feed(stream[at : at + size])]
    assert found == texts


def test_empty_role_chunk_does_not_count_as_first_token(counter: WordCounter) -> None:
    with running_stub(role_first=True, first_delay=0.15) as (url, _):
        item = measure(ask(url), counter)
    assert item.ttft is not None
    assert item.ttft >= 0.15


def test_an_answer_without_text_is_listed_apart_and_has_no_latency(counter: WordCounter) -> None:
    with running_stub(role_first=True, chunks=[]) as (url, _):
        item = measure(ask(url), counter)
    assert (item.outcome, item.ttft, item.latency) == ("empty", None, None)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [({"failure": 503}, "HTTP 503"), ({"finish": "cut"}, "DONE"), ({"finish": "error"}, "engine died")],
)
def test_failures_are_errors_and_never_latencies(behaviour: dict[str, Any], message: str, counter: WordCounter) -> None:
    with running_stub(**behaviour) as (url, _):
        item = measure(ask(url), counter)
    assert item.outcome == "error"
    assert message in (item.error or "")
    assert item.latency is None


@pytest.mark.parametrize("data", ["null", "5", '"x"', "[1]"])
def test_an_event_that_is_no_object_is_an_error_of_its_request(data: str, counter: WordCounter) -> None:
    item = measure(Record(user_request("hi", 4), 0.0, 0.0, 1.0, ((0.5, data), (0.6, "[DONE]"))), counter)
    assert item.outcome == "error"
    assert "no JSON object" in (item.error or "")


def test_a_server_that_is_not_there_is_an_error(counter: WordCounter) -> None:
    item = measure(ask("http://127.0.0.1:9"), counter)
    assert item.outcome == "error"
    assert "Connect" in (item.error or "")


def test_options_travel_in_the_body() -> None:
    with running_stub() as (url, state):
        ask(url, user_request("hi", 5, temperature=0.5, options=(("top_p", 0.9),)))
    assert state.bodies[0]["top_p"] == 0.9
    assert state.bodies[0]["temperature"] == 0.5
    assert state.bodies[0]["max_tokens"] == 5


def test_rate_above_a_client_limit_shows_the_wait_before_sending(counter: WordCounter) -> None:
    async def work(url: str) -> list[Measurement]:
        requests = iter([user_request(f"q{index}", 8) for index in range(10)])
        async with open_client(url) as client:
            records = await run_open(client, "stub", requests, 80.0, 60.0, 1, max_in_flight=1, spacing="constant")
        return [measure(item, counter) for item in records]

    with running_stub(serial=True, first_delay=0.04, chunks=["only"]) as (url, _):
        items = asyncio.run(work(url))
    assert len(items) == 10
    last = max(items, key=lambda item: item.sent_at)
    # Ten services of 40 ms, planned 12.5 ms apart: the last waits >= 9 * 40 - 10 * 12.5 ms in the client.
    assert last.client_wait > 0.2
    assert last.latency_from_plan is not None
    assert last.latency is not None
    assert last.latency_from_plan >= last.latency + 0.2


def test_closed_loop_never_has_more_in_flight_than_asked(counter: WordCounter) -> None:
    async def work(url: str) -> list[Measurement]:
        requests = (user_request(f"q{index}", 8) for index in range(100))
        async with open_client(url) as client:
            records = await run_closed(client, "stub", requests, 3, 0.4)
        return [measure(item, counter) for item in records]

    with running_stub(first_delay=0.02) as (url, _):
        items = asyncio.run(work(url))
    assert len(items) >= 3
    for item in items:
        overlapping = [other for other in items if other.sent_at <= item.sent_at < other.finished_at]
        assert len(overlapping) <= 3


def stream(tokens: int, an_event: int, events: int, gap: float, within: float, wait: float = 0.05) -> Measurement:
    """An answer whose steps come ``gap`` apart, each as ``events`` of ``an_event`` tokens that are ``within`` apart."""
    pieces = [(" word" * an_event, index) for index in range(tokens // an_event)]
    sent = [(10 + wait + index // events * gap + index % events * within, text(piece)) for piece, index in pieces]
    return measure(record([*sent, (sent[-1][0], "[DONE]")]), WordCounter())


@pytest.mark.parametrize(
    "item",
    [
        stream(256, 1, 1, 0.3e-3, 0.0),  # a very fast server, a token a step
        stream(256, 16, 1, 1.5e-3, 0.0),  # blocks of drafts, an event each: 94 us a token
        stream(256, 1, 16, 1.5e-3, 20e-6),  # the same, an event a token
        stream(256, 1, 16, 1.5e-3, 0.0, wait=30.0),  # the same behind a long queue
        stream(16, 1, 16, 1.0, 20e-6, wait=1.0),  # one block is the whole answer
        stream(16, 16, 1, 1.0, 0.0, wait=1.0),
    ],
)
def test_a_stream_of_steps_is_not_called_buffered(item: Measurement) -> None:
    assert item.outcome == "ok"
    assert not was_buffered(item)


@pytest.mark.parametrize(
    "item",
    [
        stream(256, 1, 256, 1.0, 0.0),  # one read
        stream(256, 1, 256, 1.0, 60e-6),  # let go event by event
        stream(256, 1, 64, 10e-3, 10e-6),  # in pieces of some kilobytes
        stream(256, 256, 1, 1.0, 0.0),  # not streamed
    ],
)
def test_a_stream_that_was_held_back_is_called_buffered(item: Measurement) -> None:
    assert item.outcome == "ok"
    assert was_buffered(item)


def test_a_stream_that_is_let_go_with_pauses_is_faster_than_any_server() -> None:
    pauses = [(11.0 + index * 20e-6 + index // 16 * 0.3e-3, text(" word")) for index in range(256)]
    assert was_buffered(measure(record([*pauses, (12.0, "[DONE]")]), WordCounter()))
