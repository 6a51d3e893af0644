"""What a real server writes while it serves, fails, is refused and traced: never a prompt, a reply or a key."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.real_server import RealServer
from tests.serve.api.live_server import eventually

KEY = "sesame-open-4711"
SECRET = "Zanzibar quicksilver"


@pytest.mark.parametrize("form", [(), ("--log-json",)], ids=["plain", "json"])
def test_neither_prompts_nor_replies_nor_keys_are_in_the_logs(
    tiny_pair: tuple[Path, Path], tmp_path: Path, form: tuple[str, ...]
) -> None:
    (tmp_path / "keys").write_text(KEY + "\n")
    model, drafter = tiny_pair
    arguments = ("--drafter-dir", str(drafter), "--api-key-file", str(tmp_path / "keys"), "--weights", "fp32", *form)
    replies = []
    with RealServer(model, *arguments) as server, server.client(headers={"Authorization": f"Bearer {KEY}"}) as http:
        bodies: list[dict[str, object]] = [
            {"prompt": SECRET, "max_tokens": 40, "ignore_eos": True},
            {"prompt": SECRET, "max_tokens": 40, "ignore_eos": True, "stream": True},
            {"prompt": SECRET, "max_tokens": 5, "stop": [SECRET], "logprobs": 3, "echo": True},
            {"prompt": SECRET, "max_tokens": 10**6},
            {"prompt": SECRET, "temperature": SECRET},
            {SECRET: SECRET},
        ]
        for body in bodies:
            response = http.post("/v1/completions", json=body)
            if response.status_code == 200 and "stream" not in body:
                replies.append(response.json()["choices"][0]["text"])
        http.post("/v1/completions", content=f'{{"prompt": "{SECRET}'.encode())
        http.get(f"/{SECRET}?prompt={SECRET}")
        httpx.get(f"{server.base}/v1/models", headers={"Authorization": f"Bearer {KEY}x"}, trust_env=False)
        os.kill(server.engine_pid(), signal.SIGUSR1)
        eventually(lambda: any("heartbeat_forever" in line for line in server.errors))
    text = "".join(server.errors + server.lines)
    assert "serve.requests" in text
    assert len(replies) == 2
    for secret in (SECRET, SECRET.split()[0], SECRET.split()[1], KEY, *(reply[-12:] for reply in replies)):
        assert secret not in text
        assert json.dumps(secret)[1:-1] not in text
    if form:
        assert all(json.loads(line)["message"] for line in server.errors)
