"""Responses through the rollout, the engine and a URL are the target's, as ids; sharded and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from drafter_train.backends import Ask, UrlBackend
from drafter_train.evaluate import main as evaluate
from drafter_train.generate import main
from drafter_train.head import write_head_tokens
from drafter_train.tokens import TokenStore
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.tiny_models import greedy, write_model

ENDS = (2,)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("generate-target")
    return folder, write_model(folder, "llama", seed=4, num_hidden_layers=5)


@pytest.fixture
def recipe(tmp_path: Path, target: tuple[Path, Any]) -> Path:
    prompts = [{"prompt": f"Say {word}."} for word in ("one", "twenty", "three hundred", "no", "a")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    data = {
        "prompts": str(tmp_path / "prompts.jsonl"),
        "eval_prompts": str(tmp_path / "prompts.jsonl"),
        "tokens": str(tmp_path / "tokens"),
        "eval_tokens": str(tmp_path / "eval"),
        "max_new_tokens": 20,
        "passes": [{}, {"sampled_tokens": [3, 6]}, {"sampled_tokens": [20, 20], "share": 0.4}],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "g", "target": str(target[0]), "data": data, "train": {"max_steps": 1}}))
    return path


def truth(model: Any, ids: list[int], count: int) -> list[int]:
    """Greedy, up to and including an end token."""
    written = greedy(model, ids, count)
    end = next((i for i, token in enumerate(written) if token in ENDS), count - 1)
    return written[: end + 1]


class _Completions(BaseHTTPRequestHandler):
    """Answers like a server that returns ids; the first request gets a 503."""

    model: Any
    with_ids = True
    finish_reason = "length"
    busy: list[bool]

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.busy:
            self.busy.pop()
            return self.send_error(503)
        assert asked["return_token_ids"] is True
        ids = truth(self.model, asked["prompt"], asked["max_tokens"])
        choice: dict[str, Any] = {"text": "?", "finish_reason": self.finish_reason}
        if self.with_ids:
            choice["token_ids"] = ids
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None


@pytest.fixture
def handler(target: tuple[Path, Any]) -> type[_Completions]:
    return type("Completions", (_Completions,), {"model": target[1], "busy": [True]})


@pytest.fixture
def url(handler: type[_Completions]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("through", ["rollout", "engine", "url"])
def test_every_writer_stores_the_targets_own_ids(
    recipe: Path, target: tuple[Path, Any], url: str, through: str
) -> None:
    options = ["--config", str(recipe), "--slots", "3", "--device", "cpu"]
    options += ["--through", url if through == "url" else through]
    assert main([*options, "--shard", "0/2"]) == 0
    assert main([*options, "--shard", "1/2"]) == 0
    store = TokenStore(recipe.parent / "tokens")
    found = {(item.pass_index, item.prompt): item for item in store.responses()}
    assert sorted(found) == [(0, i) for i in range(5)] + [(1, i) for i in range(5)] + [(2, i) for i in range(2)]
    for (number, prompt), item in found.items():
        ids = store.prompt(prompt).tolist()
        row = item.ids.tolist()
        assert item.ended == (row[-1] in ENDS)
        if number == 0:
            assert item.greedy_from == 0
        if number == 2:
            assert item.greedy_from == len(row)
        kept = item.greedy_from
        if kept < len(row):
            assert row[kept:] == truth(target[1], ids + row[:kept], 20 - kept)
    files = sorted(path.name for path in store.folder.glob("[!.]*"))
    assert main(options) == 0
    assert sorted(path.name for path in store.folder.glob("[!.]*")) == files


def test_a_polite_signal_keeps_what_is_written_and_the_next_run_writes_the_rest(
    recipe: Path, handler: type[_Completions], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting(handler):  # type: ignore[misc, valid-type]
        def do_POST(self) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            super().do_POST()

    with ThreadingHTTPServer(("127.0.0.1", 0), Interrupting) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        through = f"http://127.0.0.1:{server.server_address[1]}/v1"
        assert main(["--config", str(recipe), "--slots", "1", "--through", through]) == 3
        server.shutdown()
    assert "stopped, run the same command again for the rest: 1 responses" in capsys.readouterr().err
    first = list(TokenStore(recipe.parent / "tokens").responses())
    assert [(item.pass_index, item.prompt) for item in first] == [(0, 0)]
    assert main(["--config", str(recipe), "--through", url]) == 0
    found = [(item.pass_index, item.prompt) for item in TokenStore(recipe.parent / "tokens").responses()]
    assert len(found) == len(set(found)) == 12


def test_a_url_without_ids_is_refused(
    recipe: Path, handler: type[_Completions], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handler.with_ids = False
    handler.busy.clear()
    assert main(["--config", str(recipe), "--through", url]) == 1
    assert "returns no token_ids; its text would have to be tokenised again" in capsys.readouterr().err


def test_an_answer_that_a_url_broke_off_is_not_taken(handler: type[_Completions], url: str) -> None:
    """A server that is told to end gives what it has so far, with HTTP 200."""
    handler.finish_reason = "abort"
    backend = UrlBackend(url, "m", 1, pause_seconds=0.0)
    with pytest.raises(
        ValueError, match="failed 4 times, last with finish_reason 'abort', an answer that is not whole"
    ):
        backend.complete([Ask((5, 6, 7), 4)])


@pytest.mark.parametrize(
    "line",
    ['{"prompt": null}', '{"prompt": 5}', '{"messages": "hello"}', '{"messages": [{"role": "user"}]}', "[1]",
     '{"prompt": "half \\ud83d"}', '{"prompt": "caf\xe9"}'],
)  # fmt: skip
def test_a_prompt_that_is_no_text_is_named_by_its_line(
    recipe: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe.parent / "prompts.jsonl").write_bytes(b'{"prompt": "fine"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(SystemExit):
        main(["--config", str(recipe), "--device", "cpu"])
    assert "prompts.jsonl line 2" in capsys.readouterr().err
    assert not (recipe.parent / "tokens").exists()


def test_a_file_without_prompts_and_a_refusing_template_are_said_so(
    recipe: Path, target: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = recipe.parent / "prompts.jsonl"
    strict = tmp_path / "strict"
    shutil.copytree(target[0], strict)
    config = strict / "tokenizer_config.json"
    text = "{{ raise_exception('roles must alternate') }}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": text}))
    for options in (["--set", f"target={strict}"], []):
        with pytest.raises(SystemExit):
            main(["--config", str(recipe), "--device", "cpu", *options])
        prompts.write_text("\n")
    said = capsys.readouterr().err
    assert "the chat template refuses" in said
    assert "roles must alternate" in said
    assert "prompts.jsonl holds no prompt" in said


@pytest.mark.parametrize("other", ["target", "data.max_new_tokens"])
def test_responses_of_another_target_or_length_are_not_mixed_in(
    recipe: Path, target: tuple[Path, Any], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(recipe), "--device", "cpu", "--shard", "0/4"]) == 0
    alike = recipe.parent / "fine-tuned"
    shutil.copytree(target[0], alike)
    value = alike if other == "target" else 7
    with pytest.raises(SystemExit):
        main(["--config", str(recipe), "--device", "cpu", "--set", f"{other}={value}"])
    assert f"holds responses with {other.removeprefix('data.')}" in capsys.readouterr().err


def test_an_unreachable_url_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = UrlBackend("http://127.0.0.1:9/v1", "m", 1, pause_seconds=0.0)
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9/v1 failed 4 times, last with ConnectError"):
        backend.complete([Ask((5,), 3)])
    with pytest.raises(SystemExit):
        main(["--config", str(recipe), "--shard", "2/2"])
    assert "--shard wants INDEX/COUNT" in capsys.readouterr().err
    for options in (["--slots", "0"], ["--limit", "-3"]):  # answered nothing, and said "done"
        with pytest.raises(SystemExit):
            main(["--config", str(recipe), *options])
        assert "--slots must be 1 or more, --limit and --max-seconds 0 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate(["--config", str(recipe), "--drafter", "any", "--limit", "-3"])
    assert "--served and --limit must be 0 or more" in capsys.readouterr().err
    assert main(["--config", str(recipe), "--through", "elsewhere"]) == 1
    assert "--through must be rollout, engine or a URL, got 'elsewhere'" in capsys.readouterr().err


@pytest.mark.parametrize("listed", [False, True])
def test_served_and_simulated_acceptance_agree(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], listed: bool
) -> None:
    assert main(["--config", str(recipe), "--split", "eval", "--device", "cpu"]) == 0
    drafter = write_drafter(tmp_path / "drafter", random_drafter(drafter_config()))
    if listed:
        write_head_tokens(drafter, np.arange(0, 320, 2))
    options = ["--config", str(recipe), "--drafter", str(drafter), "--device", "cpu", "--served", "5"]
    assert evaluate(options) == 0
    report = json.loads((drafter / "drafter_eval.json").read_text())
    served = report["served"]
    assert served["responses"] == 5
    assert served["rounds"] > 10
    assert abs(served["difference"]) < 1e-9
    assert served["acceptance_length"] == pytest.approx(report["acceptance_length"])
    assert report["head_tokens"] == (160 if listed else 320)
    assert ("frequent_tokens" in report) is listed
    if listed:
        cost = report["frequent_tokens"]
        assert (cost["tokens"], cost["responses"]) == (160, 5)
        assert cost["acceptance_length"] == pytest.approx(report["acceptance_length"])
        assert cost["acceptance_length_of_all_tokens"] >= 1
    said = capsys.readouterr()
    assert "served acceptance length" in said.err
    assert "drafted a round" in said.out
    assert evaluate([*options, "--served-only", "--tolerance", "-1", "--out", str(tmp_path / "again.json")]) == 1
    again = json.loads((tmp_path / "again.json").read_text())
    assert again == report
