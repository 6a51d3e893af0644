"""Getting the C layers onto a host: compiler, cache, and every way it can fail; then what single calls compute."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve.kernels.native.build import NativeUnavailable, build
from serve.kernels.native.grouped import GroupedProduct
from serve.kernels.native.ops import NativeLibrary, Operand, Step, pointer

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))


def environment(tmp_path: Path, **changed: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache"), **changed}


def fake_compiler(folder: Path, script: str) -> str:
    """A folder for PATH whose ``cc`` is a shell script."""
    folder.mkdir()
    compiler = folder / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_it_compiles_once_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    if not HAS_COMPILER:
        with pytest.raises(NativeUnavailable, match="no C compiler"):
            build(environ)
        return
    first = build(environ)
    stamp = first.library.stat().st_mtime_ns
    assert build(environ) == first
    assert first.library.stat().st_mtime_ns == stamp
    assert list(first.library.parent.iterdir()) == [first.library]
    assert first.library.parent.stat().st_mode & 0o077 == 0
    assert first.compiler.split()[0] in ("gcc", "clang", "cc")
    NativeLibrary(first)


def test_the_switch_turns_it_off(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="FORETOKEN_NATIVE=0"):
        build(environment(tmp_path, FORETOKEN_NATIVE="0"))


def test_no_compiler_is_said(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        build(environment(tmp_path, PATH=str(tmp_path)))


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    script = 'case "$1" in --version) echo "cc 1.0";; *) echo "cannot find crt1.o" >&2; exit 1;; esac'
    path = fake_compiler(tmp_path / "bin", script)
    with pytest.raises(NativeUnavailable, match=r"cc failed: cannot find crt1\.o"):
        build(environment(tmp_path, PATH=path))
    assert list((tmp_path / "cache/foretoken/native").iterdir()) == []


def test_a_compiler_that_makes_rubbish_is_refused_at_loading(tmp_path: Path) -> None:
    script = 'case "$1" in --version) echo "cc 1.0";; *) while [ "$1" != -o ]; do shift; done; echo x > "$2";; esac'
    built = build(environment(tmp_path, PATH=fake_compiler(tmp_path / "bin", script)))
    with pytest.raises(NativeUnavailable, match="does not load"):
        NativeLibrary(built)


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "foretoken" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    script = 'case "$1" in --version) echo "cc 1.0";; *) while [ "$1" != -o ]; do shift; done; echo x > "$2";; esac'
    built = build(environment(tmp_path, PATH=fake_compiler(tmp_path / "bin", script)))
    assert built.library.parent != folder
    assert built.library.parent.stat().st_uid == os.getuid()
    built.library.unlink()


def operand_of(x: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The C norm and split of x [T, K], through a head of one zero matrix -> codes [T, K], their sums [T, K / 32] and
    the scale of each row."""
    library = NativeLibrary(build())
    rows, width = x.shape
    zero = GroupedProduct(library, torch.zeros(16, width), None, 4)
    operand, y = Operand(rows, width), torch.empty(rows, 16)
    step = Step(
        rows=rows, hidden=width, threads=2, eps=0.0, fork=library.fork, x=pointer(x), y=pointer(y)
    )  # fmt: skip
    operand.fill(step)
    library.head(ctypes.byref(step), ctypes.byref(zero.matrix), pointer(norm))
    low, high = operand.codes.view(2, rows, width).int()
    return low + 256 * high, operand.sums.view(rows, -1), operand.scale


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_norm_and_split_keep_a_row_to_half_a_code(rows: int) -> None:
    if not HAS_COMPILER:
        with pytest.raises(NativeUnavailable):
            build()
        return
    x = torch.randn(rows, 96) * torch.logspace(-3, 3, rows)[:, None]
    norm = torch.rand(96) + 0.5
    want = x / x.square().mean(1, True).sqrt() * norm
    codes, sums, scale = operand_of(x.clone(), norm)
    torch.testing.assert_close(scale, want.abs().amax(1) / (128 * 254))
    assert bool(((codes * scale[:, None] - want).abs() <= 0.51 * scale[:, None] + 1e-6).all())
    assert torch.equal(sums, codes.view(rows, 3, 32).sum(2).int())


def test_a_nan_stays_in_its_row() -> None:
    if not HAS_COMPILER:
        with pytest.raises(NativeUnavailable):
            build()
        return
    x = torch.randn(4, 64)
    x[1, 63] = float("nan")
    assert operand_of(x, torch.ones(64))[2].isnan().tolist() == [False, True, False, False]


def test_pointers_are_only_taken_from_what_the_c_side_can_read() -> None:
    assert pointer(None) is None
    for tensor in (torch.zeros(4, 4).t()[:2], torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"contiguous torch\.float32"):
            pointer(tensor)
