"""Times of decode, verify, a speculative round and a prompt from what the GPU kernels move: bytes and operations
counted by their own launch parameters (tiles, splits, padding), over a card's measured rates.

A kernel takes its bytes over the read bandwidth or its operations over the matrix rate, whichever is longer, and a
fixed time to start and drain. The fixed times and the attention's share were fitted on one H200; the same formulas
give the other cards. Split over several cards each kernel is its rank's share, and the exchanges are added. Knows no
server: no host time is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval.interconnect import ONE_CARD, TensorSplit
from eval.mapped_shape import matrix_shapes
from eval.shapes import ModelShape
from serve.kernels.formats import stored_format
from serve.kernels.triton.tiles import (
    KV_SPLIT,
    LANE_ROWS,
    QUERY_TILE,
    GemmPlan,
    attends_in_lanes,
    gemm_plan,
    int4_in_lanes,
    lane_card,
)
from serve.model.weights_map import WeightsMap

DRAFT_LAYERS = 5
BLOCK = 16
REREAD = 0.8
BEST_KERNELS = 8
"""Small kernels that find the best of the ranks' best tokens."""
UNPACKED = {"dense": float("inf"), "int8": 16.0, "int8_group": 16.0, "int4_halves": 13.5}
LANES = {"int8": 30.0, "int4": 34.0}
"""Weights that a processor turns into floats in a cycle, in tiles and in a thread's own registers (``lane_card``), both
fitted to steps of one row on the H200."""
FORMATS = {
    "bf16": ("dense", 2.0, 0),
    "fp16": ("dense", 2.0, 0),
    "int8": ("int8", 1.0, 0),
    "int8-g128": ("int8_group", 1.03125, 128),
    "int4": ("int4", 0.5625, 128),
    "int4-g32": ("int4", 0.625, 64),
    "int4-g64": ("int4", 0.5625, 128),
    "int4-g128": ("int4", 0.53125, 128),
}
"""Kernel format, bytes a weight (groups have a word of scale, or of scale and zero) and packing of each format."""


@dataclass(frozen=True)
class KernelCard:
    """Bytes and operations a second that kernels reach, and fixed microseconds of a kernel. exchange_us: what a sum
    over cards costs beside itself (fitted, not profiled: later starts of kernels, and waiting, would explain it);
    lane_us: attention and the join of its splits where few rows attend in lanes; kv_share: part of the bandwidth that
    attention reaches; unpack: processors times clock, in hertz: stored integers become floats so many a cycle
    (UNPACKED); integer_rate: operations a second of the products that they then enter."""

    capability: int
    bandwidth: float
    matrix_rate: float
    prompt_rate: float
    attention_rate: float
    matrix_us: float
    small_us: float
    attention_us: float
    lane_us: float
    exchange_us: float
    kv_share: float
    unpack: float
    integer_rate: float
    source: str


KERNEL_CARDS = {
    "h200": KernelCard(
        90, 4.39e12, 500e12, 640e12, 373e12, 2.2, 1.4, 9.0, 3.6, 5.2, 0.88, 132 * 1.755e9, 196e12,
        "measured and fitted on one H200, 2026-11-30 (scripts/device_kernels.py, scripts/sweep_tiles.py)",
    ),
    "t4": KernelCard(
        75, 250e9, 22e12, 22e12, 8e12, 3.3, 2.65, 8.0, 8.0, 2.65, 0.65, 40 * 1.2e9, 22e12,
        "published: 250 GB/s and 22 TFLOPS sustained at 70 W; fixed times as on the H200 where no kernel starts early; "
        "nothing measured on a T4",
    ),
}  # fmt: skip

