"""Servers that several tests talk to: the default model with its drafter and without, and a tiny one under pressure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT
from tests.e2e.real_server import RealServer
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.tiny_models import write_model


@pytest.fixture(scope="session")
def released_drafter_dir() -> Path:
    """The drafter that ships with the default model."""
    return ROOT / "drafter_train" / "releases" / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def speculative(default_model_dir: Path, released_drafter_dir: Path) -> Iterator[RealServer]:
    """The default model; every round verifies a draft, whatever the controller would think of it."""
    arguments = ("--drafter-dir", str(released_drafter_dir), "--block-length", "7", "--max-body-bytes", "1000000")
    with RealServer(default_model_dir, *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def plain(default_model_dir: Path) -> Iterator[RealServer]:
    """The default model without any speculation."""
    with RealServer(default_model_dir, "--proposer", "none") as server:
        yield server


@pytest.fixture(scope="session")
def http(speculative: RealServer) -> Iterator[httpx.Client]:
    with speculative.client() as client:
        yield client


@pytest.fixture(scope="session")
def plain_http(plain: RealServer) -> Iterator[httpx.Client]:
    with plain.client() as client:
        yield client


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A five-layer random model of 512 positions and a random drafter for it, which is nearly always wrong."""
    folder = tmp_path_factory.mktemp("tiny-pair")
    write_model(folder / "model", num_hidden_layers=5)
    write_drafter(folder / "drafter", random_drafter(drafter_config()))
    return folder / "model", folder / "drafter"
