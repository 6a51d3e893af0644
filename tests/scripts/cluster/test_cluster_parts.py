"""The parts of the cluster that need none: keys of conversations, merged pages, options, requests that get lost."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from scripts.cluster.affinity import affinity_key
from scripts.cluster.front import Gateway
from scripts.cluster.pages import merge_pages
from scripts.cluster.replica import LOST
from scripts.cluster.settings import ClusterSettings, SettingsError, add_cluster_arguments, options_of, settings_from
from serve.api.auth import KeyFileError
from tests.conftest import ROOT

TEXT = st.text(min_size=1, max_size=20)


def chat(*turns: tuple[str, str], **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns], **fields}).encode()


@given(system=TEXT, first=TEXT, more=st.lists(TEXT, max_size=4))
def test_a_conversation_keeps_its_key_as_it_grows(system: str, first: str, more: list[str]) -> None:
    opening = [("system", system), ("user", first)]
    later = [(("assistant", "user")[index % 2], text) for index, text in enumerate(more)]
    assert affinity_key(chat(*opening, *later, temperature=1)) == affinity_key(chat(*opening))
    assert affinity_key(chat(*opening)) != affinity_key(chat(("system", system), ("user", first + "!")))


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


@given(
    st.one_of(
        st.binary(max_size=60).filter(lambda body: not _is_object(body)),  # bytes may be a whole request by chance
        st.recursive(st.none() | st.integers() | TEXT, st.lists).map(lambda value: json.dumps(value).encode()),
    )
)
def test_no_body_makes_the_key_fail(body: bytes) -> None:
    assert affinity_key(body) is None


@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"prompt": 3}, {"messages": []}, {"model": "m"}])
def test_an_object_without_a_beginning_has_no_key(body: Any) -> None:
    assert affinity_key(json.dumps(body).encode()) is None


@pytest.mark.parametrize("prompt", ["once upon a time", [1, 2, 3], ["a", "b"]])
def test_a_plain_prompt_has_the_key_of_its_beginning(prompt: Any) -> None:
    assert affinity_key(json.dumps({"prompt": prompt}).encode()) is not None
    text = "x" * 300
    assert affinity_key(json.dumps({"prompt": text}).encode()) == affinity_key(
        json.dumps({"prompt": text + "y"}).encode()
    )


def test_pages_are_merged_under_one_head_with_the_replica_first() -> None:
    page = '# HELP a What.\n# TYPE a gauge\na{m="x"} 1\n# HELP b Else.\n# TYPE b counter\nb{m="x",code="200"} 2\n'
    assert merge_pages({"r1": page, "r2": page.replace("} 1", "} 7")}) == (
        '# HELP a What.\n# TYPE a gauge\na{replica="r1",m="x"} 1\na{replica="r2",m="x"} 7\n'
        '# HELP b Else.\n# TYPE b counter\nb{replica="r1",m="x",code="200"} 2\nb{replica="r2",m="x",code="200"} 2\n'
    )


def settings(*options: str, environ: dict[str, str] | None = None) -> ClusterSettings:
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    args, rest = parser.parse_known_args(["--model-dir", "m", *options])
    return settings_from(args, rest, environ or {})


def test_options_of_the_server_stand_beside_those_of_the_cluster() -> None:
    found = settings("--replicas", "3", "--max-replicas", "8", "--max-num-seqs", "32")
    assert (found.replicas, found.serve.max_num_seqs, found.ongoing_target()) == (3, 32, 24.0)
    assert found.gpus_of_replica(8.0) == 1.0
    assert settings("--gpus", "0.5").gpus_of_replica(8.0) == 0.5
    assert settings("--tensor-parallel", "2").gpus_of_replica(8.0) == 2.0
    assert found.gpus_of_replica(0.0) == 0.0
    assert settings("--device", "cpu").gpus_of_replica(8.0) == 0.0
    assert ClusterSettings.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--restart-engine",), "--restart-engine"),
        (("--trace-dir", "t"), "--trace-dir"),
        (("--dev-routes",), "--dev-routes"),
        (("--replicas", "0"), "--replicas"),
        (("--replicas", "4", "--max-replicas", "2"), "--max-replicas"),
        (("--route-prefix", "x"), "--route-prefix"),
        (("--target-ongoing", "-5"), "--target-ongoing must be between 0"),
        (("--target-ongoing", "nan"), "--target-ongoing must be between 0"),
        (("--upscale-delay", "-1"), "--upscale-delay must be between 0"),
        (("--downscale-delay", "inf"), "--downscale-delay must be between 0"),
        (("--gpus", "1", "--tensor-parallel", "2"), "--gpus 1 is not enough for --tensor-parallel 2"),
    ],
)
def test_what_a_cluster_cannot_honour_is_refused_by_name(options: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        settings(*options)


def test_options_come_from_yaml_and_those_for_slurm_are_good(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("replicas: 3\npage: false\nserved-model-name: x y\n")
    found = settings(*options_of(str(path)))
    assert (found.replicas, found.serve.page, found.serve.served_model_name) == (3, False, "x y")
    options = options_of(str(ROOT / "scripts" / "slurm" / "serve_cluster.yaml"))
    for_slurm = settings(*(option for option in options if not option.startswith("--api-key-file")))
    assert (for_slurm.replicas, for_slurm.max_replicas, for_slurm.gpus_of_replica(8.0)) == (4, 8, 1.0)
    for text, said in (("- a", "NAME: VALUE"), ("a: [1]", "a must be"), ("a: 'b", "cannot be read")):
        path.write_text(text)
        with pytest.raises(SettingsError, match=said):
            options_of(str(path))


def test_a_key_here_is_needed_on_every_node(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one-long-key\n")
    assert settings("--api-key-file", str(tmp_path / "keys")).needs_key
    assert settings(environ={"FORETOKEN_API_KEY": "another-key"}).needs_key
    assert not settings().needs_key
    with pytest.raises(KeyFileError, match="cannot be read"):
        settings("--api-key-file", str(tmp_path / "none"))


class Answers:
    """Stands in for Ray's handle of the replicas: each request gets the next of ``answers``, whose last item may be an
    error."""

    def __init__(self, answers: Sequence[Sequence[Any]]) -> None:
        self._answers = list(answers)
        self.answer = self

    def options(self, **_: object) -> Answers:
        return self

    def remote(self, asked: dict[str, Any], body: bytes) -> Answer:
        return Answer(self._answers.pop(0))


class Answer:
    def __init__(self, items: Sequence[Any]) -> None:
        self._items = list(items)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._items:
            raise StopAsyncIteration
        if isinstance(item := self._items.pop(0), BaseException):
            raise item
        return item

    def cancel(self) -> None:
        pass


GOOD = [(200, [(b"content-type", b"application/json")]), b"{}"]
GONE = [ActorDiedError()]
NO_ENGINE = [(500, [(b"content-type", b"application/json"), LOST]), b"{}"]
NOT_READY: list[Any] = [(503, []), b""]
HALF = [(200, [(b"content-type", b"text/event-stream")]), b"data: 1\n\n", ActorDiedError()]


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([GONE, GOOD], 200),
        ([NO_ENGINE, GOOD], 200),
        ([GONE, NOT_READY, GOOD], 200),
        ([GONE, NO_ENGINE], 500),
        ([NO_ENGINE, GONE], 500),
        ([HALF], 200),
    ],
)
def test_a_request_goes_to_another_replica_once_if_the_first_was_lost_before_a_word(
    answers: list[list[Any]], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.cluster.front._FIRST_PAUSE_SECONDS", 0.0)
    handle = Answers(answers)
    sent: list[dict[str, Any]] = []

    async def ask() -> None:
        came = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not came.is_set():
                came.set()
                return {"type": "http.request", "body": chat(("user", "hi"))}
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
        await Gateway(settings(), handle)(scope, receive, send)

    asyncio.run(ask())
    heads = [message for message in sent if message["type"] == "http.response.start"]
    assert [head["status"] for head in heads] == [status]
    assert LOST not in heads[0]["headers"]
    assert not handle._answers
    text = b"".join(message.get("body", b"") for message in sent)
    assert (b"replica_lost" in text) == (answers[-1] in (GONE, HALF))
