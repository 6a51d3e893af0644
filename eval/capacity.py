"""``python -m eval.capacity``: the capacity planner on the command line, with every assumption and unit printed.

``--exercise`` answers the capacity exercise (an 8B model on one card, a 405B model over two nodes). Otherwise it plans
for a model, a card, a split and a distribution of lengths. The arithmetic is ``eval.kv_capacity``'s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.hardware_options import add_hardware_arguments, hardware_from
from eval.interconnect import Link
from eval.json_report import write_report
from eval.kv_capacity import Hardware, Plan, kv_pool, kv_read_crossover, lengths, overflow
from eval.options import at_least, not_negative, positive, share
from eval.predict import REUSE
from eval.shapes import ModelShape, dense

NETWORK = Link("network", 50e9, 30e-6, 0.0, "assumed: 400 Gb/s a card, 30 us an all-reduce")
"""Between nodes; nothing was measured."""


@dataclass(frozen=True)
class Units:
    """GB (1e9) or GiB (2^30): one switch for everything printed."""

    gib: bool

    def size(self, value: float) -> str:
        return f"{value / 2**30:.2f} GiB" if self.gib else f"{value / 1e9:.2f} GB"

    def memory(self, figure: float) -> float:
        """Bytes of a data sheet's "80 GB" in the chosen reading."""
        return figure * (2**30 if self.gib else 1e9)


def exercise_one(units: Units) -> list[str]:
    """Part one: an 8B GQA model on one 80 GB card."""
    base = dense("8B", 8.03e9, layers=32, kv_heads=8, head_dim=128)
    memory = units.memory(80)
    lines = [
        "PART 1: 8.03B parameters, 32 layers, 8 KV heads of 128, fp16, one 80 GB card",
        f"ASSUMPTIONS: card {units.size(memory)}, 90 % usable, 3 GB overhead, 32k = 32,768 tokens, pages of 16 tokens",
        f"weights {units.size(base.weight_bytes)}",
    ]
    kinds = {"GQA fp16": base, "MHA fp16": base.with_kv("fp16", 32), "GQA fp8": base.with_kv("fp8"),
             "MHA fp8": base.with_kv("fp8", 32)}  # fmt: skip
    for name, model in kinds.items():
        pool = kv_pool(model, memory)
        lines.append(
            f"{name}: {model.kv_bytes_per_token:,} B/token, {units.size(model.kv_bytes_per_token * 32_768)} per 32k "
            f"request; pool {units.size(pool.bytes)} = {pool.tokens:,} tokens = {pool.blocks:,} pages; "
            f"{int(pool.requests(32_768))} requests with the maximum reserved, at most {int(pool.requests(2500))} "
            f"paged at 2,500 ({pool.requests_in_blocks(2500)} in whole pages); KV reads pass weight reads at "
            f"{kv_read_crossover(model):,} tokens"
        )
    return [*lines, *why_upper_bound(base, memory)]


def why_upper_bound(model: ModelShape, memory: float) -> list[str]:
    """Why paged concurrency at one length is a bound and no promise; the last reason with its figures."""
    read = model.weight_bytes + kv_pool(model, memory).bytes
    return [
        '"12 users, so more GPUs" is what reserving the maximum gives: the remedy is paging, not GPUs.',
        "The paged figure is an UPPER BOUND: (1) 2,500 is the median of a skewed distribution and the mean fills the "
        "pool; (2) requests admitted small keep growing, then are preempted; (3) whole pages and a watermark; (4) "
        "prefill bursts need room; (5) the sequence limit or TPOT may bind first: a full pool reads "
        f"{read / 1e9:.1f} GB a step = {read / (0.7 * 3.35e12) * 1000:.1f} ms on an H100 (70 % of 3.35 TB/s). "
        "Only shared prefixes can beat it.",
    ]


