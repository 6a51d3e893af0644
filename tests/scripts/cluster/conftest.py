"""One cluster for the tests of this folder, under the names that the API tests know."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from eval.servers import free_port
from tests.scripts.cluster.scripted_cluster import ScriptedCluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedCluster]:
    with ScriptedCluster(tmp_path_factory.mktemp("cluster"), free_port(), "--max-body-bytes", "200000") as cluster:
        cluster.wait_for_two()
        yield cluster


@pytest.fixture(scope="module")
def http(server: ScriptedCluster) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
