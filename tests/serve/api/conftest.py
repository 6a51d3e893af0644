"""One scripted server for the tests that only talk to it; those that break a server start their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serve.api.live_server import LiveServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("server"), "--dev-routes", "--max-body-bytes", "200000") as live:
        yield live


@pytest.fixture(scope="session")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