def exercise_two(units: Units) -> list[str]:
    """Part two: three plans for a 405B model on H100 nodes."""
    base = dense("405B", 405e9, layers=126, kv_heads=8, head_dim=128, hidden=16384)
    hardware = Hardware(usable=68e9, bandwidth=0.7 * 3.35e12)
    lines = [
        "PART 2: 405B parameters, 126 layers, 8 KV heads of 128, TPOT target 40 ms",
        "ASSUMPTIONS: 68 GB usable per H100 (90 % of 80 GB less 4 GB), 70 % of 3.35 TB/s, 8 cards a node, all-reduce "
        "10 us in a node and 30 us between nodes, fp16 KV, 8k = 8,192 tokens",
        f"weights fp16 {units.size(base.weight_bytes)}, fp8 {units.size(base.weight_bytes / 2)}; KV "
        f"{base.kv_bytes_per_token:,} B/token, {units.size(base.kv_bytes_per_token * 8192)} per 8k request",
    ]
    if not Plan("fp16 TP8", 8, 1, base, hardware).fits:
        lines.append(f"fp16 on one node needs {units.size(base.weight_bytes / 8)} per card: impossible")
    plans = (Plan("fp8 TP8, one node", 8, 1, base.with_weights("fp8"), hardware),
             Plan("fp16 TP8 x PP2, two nodes", 8, 2, base, hardware),
             Plan("fp16 TP16, two nodes", 16, 1, base, hardware))  # fmt: skip
    for plan in plans:
        lines += plan_lines(plan, 8192, 0.040, units)
    return [
        *lines,
        "Pipeline parallelism does not shorten a token's path: each token crosses both stages in turn. It adds "
        "capacity and, with two or more micro-batches in flight, throughput.",
        "TP16: 2 all-reduces per layer on the slow link for every token, latency-bound; 8 KV heads on 16 ranks are "
        "stored twice, so the pool holds no more than one node's; two nodes fail together.",
        "RECOMMENDATION: fp8, TP8 on one node, more capacity by replicas (two replicas hold as many as TP8 x PP2 at "
        "about 31 ms instead of 53 in two micro-batches, or 60 in one).",
        "BEFORE fp8: task accuracy against fp16 (long context, code, maths, the product's own set); which scales and "
        "which layers stay in high precision; fp8 KV as a decision of its own; measured TPOT p99 at the batch with "
        "prefill interference; real overhead per card; that a checkpoint exists; recovery when the node dies.",
    ]


def plan_lines(plan: Plan, context: int, target: float, units: Units) -> list[str]:
    """One plan: what is held where, how many fit, and the time of a token."""
    batch = plan.concurrency(context)
    lines = [
        f"{plan.name}: {plan.cards} cards, weights {units.size(plan.weights_per_card)} and free "
        f"{units.size(max(0.0, plan.free_per_card))} per card; raw pool {units.size(plan.pool_bytes)}; "
        f"{plan.kv_bytes_per_token_per_card:,} B of KV per token and card"
        + (f" (every KV head stored {plan.kv_copies:g} times)" if plan.kv_copies > 1 else "")
        + f"; {plan.tokens:,} tokens; {batch} requests of {context:,}",
    ]
    if not plan.fits:
        return [*lines, "  does not fit"]
    tpot = plan.tpot(max(1, batch), context)
    lines.append(
        f"  per token: weights {plan.weight_seconds * 1000:.1f} ms, KV {plan.kv_seconds(batch, context) * 1000:.1f} ms "
        f"at {batch} requests, {plan.allreduces} all-reduces {plan.collective_seconds(max(1, batch)) * 1000:.1f} ms = "
        f"{tpot * 1000:.1f} ms; target {target * 1000:g} ms: {'met' if tpot <= target else 'MISSED'}"
    )
    return lines


