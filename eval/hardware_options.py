"""The command-line options that name a model, its formats, a card and a split: shared by the predictor and the planner.

It turns them into a ``Roofline`` or into an error that names the option or the config's field; it computes nothing.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from eval.interconnect import TensorSplit, check_split, load_link
from eval.mapped_shape import mapped, read_map
from eval.options import new_file, positive
from eval.roofline import Roofline
from eval.shapes import KV_BYTES, WEIGHT_BYTES, Card, ModelShape, intermediate_size, load_card, load_shape
from serve.model.weights_map import WeightsMap


def custom_card(text: str) -> Card:
    """A card that is in no list, as NAME:MEMORY_GB:BANDWIDTH_GBS:TFLOPS."""
    name, *figures = text.split(":")
    if len(figures) != 3:
        raise ValueError(f"--custom-card must be NAME:MEMORY_GB:BANDWIDTH_GBS:TFLOPS, got {text!r}")
    values = []
    for field, figure in zip(("MEMORY_GB", "BANDWIDTH_GBS", "TFLOPS"), figures, strict=True):
        try:
            value = float(figure)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"--custom-card: {field} must be a number above 0, got {figure!r}")
        values.append(value)
    memory, bandwidth, tflops = values
    return Card(name, name, memory * 1e9, bandwidth * 1e9, tflops * 1e12, "given on the command line")


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, card and format options; shared with the capacity planner."""
    parser.add_argument("--model", default="qwen3-4b", help="model folder, config.json or a shape of data/shapes.json")
    parser.add_argument("--card", default="t4", help="card of data/cards.json (default: t4)")
    parser.add_argument("--custom-card", help="NAME:MEMORY_GB:BANDWIDTH_GBS:TFLOPS for a card that is in no list")
    parser.add_argument("--weights", choices=tuple(WEIGHT_BYTES), default="fp16", help="weight format (default: fp16)")
    parser.add_argument("--weights-map", type=Path, help="formats by layer and matrix, in place of --weights")
    parser.add_argument("--head", choices=tuple(WEIGHT_BYTES), help="format of the vocabulary matrix")
    parser.add_argument("--kv", choices=tuple(KV_BYTES), default="fp16", help="KV format (default: fp16)")
    parser.add_argument("--gib", action="store_true", help="take the card's memory figure as GiB instead of GB")
    parser.add_argument("--measured", action="store_true", help="use measured card figures where there are some")
    parser.add_argument("--tp", type=positive, default=1, help="tensor-parallel cards of a replica (default: 1)")
    parser.add_argument("--link", help="nvlink or pcie: what joins the cards (default: the first that the card has)")
    parser.add_argument("--replicas", type=positive, default=1, help="copies of the server (default: 1)")
    parser.add_argument("--json", type=new_file, help="write the result here")


def weights_map_from(args: argparse.Namespace, model: ModelShape) -> WeightsMap | None:
    """The map of the options, if any; what it does not name is in ``--weights``. ValueError names the field."""
    if args.weights_map is None:
        return None
    if args.head:
        raise ValueError("--head is for --weights; a map names lm_head")
    return read_map(args.weights_map, model.layers, args.weights)


def hardware_from(args: argparse.Namespace, node_ranks: int | None = None) -> Roofline:
    """Model, card and split from the options of ``add_hardware_arguments``; ValueError names what is unknown or what
    the model cannot be split by. ``node_ranks``: cards that one node's link joins (all)."""
    compute = args.weights if args.weights in ("fp16", "bf16", "fp8") else "fp16"
    if args.custom_card:
        card = custom_card(args.custom_card)
    else:
        card = load_card(args.card, compute, args.gib, args.measured)
    plain = load_shape(args.model)
    plan = weights_map_from(args, plain)
    if plan is None:
        model = plain.with_weights(args.weights, args.head).with_kv(args.kv)
    else:
        model = mapped(plain, intermediate_size(args.model), plan).with_kv(args.kv)
    if args.link and args.tp == 1:
        raise ValueError("--link is for --tp above 1")
    if args.tp > 1 and args.custom_card:
        raise ValueError("--tp above 1 needs a card of data/cards.json: --custom-card has no link")
    if args.tp == 1:
        return Roofline(model, card)
    vocabulary = model.head_parameters // model.hidden
    check_split(args.tp, model.heads, model.kv_heads, intermediate_size(args.model), vocabulary)
    return Roofline(
        model, card, split=TensorSplit(args.tp, load_link(args.card, args.link, min(args.tp, node_ranks or args.tp)))
    )