MEASURED_H200 = (
    ("bf16", 1, 1, 2.433),
    ("bf16", 1, 16, 2.732),
    ("bf16", 8, 1, 2.828),
    ("bf16", 8, 8, 3.355),
    ("bf16", 32, 1, 4.073),
    ("bf16", 64, 1, 5.446),
    ("bf16", 128, 1, 8.637),
    ("int8", 1, 1, 1.443),
    ("int8", 1, 16, 1.791),
    ("int8", 8, 1, 1.868),
    ("int8", 8, 8, 3.667),
    ("int8", 32, 1, 3.610),
    ("int8", 64, 1, 5.794),
    ("int4", 1, 1, 1.193),
    ("int4", 1, 16, 1.818),
    ("int4", 8, 1, 1.620),
    ("int4", 8, 8, 4.354),
    ("int4", 32, 1, 3.784),
    ("int4", 64, 1, 6.447),
)
"""Format, sequences, rows each, milliseconds of a step at 1,024 positions (``device_kernels.py --parts decode``), at
7e3fa2a; bf16 at one row as ``device_bench`` has it between events at cce3eda. All others were measured before products
let the next kernel in ahead of their end."""
MEASURED_H200_PROMPT = (4096, 59.49)
MEASURED_TWO_H200 = {
    "qwen3-4b": {
        "1x1": 2.83, "8x1": 2.99, "32x1": 3.85, "1x16": 2.96, "whole draft": 3.44, "prompt 4096": 40.97
    },
    "qwen3-32b": {
        "1x1": 10.92, "8x1": 11.33, "32x1": 13.43, "1x16": 11.57, "whole draft": 13.02, "prompt 4096": 240.93
    },
}  # fmt: skip
"""Milliseconds on two of them in bf16, by the names of ``kernel_table`` (python -m eval.device_tp)."""


