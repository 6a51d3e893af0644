"""``python -m eval.predict``: what the hardware allows, written down, hashed and dated before a run; scored after it.

A prediction is one sealed JSON file (``eval.score``), which a sweep compares with its points. It runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from eval.hardware_options import add_hardware_arguments, hardware_from, weights_map_from
from eval.interconnect import ONE_CARD
from eval.json_report import write_report
from eval.kernel_model import (
    FORMATS,
    KERNEL_CARDS,
    KernelTimes,
    calibration,
    calibration_lines,
    kernel_lines,
    kernel_table,
    split_tables,
)
from eval.kv_capacity import Pool, kv_bytes_per_card, kv_pool
from eval.options import at_least, positive, share
from eval.roofline import (
    Roofline,
    acceptance_length,
    decompose_step,
    live_context,
    speculative_speedup,
    ttft_knee,
    verify_cost,
)
from eval.score import seal
from eval.server_options import SERVER_OTHER, SERVER_SHARE, add_server_arguments, server_side
from eval.serving_model import (
    HOST_SOURCE,
    Closed,
    Host,
    KernelStepTimes,
    RooflineTimes,
    StepTimes,
    serve,
    served_lines,
)
from eval.shapes import intermediate_size, load_shape

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCK_LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 12, 15)
REUSE = (
    "every replica has a prefix cache of its own: no KV is shared between replicas, and none of these rates counts any "
    "reuse; requests are spread evenly by a router that costs nothing"
)
"""What the rates of several replicas assume."""


def predict(
    roofline: Roofline,
    prompt: int,
    output: int,
    utilisation: float = SERVER_SHARE,
    reserve: float = SERVER_OTHER,
    page: int = 32,
    compute_share: float = 0.6,
    acceptance: float | None = None,
    draft_cost: float = 0.12,
    batches: Sequence[int] = (1, 8, 32),
    replicas: int = 1,
    kv_memory: int = 0,
) -> dict[str, Any]:
    """Every number that can be said beforehand. ``reserve`` is bytes for graphs, activations and a drafter;
    ``kv_memory`` bytes given to pages instead of what is left (0: what is left); ``draft_cost`` is the drafter's time
    in plain steps; ``acceptance`` is the chance that one drafted token is kept. All are one replica's, but for those
    under ``fleet``."""
    context = live_context(prompt, output)
    prefill = roofline.prefill_seconds(prompt, compute_share)
    if kv_memory:
        pool = Pool(kv_memory, kv_bytes_per_card(roofline.model, roofline.split, roofline.model.layers), page)
    else:
        pool = kv_pool(roofline.model, roofline.card.memory, utilisation, reserve, page, roofline.split)
    knee = roofline.knee(context)
    result: dict[str, Any] = {
        "ridge_flops_per_byte": roofline.card.ridge,
        "naive_knee": roofline.naive_knee(),
        "knee": knee,
        "knee_text": f"compute takes over at batch {knee:.0f}" if knee else "no knee: flattening only",
        "no_knee_from_context": roofline.no_knee_context(),
        "half_saturation": roofline.half_saturation(context),
        "throughput_asymptote": roofline.asymptote(context),
        "compute_roof": roofline.compute_roof(),
        "batch_one_ceiling": roofline.batch_one_ceiling(),
        "batch_one_tpot": roofline.step_seconds(1, context),
        "mean_live_context": context,
        "curve": {str(batch): roofline.throughput(batch, context) for batch in CONCURRENCY},
        "serving_curve": {
            str(batch): roofline.serving_throughput(batch, prompt, output, compute_share) for batch in CONCURRENCY
        },
        "prefill_floor": roofline.prefill_seconds(prompt),
        "ttft": prefill,
        "ttft_knee": ttft_knee(prefill, 1.5 * prefill),
        "step_parts": {
            str(batch): decompose_step(0.0, roofline, batch, prompt, output, compute_share) for batch in CONCURRENCY
        },
        "kv_pages": pool.blocks,
        "kv_tokens": pool.tokens,
        "requests_before_preemption": int(pool.requests(prompt + output)),
    }
    if acceptance is not None:
        result["speculation"] = speculation(roofline, acceptance, draft_cost, context, batches)
    if roofline.split.ranks > 1:
        result["against_one_card"] = against_one_card(roofline, context, prompt, compute_share, batches)
    if replicas > 1:
        result["fleet"] = fleet(result["serving_curve"], output, replicas, roofline.split.ranks)
    return result


def served(
    times: StepTimes, host: Host, prompt: int, output: int, seconds: float, batch_tokens: int, most: int
) -> dict[str, dict[str, float]]:
    """What the server does with each number of streams (``eval.serving_model``); keys as in ``curve``."""
    return {
        str(streams): serve(Closed(streams, prompt, output, seconds, batch_tokens, most), times, host).to_json()
        for streams in CONCURRENCY
    }


def step_times(args: argparse.Namespace, line: Roofline) -> tuple[StepTimes, str]:
    """The times of steps, and whose they are: the kernels' where the card's rates are known, else the roofline's."""
    card = None if args.custom_card else KERNEL_CARDS.get(args.card)
    if card is None or args.weights not in FORMATS:
        return RooflineTimes(line, args.compute_share), "steps from the roofline"
    kernels = KernelTimes(line.model, intermediate_size(args.model), args.weights, card, line.split)
    return KernelStepTimes(kernels), "steps from the kernels"


