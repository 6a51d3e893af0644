"""The import hook in real interpreters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval import rehearse_guard

SOURCE = Path(rehearse_guard.__file__)


@pytest.fixture(scope="module")
def names() -> list[str]:
    command = [sys.executable, str(SOURCE), *rehearse_guard.JINJA]
    found: list[str] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def run(tmp_path: Path, names: list[str], code: str, refuse: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """Output of ``code`` under the guard, and the events it left."""
    guard = tmp_path / "guard"
    guard.mkdir()
    shutil.copyfile(SOURCE, guard / "sitecustomize.py")
    own = tmp_path / "submission"
    own.mkdir()
    (own / "engine_of_mine.py").write_text("x = 1\n")
    events = tmp_path / "events"
    settings = {"names": names, "roots": [f"{own}{os.sep}"], "events": str(events), "refuse_network": refuse}
    (guard / "guard.json").write_text(json.dumps(settings))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{own}:{guard}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in events.read_text().splitlines()]


def test_the_stack_and_what_it_needs_are_allowed_and_nothing_else(names: list[str]) -> None:
    assert {"torch", "tokenizers", "safetensors", "fastapi", "starlette", "uvicorn", "h11", "httpx", "anyio"} <= {
        *names
    }
    assert not {"pytest", "openai", "jinja2", "prometheus_client", "matplotlib", "hypothesis", "gguf"} & {*names}


def test_other_packages_are_as_if_not_installed(tmp_path: Path, names: list[str]) -> None:
    code = (
        "import importlib.util, json, zoneinfo, sqlite3\n"
        "import numpy, fastapi, engine_of_mine\n"
        "assert importlib.util.find_spec('pytest') is None\n"
        "try:\n    import jinja2\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    said, events = run(tmp_path, names, code)
    assert said == "No module named 'jinja2'\n"
    assert {"pytest", "jinja2"} <= {event["name"] for event in events if event["event"] == "hidden"}
    assert [event["event"] for event in events].count("loaded") == 1


@pytest.mark.parametrize("refuse", [False, True])
def test_connections_to_elsewhere_are_seen_and_refused_where_asked(
    tmp_path: Path, names: list[str], refuse: bool
) -> None:
    code = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname()).close()\n"
        "away = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"  # a datagram socket connects without a packet
        "try:\n    away.connect(('192.0.2.7', 9))\n    print('went')\n"
        "except OSError as error:\n    print(type(error).__name__)\n"
    )
    said, events = run(tmp_path, names, code, refuse)
    assert [event["to"] for event in events if event["event"] == "network"] == ["192.0.2.7:9"]
    if refuse:
        assert said == "PermissionError\n"


def test_children_are_guarded_too(tmp_path: Path, names: list[str]) -> None:
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import json'], check=True)\n"
    _, events = run(tmp_path, names, code)
    assert len({event["pid"] for event in events if event["event"] == "loaded"}) == 2
