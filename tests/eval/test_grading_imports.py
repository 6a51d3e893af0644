from __future__ import annotations

import subprocess
import sys

import pytest

from eval.servers import ROOT

BLOCK = """
import importlib, sys
class Blocker:
    names = {"numpy", "torch", "transformers", "matplotlib", "rich", "fastapi", "pandas", "openai"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
# httpx takes rich only for its command line, which it guards itself.
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("module", ["client", "load", "prompts", "scenarios", "gate", "servers", "stats", "letters"])
def test_what_the_grading_image_runs_needs_httpx_and_tokenizers_only(module: str) -> None:
    command = [sys.executable, "-c", BLOCK, f"eval.{module}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
