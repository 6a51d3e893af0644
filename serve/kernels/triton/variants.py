"""Every kind of compilation the server may need on a card: kernels x formats x epilogues x row tiles, at real tile
shapes.

The compile gate walks this list, and the self-test takes its probe from it. Shapes are those of a qwen3 of 4 B
parameters. Knows the tile tables and the kernels' signatures; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

from serve.kernels.triton import tiles
from serve.kernels.triton.ahead import Variant
from serve.kernels.triton.source import (
    attention,
    fp8_rows,
    gathered,
    gemm,
    lane_attention,
    lane_combine,
    lane_rows,
    norm,
    row_codes,
    rows,
    step,
    widen,
)
from serve.kernels.triton.source.few_rows import few_rows_gemm

HEADS, KV_HEADS, HEAD_DIM, PAGE, WIDTH = 32, 8, 128, 32, 4096
ODD_UNITS = 576
"""A depth whose programs have one part of K: SmolLM2's."""
STEP_FIELDS = 7
_FORMATS = (("dense", 0, 0), ("int8", 0, 0), ("int8_group", 128, 128), ("int4_halves", 32, 64))
_LATER = {False: (("int4_halves", 128, 128),), True: (("int4", 64, 128), ("int4", 128, 128))}
"""By whether a card's threads multiply stored integers for themselves."""
_EPILOGUES = ("store", "partial", "residual", "silu", "argmax")


def all_variants(capability: int) -> Iterator[Variant]:
    """Every variant for one card, in the 16-bit dtype that card prefers."""
    dtype = "fp16" if capability < 80 else "bf16"
    for variant in chain(
        _gemm(dtype, capability),
        _widen(dtype, capability),
        _attention(dtype, capability),
        _gathered(dtype, capability),
        _rows(dtype),
        _codes(dtype),
        _fp8(dtype) if capability >= tiles.FP8_CARD else (),
    ):
        yield replace(variant, constants=variant.constants | {"PDL": tiles.dependent_launch(capability)})


def probe() -> Variant:
    """The smallest useful dot on sm_75: a dense tile for sixteen rows."""
    return next(all_variants(75))


def _formats(capability: int) -> tuple[tuple[str, int, int], ...]:
    """Format, group and packing."""
    return _FORMATS + _LATER[tiles.lane_card(capability)]


def _gemm(floats: str, capability: int) -> Iterator[Variant]:
    for weight_format, group, pack in _formats(capability):
        dtype = floats if weight_format == "dense" else "fp16"
        for epilogue in _EPILOGUES:
            # Between the narrowest and the widest row tile of ``tl.dot`` nothing new can go wrong.
            split = epilogue != "silu"
            plan = tiles.gemm_plan(weight_format, pack, WIDTH, WIDTH, capability, split=split)
            dots = [(width, tile) for width, tile in plan.tiles if not tile.stream]
            narrow = (
                zip(tiles.STREAM_ROWS, tiles.STREAM_TILES, strict=True)
                if weight_format == "dense" and tiles.stream_card(capability)
                else ()
            )
            for width, tile in plan.tiles if plan.parts else (*narrow, *dict([dots[0], dots[-1]]).items()):
                yield _gemm_variant(weight_format, group, epilogue, width, tile, plan.parts, dtype)
            if plan.parts and epilogue == "partial":
                # Integers among the layers of a 16-bit model.
                yield _gemm_variant(weight_format, group, epilogue, *plan.tiles[0], plan.parts, floats)
        odd = tiles.gemm_plan(weight_format, pack, WIDTH, ODD_UNITS, capability, split=True)
        if odd.parts == 1 and weight_format == "int8":
            for width, tile in odd.tiles:
                yield _gemm_variant(weight_format, group, "partial", width, tile, odd.parts, dtype)


