"""API keys: needed everywhere but on /health, never compared in the clear, and each with its own prefix cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve.api.auth import ApiKeys, KeyFileError
from tests.serve.api.live_server import LiveServer, chat

KEYS = ("first-key-0123", "second-key-456")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text(f"# keys of the test\n{KEYS[0]}\n\n")
    environ = {"FORETOKEN_API_KEY": KEYS[1]}
    with LiveServer(folder, "--api-key-file", str(folder / "keys"), "--dev-routes", environ=environ) as live:
        yield live


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_no_documented_route_but_health_answers_without_a_key(guarded: LiveServer) -> None:
    with guarded.client() as http:
        paths = http.get("/openapi.json", headers=bearer(KEYS[0])).json()["paths"]
        routes = [(method, path) for path, methods in paths.items() for method in methods]
        assert len(routes) >= 10
        for method, path in [
            *routes,
            ("get", "/openapi.json"),
            ("get", "/unknown"),
            ("get", "/health/"),
            ("get", "//health"),
        ]:
            response = http.request(method, guarded.base + path.replace("{name}", "x"))
            assert response.status_code == (200 if path == "/health" else 401), (method, path)
            if path != "/health" and method != "head":
                assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong-key", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x"]
)
def test_a_wrong_key_is_401(guarded: LiveServer, header: str) -> None:
    with guarded.client() as http:
        assert http.get("/v1/models", headers={"Authorization": header}).status_code == 401


def test_every_key_opens_and_has_its_own_salt(guarded: LiveServer) -> None:
    with guarded.client() as http:
        for key in (*KEYS, KEYS[0]):
            response = http.post("/v1/chat/completions", json=chat("x", cache_salt="mine"), headers=bearer(key))
            assert response.status_code == 200
    salts = [message["cache_salt"] for message in guarded.messages("generate")]
    assert salts[0] == salts[2] != salts[1]
    assert all(salt.endswith("/mine") and not any(key in salt for key in KEYS) for salt in salts)
    assert "Authorization: Bearer" in guarded.lines[1]


def test_the_engine_process_is_not_given_the_key(guarded: LiveServer) -> None:
    environment = Path(f"/proc/{guarded.engine_pid()}/environ").read_bytes()
    assert b"PYTHONPATH=" in environment
    assert KEYS[1].encode() not in environment


def test_a_server_open_to_others_without_a_key_says_so(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--host", "0.0.0.0") as live:
        assert httpx.get(live.base + "/health", trust_env=False).status_code == 200
    assert any("without an API key" in line for line in live.errors)


def test_a_key_file_that_protects_nothing_stops_the_start(tmp_path: Path) -> None:
    for content in (None, "", "# none\n\n", "short\n"):
        file = tmp_path / "keys"
        if content is not None:
            file.write_text(content)
        with pytest.raises(KeyFileError):
            ApiKeys.load(str(file), {})
    assert not ApiKeys.load(None, {"FORETOKEN_API_KEY": ""})
    with LiveServer(tmp_path / "server", "--api-key-file", str(tmp_path / "missing"), wait_ready=False) as live:
        assert live.wait() == 1
    assert "missing" in live.errors[0]


def test_request_ids_are_taken_over_when_sane(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for odd in ("x" * 200, "a b", "a,b"):
        given = http.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert len(given) == 32


def test_json_logs_have_a_line_for_each_request_and_no_prompt(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--log-json") as live, live.client() as http:
        http.post("/v1/chat/completions", json=chat("secret words"), headers={"x-request-id": "mark-1"})
        http.get("/secret-path")
    lines = [json.loads(line) for line in live.errors]
    (line,) = [line for line in lines if line.get("request_id") == "mark-1"]
    assert line["route"] == "/v1/chat/completions"
    assert "secret" not in "".join(live.errors)
