"""Fixtures for every room: a tiny random model, and the real default model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# As the server gives it to its engine: threads of torch that wait let others compute. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch

from tests import order, process_state

if not torch.cuda.is_available():
    # Triton kernels then run in Triton's interpreter, which must be asked for before Triton is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run: a change fails for what it changed. --hypothesis-profile search looks for others.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("search", max_examples=1000)
hypothesis.settings.load_profile("same")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order.sort(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return order.scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Which files share a process, and in which order, is chance: what a test sets for it ends with the test."""
    with process_state.kept():
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    from tests.triton_interpreter import patch_once_a_launch

    if "TRITON_INTERPRET" in os.environ:
        patch_once_a_launch()


@pytest.fixture(scope="session", autouse=True)
def _briefly_measured_costs() -> Iterator[None]:
    """Engines made in tests time each pass a few times: measuring was most of the work of a test of an engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.engine.costs.COST_ROUNDS", 1)
        patch.setattr("serve.engine.costs.COST_REPEATS", 3)
        yield


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer random llama with a byte-level tokenizer."""
    from tests.tiny_models import write_model

    folder = tmp_path_factory.mktemp("tiny-llama")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The embedded default model; scripts/test.sh builds it before the tests."""
    folder = ROOT / "models" / "smollm2-135m-instruct"
    assert (folder / "config.json").is_file(), "run: sh scripts/test.sh --setup-only"
    return folder
