"""Every compilation the server may need on a card: kernels x formats x epilogues x row tiles, at the real tile shapes.

The compile gate walks this list; so does the self-test's probe. Knows the launchers' tile tables and the kernels'
signatures; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from serve.kernels.triton import tiles
from serve.kernels.triton.ahead import Variant
from serve.kernels.triton.source import gemm

_FORMATS = (("dense", 0, 0), ("int8", 0, 0), ("int8_group", 128, 128), ("int4", 128, 128), ("int4", 32, 64))


def all_variants(capability: int) -> Iterator[Variant]:
    """Every variant for one card; float16 below 80, else bfloat16 (and float16 for the matrix kernels)."""
    dtypes = ("fp16",) if capability < 80 else ("bf16", "fp16")
    for dtype in dtypes:
        yield from _gemm(dtype, capability)


def probe() -> Variant:
    """The smallest useful dot on sm_75: a dense tile for sixteen rows."""
    return next(_gemm("fp16", 75))


def _gemm(dtype: str, capability: int) -> Iterator[Variant]:
    for weight_format, group, pack in _FORMATS:
        for epilogue, width in _EPILOGUES:
            if width not in tiles.row_tiles(capability):
                continue
            tile = tiles.gemm_tile(weight_format, pack, epilogue == "silu", capability)
            data = {"dense": f"*{dtype}", "int4": "*u8"}.get(weight_format, "*i8")
            out = f"*{dtype}" if epilogue in ("store", "silu") else "*fp32"
            scale = "*fp16" if weight_format == "int4" else "*fp32"
            yield Variant(
                name=f"gemm {weight_format}{group or ''} {epilogue} x{width} {dtype}",
                kernel=gemm.skinny_gemm,
                signature={
                    "x_ptr": f"*{dtype}",
                    "w_ptr": data,
                    "scale_ptr": scale if weight_format != "dense" else data,
                    "zero_ptr": "*u8" if weight_format == "int4" else data,
                    "bias_ptr": data,
                    "out_ptr": out,
                    "index_ptr": "*i32",
                    "rows": "i32",
                    "outputs": "i32",
                    "depth": "i32",
                    "x_stride": "i32",
                    "out_scale": "fp32",
                },
                constants={
                    "FORMAT": weight_format,
                    "GROUP": group,
                    "EPILOGUE": epilogue,
                    "HAS_BIAS": False,
                    "SPLIT_K": 4 if epilogue == "partial" else 1,
                    "BLOCK_N": tile.block_n,
                    "BLOCK_K": tile.block_k,
                    "BLOCK_R": width,
                    "MASK_K": False,
                    "PREFETCH": tile.prefetch,
                },
                warps=tile.warps,
                stages=tile.stages,
                dots=True,
            )


_EPILOGUES = tuple(
    (epilogue, width) for epilogue in ("store", "partial", "silu", "argmax", "residual") for width in tiles.ROW_TILES
)