def plan_for(args: argparse.Namespace, units: Units) -> tuple[list[str], dict[str, Any]]:
    """The planner: pool and concurrency of one replica under a distribution of lengths, and the rates of all."""
    line = hardware_from(args, args.cards_per_node)
    model, card = line.model, line.card
    if args.pp > model.layers:
        raise ValueError(f"--pp {args.pp} is more stages than num_hidden_layers {model.layers}")
    usable = card.memory * args.utilisation - args.overhead_gb * 1e9
    hardware = Hardware(usable, card.bandwidth * args.bandwidth_share, args.cards_per_node, line.split.link, NETWORK)
    plan = Plan(f"{args.weights} TP{args.tp} x PP{args.pp}", args.tp, args.pp, model, hardware)
    text = [
        f"{model.name} on {card.title} ({card.source})",
        f"ASSUMPTIONS: card {units.size(card.memory)}, {args.utilisation:.0%} usable, {args.overhead_gb:g} GB overhead "
        f"per card, {args.bandwidth_share:.0%} of {card.bandwidth / 1e9:g} GB/s, weights {args.weights}, KV {args.kv}, "
        f"pages of {args.page} tokens, one batch in flight",
        *([f"{plan.split.link.name}: {plan.split.link.source}"] if args.tp > 1 else []),
        *plan_lines(plan, args.context, args.tpot_ms / 1000, units),
    ]
    report: dict[str, Any] = {"tokens": plan.tokens, "reserved": plan.concurrency(args.context), "fits": plan.fits}
    if not plan.fits:
        return text, report
    sizes = lengths(args.prompt_lengths, args.output_lengths, args.context, args.seed)
    risk = overflow(plan.tokens, sizes, args.page, args.seed)
    safe = risk.concurrency(args.risk)
    tpot = plan.tpot(max(1, safe), int(risk.mean_context))
    prompt, output = (sum(counts) / len(counts) for counts in (sizes.prompt, sizes.output))
    prefill = replace(line, split=plan.split).prefill_seconds(round(prompt), args.compute_share)
    rate = args.replicas * safe / (output * tpot + safe * prefill)
    report |= {"mean_context": risk.mean_context, "median_context": risk.median_context, "concurrency": safe,
               "risk": args.risk, "tpot_seconds": tpot, "replicas": args.replicas, "cards": args.replicas * plan.cards,
               "requests_per_second": rate, "tokens_per_second": rate * output}  # fmt: skip
    text += [
        f"lengths: {sizes.text}; live context of a running request: mean {risk.mean_context:.0f}, median "
        f"{risk.median_context:.0f} tokens (requests seen in proportion to their running time)",
        f"with the maximum reserved {plan.concurrency(args.context)} requests; if all had the mean "
        f"{plan.tokens / risk.mean_context:.1f}, if all had the median {plan.tokens / risk.median_context:.1f}",
        f"P(overflow) <= {args.risk:.1%}: {safe} requests; TPOT there about {report['tpot_seconds'] * 1000:.1f} ms",
        "P(overflow) by running requests: " + ", ".join(
            f"{count}: {risk.probability[count - 1]:.1%}"
            for count in sorted({max(1, round(safe * f)) for f in (0.9, 1.0, 1.05, 1.1, 1.2)})
            if count <= len(risk.probability)),
        f"a step reads more KV than weights from {kv_read_crossover(model):,} tokens on",
        f"{args.replicas} replica(s) on {args.replicas * plan.cards} card(s): {args.replicas * safe} requests, "
        f"{rate:.3g} requests/s of {prompt:.0f} tokens in and {output:.0f} out = {rate * output:.4g} tokens/s, prefill "
        f"({prefill * 1000:.1f} ms a prompt at {args.compute_share:.0%} of peak compute) taken from decoding",
        *([f"ASSUMED OF REPLICAS: {REUSE}"] if args.replicas > 1 else []),
    ]  # fmt: skip
    return text, report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.capacity", description=__doc__)
    parser.add_argument("--exercise", action="store_true", help="answer the capacity exercise and stop")
    add_hardware_arguments(parser)
    parser.add_argument("--utilisation", type=share, default=0.9, help="share of memory the server may use")
    parser.add_argument("--overhead-gb", type=at_least(0), default=3.0, help="activations and runtime per card, GB")
    parser.add_argument("--bandwidth-share", type=share, default=0.7, help="share of peak bandwidth reached")
    parser.add_argument("--compute-share", type=share, default=0.6, help="share of peak compute in prefill")
    parser.add_argument("--pp", type=positive, default=1, help="pipeline stages of a replica (default: 1)")
    parser.add_argument("--cards-per-node", type=positive, default=8)
    parser.add_argument("--context", type=positive, default=8192, help="most tokens of a request, prompt and "
                        "output together (default: 8192)")  # fmt: skip
    parser.add_argument("--prompt-lengths", default="lognormal:1000:1.0", help="constant:N, uniform:LOW:HIGH, "
                        "lognormal:MEDIAN:SIGMA or exponential:MEAN (default: lognormal:1000:1.0)")  # fmt: skip
    parser.add_argument("--output-lengths", default="lognormal:300:0.8", help="as --prompt-lengths")
    parser.add_argument("--risk", type=at_least(0, 1), default=0.01, help="accepted P(overflow) (default: 0.01)")
    parser.add_argument("--page", type=positive, default=32, help="tokens in a KV page (default: 32)")
    parser.add_argument("--tpot-ms", type=at_least(0.001), default=40.0, help="TPOT target in ms (default: 40)")
    parser.add_argument("--seed", type=not_negative, default=0)
    args = parser.parse_args(argv)
    units = Units(args.gib)
    if args.exercise:
        text = [*exercise_one(units), "", *exercise_two(units)]
        report: dict[str, Any] = {"exercise": text}
    else:
        try:
            text, report = plan_for(args, units)
        except (ValueError, OSError) as fault:
            parser.error(str(fault))
    print("\n".join(text))
    if args.json:
        write_report(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