def _gemm_variant(
    weight_format: str, group: int, epilogue: str, width: int, tile: tiles.GemmTile, parts: int, dtype: str
) -> Variant:
    half = f"*{dtype}"
    four = weight_format.startswith("int4")
    data = half if weight_format == "dense" else "*u8" if four else "*i8"
    few = parts > 0 or tile.stream
    few_rows = {
        **{"BLOCKS": parts > 0, "PARTS": max(1, parts), "WARPS": tile.warps, "RING": tile.ring},
        **{"SHARED": tile.shared, "EARLY": tile.early},
    }
    return Variant(
        name=f"gemm {weight_format}{group or ''} {epilogue} x{width}{' streamed' if tile.stream else ''}"
        f"{f' {dtype}' if parts and dtype != 'fp16' else ''}",
        kernel=few_rows_gemm if few else gemm.skinny_gemm,
        signature={
            "x_ptr": half,
            "w_ptr": data,
            "scale_ptr": data if weight_format == "dense" else "*i32" if four else "*fp32",
            "bias_ptr": "*fp32",
            "out_ptr": half if epilogue in ("store", "silu") else "*fp32",
            "index_ptr": "*i32",
            **dict.fromkeys(("rows", "outputs", "depth", "x_stride", "split_tiles"), "i32"),
            "out_scale": "fp32",
        },
        constants={
            "FORMAT": weight_format,
            "GROUP": group,
            "EPILOGUE": epilogue,
            "HAS_BIAS": epilogue == "partial",
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "BLOCK_R": width,
            **(few_rows if few else {"MASK_K": False, "PREFETCH": tile.prefetch, "AHEAD": tile.ahead}),
            **{"LEAD": tile.lead, "ASM": True},
        },
        warps=tile.warps,
        stages=tile.stages,
        dots=True,
        layouts=tile.layouts,
        registers=tile.registers,
    )


def _widen(dtype: str, capability: int) -> Iterator[Variant]:
    for weight_format, group, pack in _formats(capability)[1:]:
        yield Variant(
            f"widen {weight_format}{group or ''}",
            widen.widen_matrix,
            {
                "w_ptr": "*u8" if weight_format.startswith("int4") else "*i8",
                "scale_ptr": "*i32" if weight_format.startswith("int4") else "*fp32",
                **{"out_ptr": f"*{dtype}", "rows": "i32", "depth": "i32"},
            },
            {
                **{"FORMAT": weight_format, "GROUP": group, "ASM": True},
                "BLOCKS": tiles.lane_card(capability) and weight_format in ("int8", "int4"),
                **{"BLOCK_N": tiles.WIDEN_ROWS, "BLOCK_K": pack or tiles.WIDEN_BLOCK_K},
            },
            4,
            1,
            dots=False,
        )


def _attention(dtype: str, capability: int) -> Iterator[Variant]:
    half = f"*{dtype}"
    yield from _attention_over("", half, half, capability)
    yield from _attention_over(" int8", half, "*i8", capability)
    joins = {
        **{"part_ptr": "*fp32", "stat_ptr": "*fp32", "row_ptr": "*i64", "visible_ptr": "*i64", "out_ptr": half},
        "splits": "i32",
    }
    joined = {"HEADS": HEADS, "HEAD_DIM": HEAD_DIM, "SPLIT": tiles.KV_SPLIT, "BLOCK_S": tiles.COMBINE_BLOCK}
    yield Variant(
        "attention combine in lanes",
        lane_combine.lane_combine,
        joins,
        joined | {"WARPS": tiles.COMBINE_WARPS, "ASM": True},
        tiles.COMBINE_WARPS,
        1,
        dots=False,
    )
    yield Variant(
        "attention combine",
        attention.combine_splits,
        joins,
        joined | {"BLOCK_D": HEAD_DIM},
        2,
        1,
        dots=False,
    )


def _lane_attention(reads: dict[str, str]) -> Variant:
    return Variant(
        "attention in lanes",
        lane_attention.lane_attention,
        {
            **{k: v for k, v in reads.items() if k != "step_ptr"},
            **{"out_ptr": "*fp32", "stat_ptr": "*fp32", "scale": "fp32"},
            **dict.fromkeys(("spans", "row_tiles", "splits", "table_stride", "new_rows"), "i32"),
        },
        {
            **{"HEADS": HEADS, "KV_HEADS": KV_HEADS, "HEAD_DIM": HEAD_DIM, "PAGE": PAGE},
            **{"COUNTED": tiles.LANE_ROWS, "ASM": True},
        },
        8,
        1,
        dots=True,
    )


