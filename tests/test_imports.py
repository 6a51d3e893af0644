"""What the server and the verifier may import and call, read from their source: nothing here runs them."""

from __future__ import annotations

import pytest

from tests.source_rules import BANNED_MODULES, Rules, faults, faults_below

THIRD_PARTY = {"torch", "numpy", "tokenizers", "safetensors", "transformers", "fastapi", "starlette", "uvicorn"}
THIRD_PARTY |= {"pydantic", "httpx", "triton"}
OWN = {"serve", "verify"}
BANNED_CALLS = {"torch.load", "torch.save", "torch.hub.load", "numpy.load", "np.load", "yaml.load", "eval", "exec"}
RULES = Rules(
    banned_modules=BANNED_MODULES,
    banned_calls=frozenset(BANNED_CALLS),
    modules=frozenset(THIRD_PARTY | OWN),
    optional=frozenset({"jinja2"}),
    only_false=frozenset({"trust_remote_code", "allow_pickle"}),
    keys=frozenset({"auto_map"}),
)


@pytest.mark.parametrize("folder", sorted(OWN))
def test_only_what_a_grading_image_has_is_imported_and_nothing_runs_foreign_code(folder: str) -> None:
    assert faults_below(folder, RULES) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import pickle", "line 1: imports pickle"),
        ("from vllm.engine import LLM", "line 1: imports vllm"),
        ("import drafter_train.data", "line 1: imports drafter_train"),
        ("import jinja2", "line 1: needs jinja2 at import time"),
        ("x = torch.load('weights.bin')", "line 1: calls torch.load"),
        ("def f(text):\n    return eval(text)", "line 2: calls eval"),
        ("model(path, trust_remote_code=True)", "line 1: trust_remote_code"),
        ("np.lib.open(path, allow_pickle=flag)", "line 1: allow_pickle"),
        ("code = config['auto_map']", "line 1: reads auto_map"),
    ],
)
def test_each_fault_is_seen(source: str, fault: str) -> None:
    assert list(faults(source, RULES)) == [fault]


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    import jinja2\nexcept ImportError:\n    jinja2 = None",
        "from . import base\nmodel.eval()\nimport torch.nn.functional as F",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=False)",
    ],
)
def test_what_is_allowed_is_not_reported(source: str) -> None:
    assert list(faults(source, RULES)) == []
