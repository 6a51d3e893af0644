"""Fixtures for every room: a tiny random model, and the real default model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton kernels then run in Triton's interpreter, which must be asked for before Triton is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    from tests.triton_interpreter import patch_once_a_launch

    if "TRITON_INTERPRET" in os.environ:
        patch_once_a_launch()


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
