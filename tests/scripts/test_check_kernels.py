"""The compile gate: what it refuses, and that it passes on real variants and remembers them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.check_kernels import Row, compile_rows

ROOT = Path(__file__).resolve().parents[2]
GOOD = Row("gemm", 75, dots=True, registers=90, shared=10240, mma="32xm16n8k8")


def check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/check_kernels.py", *flags]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (GOOD, ""),
        (replace(GOOD, spilled=8), "spills 8 bytes a thread"),
        (replace(GOOD, shared=70000), "70000 bytes of shared memory, limit 65536"),
        (replace(GOOD, mma="-"), "a dot without tensor cores"),
        (replace(GOOD, mma="32xm16n8k16"), "a dot without tensor cores"),
        (replace(GOOD, arch=90, mma="8xm64n16k16"), ""),
        (replace(GOOD, dots=False, mma="-"), ""),
        (replace(GOOD, error="PTXASError: no"), "PTXASError: no"),
    ],
)
def test_faults(row: Row, fault: str) -> None:
    assert row.fault(65536) == fault


def test_a_variant_compiles_for_turing_with_tensor_cores() -> None:
    done = check("--arch", "75", "--only", "gemm dense store x16", "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "m16n8k8" in done.stdout
    assert done.stdout.endswith("check_kernels: 1 ok, 0 faults\n")


def test_another_interpreter_may_run_the_check() -> None:
    done = check("--arch", "90", "--only", "settle_rows", "--no-cache", "--triton-python", sys.executable)
    assert done.returncode == 0
    assert "check_kernels: 1 ok, 0 faults" in done.stdout


def test_unknown_names_and_cards_are_refused() -> None:
    assert check("--only", "no such kernel").returncode == 2
    assert "--arch must be numbers" in check("--arch", "hopper").stderr


def test_nothing_to_compile_is_no_work() -> None:
    assert compile_rows([]) == []
