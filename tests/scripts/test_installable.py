"""``pip install -e .[EXTRA]``, as the guides have it: setuptools finds the packages and no other folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

PREPARE = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_editable('found'))"


def test_an_editable_install_finds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.suffix != ".egg-info":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "found").mkdir()
    done = subprocess.run([sys.executable, "-c", PREPARE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (info,) = (tmp_path / "found").glob("*.dist-info")
    names = (info / "top_level.txt").read_text(encoding="utf-8").split()
    assert sorted(names) == ["drafter_train", "eval", "scripts", "serve", "verify"]
    extras = [
        line.split()[1] for line in (info / "METADATA").read_text().splitlines() if line.startswith("Provides-Ex")
    ]
    assert {"chat", "train", "eval", "cluster", "bench", "dev", "audit"} == set(extras)