@dataclass(frozen=True)
class KernelTimes:
    """One model in one weight format, or in those of a map (its drafter in the one), on one card, or on each of the
    cards it is split over."""

    model: ModelShape
    intermediate: int
    weights: str
    card: KernelCard
    split: TensorSplit = ONE_CARD
    plan: WeightsMap | None = None

    def step_ms(self, sequences: int, rows: int, context: int) -> float:
        """A step of ``rows`` rows of each sequence: all layers, the head and its argmax."""
        layers = self._layers_ms(self.model.layers, sequences, rows, context, self.split, self.plan)
        return layers + self._head_ms(sequences * rows)

    def round_ms(self, sequences: int, context: int, whole_drafter: bool = False) -> float:
        """Draft of BLOCK rows by a drafter of DRAFT_LAYERS target-like layers on the target's head, then verify.
        ``whole_drafter``: its layers run whole on every card, with nothing to exchange, instead of split."""
        split = ONE_CARD if whole_drafter else self.split
        draft = self._layers_ms(DRAFT_LAYERS, sequences, BLOCK, context, split) + self._head_ms(sequences * BLOCK)
        return draft + self.step_ms(sequences, BLOCK, context)

    def prompt_ms(self, tokens: int) -> float:
        """A prompt in one chunk: library products over 16-bit weights (stored ones are widened first), attention."""
        model, ranks = self.model, self.split.ranks
        body = model.active_parameters - model.head_parameters
        copies = self.split.kv_heads_per_rank(model.kv_heads) * ranks - model.kv_heads
        body = (body + 2 * model.layers * model.hidden * copies * model.head_dim) // ranks
        seconds = 2.0 * body * tokens / self.card.prompt_rate
        seconds += (
            2.0
            * self.model.layers
            * (self.model.heads // ranks)
            * self.model.head_dim
            * tokens**2
            * 2
            / (2 * self.card.attention_rate)
        )
        plan = self.plan or WeightsMap(self.weights)
        for name, (outputs, depth) in matrix_shapes(model, self.intermediate).items():
            for form, count in plan.counts(model.layers, name).items():
                if FORMATS[form][0] != "dense":
                    widened = count * outputs * depth / ranks
                    seconds += widened * (FORMATS[form][1] + 4.0) / self.card.bandwidth
        seconds += model.layers * self.split.layer_seconds(tokens, model.hidden)
        return seconds * 1e3 + self._head_ms(1)

    def exchange_ms(self, rows: int, head_rows: int) -> float:
        """The part of a pass that is collectives: ``rows`` rows, of which ``head_rows`` reach the head."""
        return self.split.pass_seconds(self.model.layers, self.model.hidden, rows, head_rows) * 1e3

    def _layers_ms(
        self, layers: int, sequences: int, rows: int, context: int, split: TensorSplit, plan: WeightsMap | None = None
    ) -> float:
        plan = plan or WeightsMap(self.weights)
        model, total = self.model, sequences * rows
        heads, kv_heads = model.heads // split.ranks, split.kv_heads_per_rank(model.kv_heads)
        width, kv, inner = heads * model.head_dim, kv_heads * model.head_dim, self.intermediate // split.ranks
        us = 0.0
        for name, outputs, depth, cut in (
            ("qkv_proj", width + 2 * kv, model.hidden, True),
            ("o_proj", model.hidden, width, True),
            ("gate_up_proj", 2 * inner, model.hidden, False),
            ("down_proj", model.hidden, inner, True),
        ):
            for form, count in plan.counts(layers, name).items():
                us += count / layers * self._matrix_us(form, outputs, depth, total, cut)
        us += 3 * self.card.small_us  # two norms and the K/V write
        if split.ranks > 1:
            # Each rank adds up its own K splits before they travel; then what an exchange costs the kernels around it.
            us += 2 * (self.card.small_us + self.card.exchange_us)
        splits = -(-context // KV_SPLIT)
        read = sequences * context * 2.0 * kv * model.kv_element_bytes
        # Each further tile of query rows reads the same K/V again, mostly from the L2.
        read *= 1 + REREAD * (-(-rows * (heads // kv_heads) // QUERY_TILE) - 1)
        parts = 2 * total * splits * width * 4
        lanes = total <= LANE_ROWS and model.head_dim == 128 and attends_in_lanes(self.card.capability)
        us += self.card.lane_us if lanes else self.card.attention_us
        us += (read / self.card.kv_share + parts) / self.card.bandwidth * 1e6
        return layers * (us / 1e3 + split.layer_seconds(total, model.hidden) * 1e3)

    def _matrix_us(self, form: str, outputs: int, depth: int, rows: int, split: bool) -> float:
        kind, size, pack = self._stored(form, depth)
        plan = gemm_plan(kind, pack, outputs, depth, self.card.capability, split=split)
        parts = 2 * rows * outputs * 4 * -(-depth // plan.split_depth) if split else 2 * rows * outputs
        moved = outputs * depth * size + parts
        return self._product_s(kind, moved, outputs * depth, _padded(plan, rows)) * 1e6 + self.card.matrix_us

    def _head_ms(self, rows: int) -> float:
        kind, size, pack = self._stored((self.plan or WeightsMap(self.weights)).head_format, self.model.hidden)
        vocabulary = self.model.head_parameters // self.model.hidden // self.split.ranks
        plan = gemm_plan(kind, pack, vocabulary, self.model.hidden, self.card.capability, split=False)
        weights = vocabulary * self.model.hidden
        seconds = self._product_s(kind, weights * size, weights, _padded(plan, rows))
        small = BEST_KERNELS * self.card.small_us if self.split.ranks > 1 else 0.0
        return (seconds + self.split.head_seconds(rows)) * 1e3 + (self.card.matrix_us + small) / 1e3

    def _stored(self, form: str, depth: int) -> tuple[str, float, int]:
        """FORMATS' entry as a matrix of this depth is stored on this card."""
        kind, size, pack = FORMATS[form]
        if kind == "int4" and not int4_in_lanes(stored_format(form).group, depth, self.card.capability):
            kind = "int4_halves"
        return kind, size, pack

    def _product_s(self, kind: str, moved: float, weights: int, rows: int) -> float:
        """Seconds of a product: the longest of moving bytes, turning integers into floats and multiplying."""
        rate = self.card.matrix_rate if kind == "dense" else self.card.integer_rate
        pace = LANES[kind] if kind in LANES and lane_card(self.card.capability) else UNPACKED[kind]
        unpacking = weights / (pace * self.card.unpack)
        return max(moved / self.card.bandwidth, unpacking, 2.0 * weights * rows / rate)


def _padded(plan: GemmPlan, rows: int) -> int:
    """Rows the tensor cores work on: whole row tiles."""
    width = plan.tile(rows)[0]
    return -(-rows // width) * width


def kernel_table(
    model: ModelShape,
    intermediate: int,
    card: KernelCard,
    context: int = 1024,
    split: TensorSplit = ONE_CARD,
    plan: WeightsMap | None = None,
) -> list[dict[str, Any]]:
    """Predicted milliseconds of each weight format that the card serves, and of a map. A split adds the round of a
    drafter that is whole on every card."""
    rows: list[dict[str, Any]] = []
    formats = ("fp16" if card.capability < 80 else "bf16", "int8", "int4")
    wanted: list[tuple[str, str, WeightsMap | None]] = [(weights, weights, None) for weights in formats]
    for name, weights, one in wanted if plan is None else [*wanted, ("map", plan.default, plan)]:
        times = KernelTimes(model, intermediate, weights, card, split, one)
        entry: dict[str, Any] = {"weights": name}
        for sequences, each in ((1, 1), (8, 1), (32, 1), (1, 16), (8, 8)):
            entry[f"{sequences}x{each}"] = times.step_ms(sequences, each, context)
        entry["round 1x16"] = times.round_ms(1, context)
        entry["prompt 4096"] = times.prompt_ms(4096)
        if split.ranks > 1:
            entry["whole draft"] = times.round_ms(1, context, whole_drafter=True)
        rows.append(entry)
    return rows


def calibration(model: ModelShape, intermediate: int) -> list[tuple[str, float, float]]:
    """What was measured on the H200 beside what the formulas give for it: name, predicted and measured milliseconds."""
    card = KERNEL_CARDS["h200"]
    found = []
    for weights, sequences, rows, measured in MEASURED_H200:
        times = KernelTimes(model, intermediate, weights, card)
        found.append((f"{weights} {sequences}x{rows}", times.step_ms(sequences, rows, 1024), measured))
    tokens, measured = MEASURED_H200_PROMPT
    found.append((f"bf16 prompt {tokens}", KernelTimes(model, intermediate, "bf16", card).prompt_ms(tokens), measured))
    return found


def kernel_lines(table: list[dict[str, Any]], what: str = "ms") -> list[str]:
    """A table as text; ``what``: its unit, and of which cards it speaks."""
    names = [name for name in table[0] if name != "weights"]
    lines = [f"kernels alone at 1,024 positions (sequences x rows), {what}:"]
    lines.append(f"  {'':6}" + "".join(f"{name:>12}" for name in names))
    return lines + [f"  {row['weights']:6}" + "".join(f"{row[name]:>12.2f}" for name in names) for row in table]


def split_tables(
    model: ModelShape, intermediate: int, card: KernelCard, split: TensorSplit, context: int = 1024
) -> dict[str, list[dict[str, Any]]]:
    """One card's table, the split's, one over the other (a whole drafter's round against the one card's), and the
    milliseconds of exchange in the split's."""
    one = kernel_table(model, intermediate, card, context)
    many = kernel_table(model, intermediate, card, context, split)
    speed_up = [
        {
            name: value if name == "weights" else single.get(name, single["round 1x16"]) / value
            for name, value in row.items()
        }
        for single, row in zip(one, many, strict=True)
    ]
    times = KernelTimes(model, intermediate, many[0]["weights"], card, split)
    exchange: dict[str, Any] = {"weights": "any"}
    for name in ("1x1", "8x1", "32x1", "1x16", "8x8"):
        sequences, each = map(int, name.split("x"))
        exchange[name] = times.exchange_ms(sequences * each, sequences * each)
    draft = split.pass_seconds(DRAFT_LAYERS, model.hidden, BLOCK, BLOCK) * 1e3
    exchange["round 1x16"] = exchange["1x16"] + draft
    exchange["prompt 4096"] = times.exchange_ms(4096, 1)
    exchange["whole draft"] = exchange["1x16"] + split.head_seconds(BLOCK) * 1e3
    return {"kernels_one_card": one, "kernels": many, "speed_up": speed_up, "exchange": [exchange]}


def calibration_lines(checks: list[tuple[str, float, float]]) -> list[str]:
    """Predicted beside measured, as text."""
    lines = ["the same formulas on the H200, predicted / measured ms:"]
    lines += [f"  {name:18}{got:>8.2f} /{want:>7.2f}  {(got / want - 1) * 100:+.0f} %" for name, got, want in checks]
    return lines
