"""How many cores a process may use: what it is bound to, and what its control groups leave it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import serve.cores as cores
from serve.config import ServeConfig
from serve.engine import build


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(4, 12)))


def usable(folder: Path, group: str, **limits: str) -> int:
    """With ``group`` as the process's own; a limit of ``a_b`` is that of /a/b, ``top`` that of the whole."""
    for name, limit in limits.items():
        place = folder / "groups" / ("" if name == "top" else name.replace("_", "/"))
        place.mkdir(parents=True, exist_ok=True)
        (place / "cpu.max").write_text(limit)
    own = folder / "own"
    own.write_text(group)
    return cores.usable_cores(own, folder / "groups")


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"top": "max 100000\n"}, 8),
        ("0::/\n", {"top": "250000 100000\n"}, 2),
        ("0::/\n", {"top": "50000 100000\n"}, 1),
        ("0::/\n", {"top": "6400000 100000\n"}, 8),
        ("0::/job/step\n", {"job": "400000 100000\n", "job_step": "max 100000\n"}, 4),
        ("0::/job/step\n", {"job": "400000 100000\n", "job_step": "300000 100000\n"}, 3),
        ("0::/job\n", {"other": "100000 100000\n"}, 8),
        ("0::/../outside\n", {"top": "200000 100000\n"}, 2),
        ("12:cpu,cpuacct:/x\n0::/\n", {"top": "300000 100000\n"}, 3),
        ("", {"top": "garbage\n"}, 8),
    ],
)
def test_the_least_quota_on_the_way_up_counts(
    eight: None, tmp_path: Path, group: str, limits: dict[str, str], expected: int
) -> None:
    assert usable(tmp_path, group, **limits) == expected


def test_without_control_groups_the_bound_cores_count(eight: None, tmp_path: Path) -> None:
    assert cores.usable_cores(tmp_path / "none", tmp_path / "no groups") == 8


def test_a_bound_process_counts_what_it_is_bound_to() -> None:
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from serve.cores import usable_cores; print(usable_cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


@pytest.mark.parametrize(("threads", "ranks", "expected"), [(0, 1, 6), (0, 4, 1), (0, 8, 1), (3, 1, 3)])
def test_an_engine_has_a_thread_for_each_core_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, threads: int, ranks: int, expected: int
) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: 6)
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    build.rank_device(ServeConfig("model", device="cpu", threads=threads, tensor_parallel=ranks), 0)
    assert asked == [expected]