def against_one_card(
    roofline: Roofline, context: float, prompt: int, compute_share: float, batches: Sequence[int]
) -> dict[str, float]:
    """One card's time over the split's: above 1 the split is quicker, N would be perfect."""
    one = replace(roofline, split=ONE_CARD)
    ratios = {f"step of {n}": one.step_seconds(n, context) / roofline.step_seconds(n, context) for n in batches}
    prefill = one.prefill_seconds(prompt, compute_share) / roofline.prefill_seconds(prompt, compute_share)
    return {**ratios, f"prompt of {prompt}": prefill}


def fleet(serving_curve: dict[str, float], output: int, replicas: int, ranks: int) -> dict[str, Any]:
    """Rates of ``replicas`` copies of the server, by the streams of each: tokens and requests a second."""
    tokens = {streams: rate * replicas for streams, rate in serving_curve.items()}
    return {
        "replicas": replicas,
        "cards": replicas * ranks,
        "tokens_per_second": tokens,
        "requests_per_second": {streams: rate / output for streams, rate in tokens.items()},
        "assumption": REUSE,
    }


def speculation(
    roofline: Roofline, acceptance: float, draft_cost: float, context: float, batches: Sequence[int]
) -> dict[str, Any]:
    """Expected speed-up for each batch size and block length, and the best block length of each batch size."""
    table: dict[str, dict[str, float]] = {}
    for batch in batches:
        row = {"0": 1.0}
        for length in BLOCK_LENGTHS[1:]:
            tau = acceptance_length(acceptance, length)
            row[str(length)] = speculative_speedup(tau, draft_cost, verify_cost(roofline, batch, length, context))
        table[str(batch)] = row
    best = {batch: int(max(row, key=lambda length: row[length])) for batch, row in table.items()}
    return {"acceptance": acceptance, "draft_cost": draft_cost, "speedup": table, "best_block_length": best}


def limits_text(predictions: dict[str, Any], most: int, batch_tokens: int, prompt: int) -> str:
    """The server's limits beside the curve's: which of them binds first."""
    knee = predictions["knee"]
    bend = f"the knee at {knee:.0f}" if knee else f"half saturation at {predictions['half_saturation']:.0f} (no knee)"
    reach = knee or predictions["half_saturation"]
    pool = predictions["requests_before_preemption"]
    first = "KV pages" if pool < min(most, reach) else "the sequence limit" if most < reach else "the curve"
    return (
        f"{most} sequences and {batch_tokens} rows of a step at most, {pool} requests in the KV pool, {bend}: {first} "
        f"binds first; a step holds {batch_tokens / prompt:.1f} prompts of {prompt}"
    )


def text_lines(predictions: dict[str, Any]) -> list[str]:
    """A prediction as text."""
    lines = []
    for name, value in predictions.items():
        if name == "speculation":
            lines.append(f"speed-up at acceptance {value['acceptance']:g} by batch and block length:")
            for batch, row in value["speedup"].items():
                cells = "  ".join(f"{length}:{speed:.2f}" for length, speed in row.items())
                lines.append(f"  batch {batch:>3}  {cells}   best {value['best_block_length'][batch]}")
        elif name == "against_one_card":
            ratios = "  ".join(f"{what}: {ratio:.2f}" for what, ratio in value.items())
            lines.append(f"{'times one card':28}{ratios}")
        elif name == "fleet":
            lines += fleet_lines(value)
        elif name == "served":
            lines += served_lines(value)
        elif name == "step_parts":
            continue
        elif isinstance(value, dict):
            lines.append(f"{name + ' (tok/s)':28}" + "  ".join(f"{key}:{item:.0f}" for key, item in value.items()))
        elif value is None or isinstance(value, str):
            lines.append(f"{name:28}{value if value is not None else 'none'}")
        else:
            lines.append(f"{name:28}{value:.5g}")
    return lines


