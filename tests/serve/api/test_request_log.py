"""One line for each request that was answered, plain or JSON: what it holds, and what it never holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.serve.api.live_server import ROOT, LiveServer, chat, eventually


def ask_in_every_way(live: LiveServer) -> None:
    """A whole chat, a stream, two choices cut at their length, a failure, and a client that leaves."""
    with live.client() as http:
        whole = chat("secret words !say:abcdef!")
        http.post("/v1/chat/completions", json=whole, headers={"x-request-id": "whole-1"})
        http.post("/v1/chat/completions", json=chat("!say:abcdef!", stream=True), headers={"x-request-id": "stream-1"})
        cut = {"prompt": "xyz !say:abcdef!", "n": 2, "max_tokens": 3}
        http.post("/v1/completions", json=cut, headers={"x-request-id": "cut-1"})
        http.post("/v1/chat/completions", json=chat("!error:0!"), headers={"x-request-id": "error-1"})
        http.post("/v1/chat/completions", json={"messages": "secret"}, headers={"x-request-id": "refused-1"})
    slow = chat("!say:abcdefgh! !slow:0.2!", stream=True)
    with (
        live.client() as leaving,
        leaving.stream("POST", "/v1/chat/completions", json=slow, headers={"x-request-id": "left-1"}) as response,
    ):
        next(response.iter_text())
    eventually(lambda: any("left-1" in line for line in live.errors))


def test_json_lines_say_sizes_times_acceptance_and_the_end(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--log-json") as live:
        ask_in_every_way(live)
    lines = [json.loads(line) for line in live.errors]
    found: dict[str, dict[str, Any]] = {
        line["request_id"]: line for line in lines if line["logger"] == "serve.requests"
    }
    assert set(found) == {"whole-1", "stream-1", "cut-1", "error-1", "left-1"}
    whole = found["whole-1"]
    assert whole["id"].startswith("chatcmpl-")
    assert whole["route"] == "/v1/chat/completions"
    assert (whole["status"], whole["finish_reason"], whole["stream"], whole["choices"]) == (200, "stop", False, 1)
    assert (whole["completion_tokens"], whole["cached_tokens"]) == (7, 1)
    assert whole["prompt_tokens"] > 20
    assert (whole["draft_tokens"], whole["accepted_tokens"]) == (10, 5)
    assert abs(whole["acceptance_length"] - (1 + 5 / 3)) < 1e-9
    assert whole["queue_seconds"] == 0.001
    assert 0 < whole["ttft_seconds"] <= whole["ttft_seconds"] + whole["decode_seconds"] <= whole["total_seconds"]
    assert found["stream-1"]["stream"] is True
    cut = found["cut-1"]
    assert (cut["finish_reason"], cut["choices"], cut["completion_tokens"]) == ("length,length", 2, 6)
    assert (cut["prompt_tokens"], cut["cached_tokens"]) == (len("xyz !say:abcdef!"), 1)  # once, as in the usage
    assert (found["error-1"]["status"], found["error-1"]["finish_reason"]) == (500, "error")
    assert (found["left-1"]["status"], found["left-1"]["finish_reason"]) == (499, "cancelled")
    assert "secret" not in "".join(live.errors)


def test_plain_lines_say_the_same(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live:
        ask_in_every_way(live)
    lines = [line for line in live.errors if line.startswith("INFO serve.requests: ")]
    assert len(lines) == 5
    assert re.search(r"request_id=whole-1 .*status=200 .*finish_reason=stop .*acceptance_length=2\.667 ", lines[0])
    assert "secret" not in "".join(live.errors)


def test_the_id_of_the_reply_and_of_the_request_lead_to_the_same_line(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--log-json") as live, live.client() as http:
        response = http.post("/v1/chat/completions", json=chat("x"))
        assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])
        eventually(lambda: any(response.json()["id"] in line for line in live.errors))
        (line,) = [line for line in live.errors if response.json()["id"] in line]
        assert response.headers["x-request-id"] in line


def test_plain_logs_say_why_a_start_chose_what_it_chose() -> None:
    """Without a C compiler an engine is several times slower, and in another weight format: not without a word."""
    code = (
        "import logging, serve.logs as logs; logs.set_up_logging(False); log = logging.getLogger('serve.model.loader')"
    )
    said = subprocess.run(
        [sys.executable, "-c", f"{code}; log.info('torch runs the layers')"], cwd=ROOT, capture_output=True, text=True
    )
    assert said.stderr == "INFO serve.model.loader: torch runs the layers\n"


def test_polling_health_and_metrics_fills_no_plain_log(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live, live.client() as http:
        before = len(live.errors)
        for path in ("/health", "/metrics", "/v1/models", "/nothing"):
            assert isinstance(http.get(path), httpx.Response)
        assert len(live.errors) == before