def _attention_over(name: str, half: str, stored: str, capability: int) -> Iterator[Variant]:
    """Both kernels over K/V kept as ``stored``."""
    reads = {
        **{"q_ptr": half, "cache_ptr": stored, "step_ptr": "*fp32" if name else stored},
        **{"table_ptr": "*i32", "span_ptr": "*i32", "visible_ptr": "*i64"},
    }
    shape: dict[str, Any] = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "HEAD_DIM": HEAD_DIM, "PAGE": PAGE}
    shape |= {"BLOCK_D": HEAD_DIM, "INT8": bool(name), "ASM": True}
    tile = tiles.split_attention_tile(capability)
    yield Variant(
        f"attention split{name}",
        attention.split_attention,
        {
            **reads,
            **{"out_ptr": "*fp32", "stat_ptr": "*fp32"},
            **{"spans": "i32", "row_tiles": "i32", "splits": "i32", "table_stride": "i32", "scale": "fp32"},
        },
        {
            **{**shape, "SPLIT": tiles.KV_SPLIT, "COUNTED": tiles.COUNTED_SPANS, "ENOUGH": 32},
            **{"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n},
        },
        tile.warps,
        tile.stages,
        dots=True,
    )
    if not name and tiles.attends_in_lanes(capability):
        yield _lane_attention(reads)
    tile = tiles.prefill_attention_tile(capability, HEAD_DIM)
    yield Variant(
        f"attention prefill{name}",
        attention.prefill_attention,
        {**reads, "out_ptr": half, "table_stride": "i32", "scale": "fp32"},
        {**shape, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "UNMASKED": tile.unmasked},
        tile.warps,
        tile.stages,
        dots=True,
    )


def _gathered(dtype: str, capability: int) -> Iterator[Variant]:
    """Prompt attention by tensor descriptors: on Hopper, from Triton 3.4 on."""
    if capability != 90 or find_spec("triton.tools.tensor_descriptor") is None:
        return
    half, shape = f"*{dtype}", {"KV_HEADS": KV_HEADS, "HEAD_DIM": HEAD_DIM}
    yield Variant(
        "gather pages",
        gathered.gather_pages,
        {"cache_ptr": half, "table_ptr": "*i32", "out_ptr": half, "end": "i32", "positions": "i32"},
        {**shape, "PAGE": PAGE},
        4,
        1,
        dots=False,
    )
    tile = tiles.prefill_attention_tile(capability, HEAD_DIM)
    described = f"tensordesc<{dtype}[{tile.block_n}, {HEAD_DIM}]>"
    yield Variant(
        "attention prefill gathered",
        gathered.gathered_prefill,
        {
            **{"q_ptr": half, "k_desc": described, "v_desc": described, "span_ptr": "*i32", "visible_ptr": "*i64"},
            **{"out_ptr": half, "positions": "i32", "scale": "fp32"},
        },
        {**shape, "HEADS": HEADS, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n},
        tile.warps,
        tile.stages,
        dots=True,
    )


def _rows(dtype: str) -> Iterator[Variant]:
    half = f"*{dtype}"
    turns = {"norm_ptr": "*fp32", "turn_ptr": "*fp32", "position_ptr": "*i64", "slot_ptr": "*i64"}
    heads: dict[str, Any] = {"KV_HEADS": KV_HEADS, "HEAD_DIM": HEAD_DIM, "PAGE": PAGE, "HAS_NORM": True}
    for splits, width in ((0, 2560), (1, tiles.NORM_WIDTH), (8, WIDTH)):
        plan = tiles.NormPlan.of(width, interpreted=False)
        yield Variant(
            f"add_rms_norm splits {splits} of {width}",
            norm.add_rms_norm,
            {
                **{"delta_ptr": half if splits == 1 else "*fp32", "residual_ptr": "*fp32", "weight_ptr": "*fp32"},
                **{"normed_ptr": half, "tap_ptr": half, "delta_stride": "i32", "tap_stride": "i32", "eps": "fp32"},
            },
            {
                **{"WIDTH": width, "SPLITS": splits, "HAS_TAP": splits > 0, "ASM": True},
                **{"THREADS": plan.threads, "CHUNKS": plan.chunks},
            },
            plan.threads // 32,
            1,
            dots=False,
            registers=plan.registers,
        )
    for splits, stored in ((1, half), (4, half), (4, "*i8")):
        yield Variant(
            f"qkv_write splits {splits}{' int8' if stored == '*i8' else ''}",
            rows.qkv_write,
            {
                **{"qkv_ptr": half if splits == 1 else "*fp32", **turns, "q_ptr": half, "cache_ptr": stored},
                **{"scale_ptr": "*fp32", "qkv_stride": "i32", "eps": "fp32"},
            },
            {
                **{**heads, "HEADS": HEADS, "SPLITS": splits, "BLOCK_H": tiles.HEADS_PER_PROGRAM},
                **{"BLOCK_D": HEAD_DIM},
            },
            4,
            1,
            dots=False,
        )
    for stored in (half, "*i8"):
        yield Variant(
            f"lane_write{' int8' if stored == '*i8' else ''}",
            lane_rows.lane_write,
            {
                **{"qkv_ptr": "*fp32", **turns, "q_ptr": half, "cache_ptr": stored},
                **{"scale_ptr": "*fp32", "qkv_stride": "i32", "eps": "fp32"},
            },
            {
                **{"HEADS": HEADS, "KV_HEADS": KV_HEADS, "PAGE": PAGE, "PARTS": 4, "HAS_NORM": True},
                **{"INT8": stored == "*i8", "WARPS": tiles.WRITE_WARPS, "ASM": True},
            },
            tiles.WRITE_WARPS,
            1,
            dots=False,
        )
    yield Variant(
        "context_write",
        rows.context_write,
        {"kv_ptr": half, **turns, "cache_ptr": half, "layer_offset_ptr": "*i64", "eps": "fp32"},
        {**heads, "LAYERS": 5, "BLOCK_H": 2 * KV_HEADS, "BLOCK_D": HEAD_DIM},
        4,
        1,
        dots=False,
    )
    yield Variant(
        "argmax_tiles",
        gemm.argmax_tiles,
        {
            **{"value_ptr": "*fp32", "index_ptr": "*i32", "id_ptr": "*i64", "best_ptr": "*fp32"},
            **dict.fromkeys(("rows", "tiles", "outputs"), "i32"),
        },
        {"BLOCK": tiles.ARGMAX_BLOCK},
        4,
        1,
        dots=False,
    )
    yield Variant(
        "silu_mul",
        rows.silu_mul,
        {"gate_up_ptr": half, "out_ptr": half, "width": "i32", "out_scale": "fp32"},
        {"BLOCK": tiles.SILU_BLOCK},
        4,
        1,
        dots=False,
    )
    for name, table in (("dense", half), ("int8", "*i8")):
        yield Variant(
            f"embed_rows {name}",
            rows.embed_rows,
            {"id_ptr": "*i64", "table_ptr": table, "scale_ptr": "*fp32", "out_ptr": "*fp32", "width": "i32"},
            {"SCALED": name == "int8", "BLOCKS": name == "int8", "BLOCK": tiles.EMBED_BLOCK},
            4,
            1,
            dots=False,
        )
    yield Variant(
        "prepare_rows",
        step.prepare_rows,
        {
            **dict.fromkeys(("packed_ptr", "table_ptr", "anchor_ptr", "start_ptr", "draft_ptr"), "*i32"),
            **dict.fromkeys(("kept_ptr", "window_ptr"), "*i32"),
            **dict.fromkeys(("token_ptr", "position_ptr", "slot_ptr", "visible_ptr"), "*i64"),
            **dict.fromkeys(("rows", "table_stride", "scratch_page", "moment", "moments"), "i32"),
            "time_ptr": "*i64",
        },
        {"FIELDS": STEP_FIELDS, "KEPT": 5, "WINDOW": 3, "PAGE": PAGE, "BLOCK": 8, "ASM": True},
        1,
        1,
        dots=False,
    )
    yield Variant(
        "settle_rows",
        step.settle_rows,
        {
            **{"sequence_ptr": "*i32", "token_ptr": "*i64", "position_ptr": "*i64", "best_ptr": "*i64"},
            **{"value_ptr": "*fp32", "time_ptr": "*i64", "rows": "i32", "result_stride": "i32", "moments": "i32"},
            **dict.fromkeys(("anchor_ptr", "start_ptr", "result_ptr", "turn_ptr"), "*i32"),
        },
        {"BLOCK": 64, "ASM": True},
        1,
        1,
        dots=False,
    )
    yield Variant(
        "append_rows",
        step.append_rows,
        {
            **{"tap_ptr": "*fp32", "position_ptr": "*i64", "slot_ptr": "*i64", "window_ptr": "*i32", "width": "i32"},
            **{"kept_tap_ptr": "*fp32", "kept_position_ptr": "*i64", "kept_slot_ptr": "*i64"},
        },
        {"BLOCK": tiles.APPEND_BLOCK},
        4,
        1,
        dots=False,
    )


def _codes(dtype: str) -> Iterator[Variant]:
    for halves, top in ((1, 127), (2, 127 * 256)):
        yield Variant(
            f"code_rows {halves}",
            row_codes.code_rows,
            {"x_ptr": f"*{dtype}", "code_ptr": "*i8", "scale_ptr": "*fp32"}
            | dict.fromkeys(("width", "x_stride", "low_offset"), "i32"),
            {"TOP": top, "HALVES": halves, "BLOCK": tiles.CODE_BLOCK},
            tiles.CODE_WARPS,
            1,
            dots=False,
        )
        yield Variant(
            f"scaled {halves}",
            row_codes.scaled,
            {"sum_ptr": "*i32"}
            | dict.fromkeys(("scale_ptr", "factor_ptr", "bias_ptr", "out_ptr"), "*fp32")
            | dict.fromkeys(("width", "low_offset"), "i32"),
            {"HALVES": halves, "HAS_BIAS": True, "BLOCK": tiles.SILU_BLOCK},
            4,
            1,
            dots=False,
        )
    yield Variant(
        "code_gated",
        row_codes.code_gated,
        {"sum_ptr": "*i32"}
        | dict.fromkeys(("in_scale_ptr", "factor_ptr", "bias_ptr", "scale_ptr"), "*fp32")
        | {"code_ptr": "*i8", "width": "i32", "low_offset": "i32"},
        {"TOP": 127 * 256, "HAS_BIAS": True, "BLOCK": tiles.CODE_BLOCK},
        tiles.CODE_WARPS,
        1,
        dots=False,
    )


def _fp8(dtype: str) -> Iterator[Variant]:
    outputs = {"code_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    for gated in (False, True):
        yield Variant(
            f"fp8 code_rows{' gated' if gated else ''}",
            fp8_rows.code_rows,
            {"x_ptr": f"*{dtype}"} | outputs | {"width": "i32", "x_stride": "i32"},
            {"TOP": 448.0, "LEAST": 1e-30, "GATED": gated, "BLOCK": tiles.FP8_BLOCK, "CARD": True},
            tiles.FP8_WARPS,
            1,
            dots=False,
        )
    # Its input is the library's product of 8-bit floats, which is bf16 whatever the activations are.
    signature = {"delta_ptr": "*bf16", "residual_ptr": "*fp32", "weight_ptr": "*fp32"} | outputs
    yield Variant(
        "fp8 code_norm",
        fp8_rows.code_norm,
        signature | {"tap_ptr": "*fp32", "width": "i32", "tap_stride": "i32", "eps": "fp32"},
        {"TOP": 448.0, "LEAST": 1e-30, "HAS_DELTA": True, "HAS_TAP": True, "BLOCK": WIDTH, "CARD": True},
        tiles.norm_warps(WIDTH),
        1,
        dots=False,
    )
