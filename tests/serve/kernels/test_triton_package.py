"""The package imports with no Triton and touches no driver; the self-test says in one line what will run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve.kernels.triton import tiles, turing
from serve.kernels.triton.ahead import mma_shapes

ROOT = Path(__file__).resolve().parents[3]


def run(code: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_importing_every_module_touches_no_driver() -> None:
    code = """
import importlib, pkgutil, torch
from triton.runtime import driver
class Forbidden:
    def __getattr__(self, name):
        raise AssertionError(f"the driver was asked for {name}")
driver.set_active(Forbidden())
def forbidden(*args):
    raise AssertionError("CUDA was initialised")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.get_device_capability = forbidden
import serve.kernels.triton as package
names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in (*names, "serve.model.triton_layers"):
    importlib.import_module(name)
print(len(names))
"""
    assert int(run(code)) >= 12


def test_the_server_imports_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
import serve.model.loader, serve.kernels.builder, serve.kernels.triton
from serve.kernels.triton import card, pack, tiles, turing
print(serve.kernels.triton.installed(), serve.kernels.triton.self_test(torch.device("cuda")).line)
"""
    assert run(code) == "False triton kernels off: no triton package; using cuBLAS and SDPA"


def test_self_test_finds_tensor_cores_on_turing_only_with_the_shim() -> None:
    code = """
from serve.kernels.triton import turing
from serve.kernels.triton.ahead import compile_ptx
from serve.kernels.triton.variants import probe
print("m16n8k8" in compile_ptx(probe(), 75), turing.self_test(75).ok, "m16n8k8" in compile_ptx(probe(), 75))
"""
    assert run(code) == "False True True"


def test_other_cards_need_no_probe() -> None:
    assert turing.self_test(90).ok
    old = turing.self_test(70)
    assert not old.ok
    assert old.line == "triton kernels off: sm_70 is older than sm_75; using cuBLAS and SDPA"


def test_a_probe_that_fails_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("pass manager\nno such pass")

    monkeypatch.setattr(turing, "install", lambda: None)
    monkeypatch.setattr(turing, "_probe_ptx", broken)
    assert "the sm_75 probe failed (no such pass)" in turing.self_test(75).line
    monkeypatch.setattr(turing, "_probe_ptx", lambda: "fma.rn.f32")
    assert turing.self_test(75).line == "triton kernels off: no m16n8k8 in the sm_75 probe; using cuBLAS and SDPA"


def test_tensor_core_shapes_are_counted() -> None:
    ptx = (
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {...};\n" * 2
        + "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {...};"
    )
    assert mma_shapes(ptx) == "2xm16n8k8 1xm64n16k16"
    assert mma_shapes("fma.rn.f32") == "-"


FORMATS = (("dense", 0), ("int8", 0), ("int8_group", 128), ("int4_halves", 128), ("int4_halves", 64))


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize(("outputs", "depth"), [(6144, 2560), (2560, 4096), (2560, 9728), (960, 576), (64, 64)])
@pytest.mark.parametrize(("weight_format", "pack"), FORMATS)
def test_every_tile_of_a_plan_cuts_k_at_the_same_places(
    weight_format: str, pack: int, outputs: int, depth: int, capability: int
) -> None:
    plan = tiles.gemm_plan(weight_format, pack, outputs, depth, capability, split=True)
    assert plan.split_depth > 0
    for _, tile in plan.tiles:
        assert plan.split_depth % tile.block_k == 0
        assert pack == 0 or pack % tile.block_k == 0
        assert weight_format != "int4_halves" or tile.block_k == pack
        assert tile.ahead % 128 == 0
        # One family of instructions for all row counts: below 64 features Hopper would take another.
        assert plan.parts or tile.block_n >= 64 or tile.layouts == 80


@pytest.mark.parametrize(
    ("weight_format", "places", "depths"), [("int8", 2, (64, 576, 2560)), ("int4", 3, (256, 9728))]
)
@pytest.mark.parametrize("split", [True, False])
def test_a_ring_and_what_triton_takes_are_no_more_than_a_kernel_may_name(
    weight_format: str, places: int, depths: tuple[int, ...], split: bool
) -> None:
    """A launch with more than 48 KB of shared memory, part of it named in the kernel, is an invalid argument."""
    for depth in depths:
        plan = tiles.gemm_plan(weight_format, 0, 2560, depth, 90, split=split)
        for width, tile in plan.tiles:
            slot = tile.block_n // (16 * (tile.warps // plan.parts)) * places * 512 * tile.warps
            turned = tile.block_n * width * 4
            assert (tile.ring * slot if tile.shared else 0) + turned <= 48 << 10


@pytest.mark.parametrize("outputs", [6144, 2560])
def test_a_stream_leaves_room_for_what_triton_takes(outputs: int) -> None:
    plan = tiles.gemm_plan("dense", 0, outputs, 9728, 90, split=True)
    streams = [(width, tile) for width, tile in plan.tiles if tile.stream]
    assert [width for width, _ in streams] == [8, 16]
    for width, tile in streams:
        ring = tile.ring * (tile.block_n + width) * 2 * tiles.STREAM_UNIT
        assert ring + tile.block_n * width * 4 <= 48 << 10


@pytest.mark.parametrize("weight_format", ["dense", "int8", "int4"])
@pytest.mark.parametrize(("outputs", "depth"), [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)])
def test_a_product_lets_the_next_kernel_in_while_it_works(weight_format: str, outputs: int, depth: int) -> None:
    """Of 4B shapes: ahead of its end, and where not at once no sooner than it has begun."""
    pack = 128 if weight_format == "int4" else 0
    plan = tiles.gemm_plan(weight_format, pack, outputs, depth, 90, split=outputs != 19456)
    for width, tile in plan.tiles:
        units = min(plan.split_depth, depth) // tile.block_k // max(1, plan.parts)
        assert tile.early or width > 16 or (not plan.parts and not tile.stream) or 0 < tile.lead <= units


def test_only_where_their_bits_are_known_are_weights_streamed() -> None:
    def streamed(capability: int, outputs: int, depth: int) -> bool:
        plan = tiles.gemm_plan("dense", 0, outputs, depth, capability, split=True)
        return any(tile.stream for _, tile in plan.tiles) or any(tile.stream for _, tile in plan.for_interpreter.tiles)

    assert streamed(90, 6144, 2560)
    assert not streamed(90, 960, 576)
    assert not streamed(90, 6144, 2576)
    assert not any(streamed(card, 6144, 2560) for card in (75, 80, 89, 100))


def test_row_tiles_hold_their_rows() -> None:
    def widths(capability: int) -> list[int]:
        plan = tiles.gemm_plan("dense", 0, 2560, 4096, capability, split=True)
        return [plan.tile(rows)[0] for rows in (1, 16, 17, 33, 64, 65, 500)]

    assert widths(90) == [16, 16, 32, 64, 64, 128, 128]
    assert widths(80) == [16, 16, 32, 64, 64, 64, 64]
    assert widths(75) == [16, 16, 32, 32, 32, 32, 32]