def fleet_lines(value: dict[str, Any]) -> list[str]:
    """Rates of several replicas as text."""
    lines = [f"{value['replicas']} replicas, {value['cards']} cards, by streams of each replica:"]
    for key, unit in (("tokens_per_second", "tok/s"), ("requests_per_second", "requests/s")):
        lines.append(f"  {unit:24}" + "  ".join(f"{streams}:{rate:.4g}" for streams, rate in value[key].items()))
    return [*lines, f"  assumed: {value['assumption']}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.predict", description=__doc__)
    add_hardware_arguments(parser)
    parser.add_argument("--prompt", type=positive, default=1000, help="prompt tokens (default: 1000)")
    parser.add_argument("--output", type=positive, default=1000, help="output tokens (default: 1000)")
    parser.add_argument("--efficiency", type=share, default=1.0, help="share of peak bandwidth reached (default: 1)")
    parser.add_argument("--compute-share", type=share, default=0.6, help="share of peak compute in prefill")
    parser.add_argument(
        "--acceptance", type=at_least(0, 1), help="chance that a drafted token is kept: adds speculation"
    )
    parser.add_argument("--draft-cost", type=at_least(0), default=0.12, help="time of a draft in plain steps")
    add_server_arguments(parser)
    args = parser.parse_args(argv)
    try:
        line = hardware_from(args)
        server = server_side(
            args, line.card.memory, (line.model.active_parameters - line.model.head_parameters) // args.tp
        )
        line = replace(line, efficiency=args.efficiency, overhead=server.overhead)
        predictions = predict(line, args.prompt, args.output, args.utilisation, args.reserve_gb * 1e9, args.page,
                              args.compute_share, args.acceptance, args.draft_cost, replicas=args.replicas,
                              kv_memory=server.kv_memory)  # fmt: skip
        times, whose = step_times(args, line)
        # More sequences than the pages hold at their mean length would wait, or be preempted and computed again.
        running = max(1, min(server.most, int(predictions["kv_tokens"] / predictions["mean_live_context"])))
        predictions["served"] = served(times, server.host, args.prompt, args.output, args.seconds, server.batch_tokens,
                                       running)  # fmt: skip
    except (ValueError, OSError) as fault:
        parser.error(str(fault))
    predictions["limits"] = limits_text(predictions, server.most, server.batch_tokens, args.prompt)
    lines = [*text_lines(predictions), f"  served: {whose}; {HOST_SOURCE}"]
    card = None if args.custom_card else KERNEL_CARDS.get(args.card)
    if card is not None:
        shape, inner = load_shape(args.model), intermediate_size(args.model)
        lines.append(f"rates: {card.source}")
        if args.tp > 1:
            tables = split_tables(shape, inner, card, line.split)
            predictions |= tables
            for name, what in (("kernels_one_card", "ms, one card"), ("kernels", f"ms, {args.tp} cards"),
                               ("exchange", "ms of exchange in it"), ("speed_up", "times one card")):  # fmt: skip
                lines += kernel_lines(tables[name], what)
        else:
            predictions["kernels"] = kernel_table(shape, inner, card, plan=weights_map_from(args, shape))
            lines += kernel_lines(predictions["kernels"])
        lines += calibration_lines(calibration(load_shape("qwen3-4b"), intermediate_size("qwen3-4b")))
    inputs = {key: str(value) for key, value in vars(args).items()}
    inputs |= {"served_steps": whose, "served_host": str(asdict(server))}
    record = seal({**inputs, "card_source": line.card.source, "parameters": line.model.parameters}, predictions)
    print(f"{line.model.name} ({args.weights}) on {args.tp} x {line.card.title}: {line.card.source}")
    if args.tp > 1:
        print(f"{line.split.link.name}: {line.split.link.source}")
    print("\n".join(lines))
    print(f"sha256 {record['sha256']}")
    if args.json:
        write_report(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
