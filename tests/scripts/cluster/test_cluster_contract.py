"""The API tests, unchanged, against two replicas behind one address; then what only a cluster can get wrong."""

from __future__ import annotations

import os
import signal
from types import ModuleType
from typing import Any

import httpx
import pytest

from eval.servers import descendants
from scripts.cluster.rehearse import is_replica
from tests.e2e.real_server import Stream
from tests.scripts.cluster.scripted_cluster import ScriptedCluster
from tests.serve.api import (
    test_chat_completions,
    test_provenance,
    test_refusals,
    test_reports_of_http,
    test_text_completions,
)
from tests.serve.api.live_server import chat, eventually

# Those start a server of their own, or throw thousands of bodies at the parser, which is the same one.
_ELSEWHERE = {
    "test_a_model_whose_name_has_a_slash_is_found_by_it",
    "test_defaults_come_from_the_generation_config",
    "test_no_body_is_answered_with_a_server_error",
    "test_no_bytes_are_answered_with_a_server_error",
}


def _tests_of(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name.startswith("test_") and name not in _ELSEWHERE}


for _module in (
    test_chat_completions,
    test_provenance,
    test_refusals,
    test_reports_of_http,
    test_text_completions,
):
    globals().update(_tests_of(_module))
del test_chat_completions, test_provenance, test_refusals, test_reports_of_http, test_text_completions

SLOW = "!say:" + "x" * 40 + "!!slow:0.1!"


def owner(server: ScriptedCluster, http: httpx.Client, body: dict[str, Any]) -> str:
    """The replica that answers ``body``."""
    before = server.replicas()
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    (name,) = [name for name, count in server.replicas().items() if count != before.get(name, 0)]
    return name


def talks_at_each(server: ScriptedCluster, http: httpx.Client, count: int) -> dict[str, list[str]]:
    """``count`` first messages for every replica, by the replica that they go to."""
    found: dict[str, list[str]] = {name: [] for name in server.wait_for_two()}
    number = 0
    while min(map(len, found.values())) < count:
        assert number < 64, found
        found[owner(server, http, chat(f"{number}!say:short!"))].append(f"{number}!say:short!")
        number += 1
    return found


def test_a_conversation_stays_with_its_replica_and_a_session_is_named_by_its_header(
    server: ScriptedCluster, http: httpx.Client
) -> None:
    talks = talks_at_each(server, http, 1)
    for name, (first, *_) in talks.items():
        longer = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": "short"},
            {"role": "user", "content": f"and then, {name}?"},
        ]
        assert owner(server, http, {"messages": longer}) == name
        assert owner(server, http, {"messages": longer[:1], "temperature": 0.5}) == name
    with server.client(headers={"x-session-id": "one session"}) as session:
        assert len({owner(server, session, chat(f"{n}!say:a!")) for n in range(4)}) == 1


def test_one_page_has_the_metrics_of_all_replicas_and_a_head_for_each(
    server: ScriptedCluster, http: httpx.Client
) -> None:
    talks_at_each(server, http, 1)  # answers are counted from the first on
    lines = http.get("/metrics").text.splitlines()
    heads = [line.split(" ")[2] for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    assert "foretoken:up" in heads
    samples = [line for line in lines if not line.startswith("#")]
    named = {name: [line for line in samples if f'replica="{name}"' in line] for name in server.replicas()}
    assert len(named) == 2
    assert sum(map(len, named.values())) == len(samples)
    metrics = [{line.partition("{")[0] for line in lines} for lines in named.values()]
    assert metrics[0] == metrics[1]


def test_a_client_that_leaves_frees_its_place_at_the_replica(server: ScriptedCluster, http: httpx.Client) -> None:
    before = len(server.messages("cancel"))
    with http.stream("POST", "/v1/chat/completions", json=chat(SLOW, stream=True)) as response:
        next(response.iter_bytes())
    eventually(lambda: len(server.messages("cancel")) > before)


def test_a_killed_replica_takes_only_its_own_streams_with_it_and_comes_back(
    server: ScriptedCluster, http: httpx.Client
) -> None:
    sessions: dict[str, httpx.Client] = {}
    before = set(server.wait_for_two())
    for number in range(64):
        session = server.client(headers={"x-session-id": str(number)})
        sessions.setdefault(owner(server, session, chat("!say:a!")), session)
        if len(sessions) == 2:
            break
    everyone = [Stream(session, "chat/completions", chat(SLOW)) for session in sessions.values() for _ in range(2)]
    eventually(lambda: all(stream.body for stream in everyone))
    replicas = [pid for pid in descendants(server.process.pid) if is_replica(pid)]
    assert len(replicas) == 2
    os.kill(replicas[0], signal.SIGKILL)
    for number in range(6):
        assert http.post("/v1/chat/completions", json=chat(f"{number}!say:still here!")).status_code == 200
    for stream in everyone:
        stream.join(30)
    lost = [stream for stream in everyone if not stream.ended_well()]
    assert lost in (everyone[:2], everyone[2:])
    assert all(stream.ended_badly() and '"replica_lost"' in stream.body for stream in lost)
    assert not any(stream.broken for stream in everyone)
    for session in sessions.values():
        session.close()
    eventually(lambda: len(server.replicas()) == 2 and set(server.replicas()) != before, 60)
    assert len(set(server.replicas()) & before) == 1


def test_a_fault_of_one_engine_is_an_error_frame_and_another_replica(
    server: ScriptedCluster, http: httpx.Client
) -> None:
    before = set(server.wait_for_two())
    stream = Stream(http, "chat/completions", chat("!say:abcdefgh!!die:4!"))
    stream.join(30)
    assert stream.ended_badly()
    assert not stream.broken
    assert [http.post("/v1/chat/completions", json=chat(f"{n}!say:on!")).status_code for n in range(6)] == [200] * 6
    eventually(lambda: len(server.replicas()) == 2 and set(server.replicas()) != before, 60)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_is_green_while_any_replica_would_answer(http: httpx.Client, method: str) -> None:
    response = http.request(method, "/health")
    assert response.status_code == 200
    assert response.text == ('{"status":"ok"}' if method == "GET" else "")
