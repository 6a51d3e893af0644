"""The predictor's options on the server's side: its limits, its memory, and the time of its host.

What is not given is what the server itself would choose on that card, or on a CPU (``--cpu``). It computes no
prediction.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from eval.options import at_least, not_negative, positive, share
from eval.serving_model import HOST_SOURCE, Host
from serve.config import ServeConfig
from serve.engine.build import CPU_KV_MIB
from serve.engine.memory import RESERVE
from serve.engine.prepare import BATCH_TOKENS, PROMPT_ROWS, kind_of_card

SERVER_SHARE = 1 - RESERVE
"""Part of a card's memory that the server fills."""
SERVER_OTHER = 3.7e9
"""Bytes of it that are neither weights nor pages: 0.5 GiB of the driver, 2.1 of CUDA graphs, 0.8 of activations, as the
server's log said on one H200 with the shapes of Qwen3-4B and no drafter, 2026-11-30."""
CPU_STEP_MS = 2.0
"""Milliseconds of a step on a CPU beyond its arithmetic, where engine, API process and clients share two cores: fitted
to one stream of a sweep of the default model, 2026-11-30."""


@dataclass(frozen=True)
class ServerSide:
    """What the options come to. ``kv_memory``: bytes of pages, 0 for what the card leaves; ``overhead``: seconds added
    to every step."""

    host: Host
    overhead: float
    batch_tokens: int
    most: int
    kv_memory: int


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Limits, memory and host times of the server."""
    parser.add_argument("--utilisation", type=share, default=SERVER_SHARE, help="share of memory the server may use")
    parser.add_argument(
        "--reserve-gb",
        type=at_least(0),
        default=SERVER_OTHER / 1e9,
        help="driver, graphs, activations, drafter, GB (default: %(default)g)",
    )
    parser.add_argument("--page", type=positive, default=32, help="tokens in a KV page (default: 32)")
    group = parser.add_argument_group("the server", f"defaults as the server's own; {HOST_SOURCE}")
    group.add_argument("--cpu", action="store_true", help="it runs on a CPU, described by --custom-card")
    group.add_argument("--batch-tokens", type=positive, help="rows of a step at most (default: the server's)")
    group.add_argument(
        "--max-num-seqs",
        type=positive,
        default=ServeConfig.max_num_seqs,
        help="sequences of a step at most (default: %(default)s)",
    )
    group.add_argument(
        "--kv-memory-mib",
        type=positive,
        help=f"memory for pages (default: what a card has left, {CPU_KV_MIB} on a CPU)",
    )
    group.add_argument("--overhead-ms", type=at_least(0), help=f"added to every step (default: 0; CPU {CPU_STEP_MS:g})")
    group.add_argument(
        "--prompt-pass-ms",
        type=at_least(0),
        help="least time of a step with prompt rows, in which the host starts its kernels "
        f"(default: {Host.prompt_pass * 1e3:g}; CPU 0)",
    )
    group.add_argument(
        "--graph-rows",
        type=not_negative,
        help="prompt rows up to which such a step is a graph, and takes its kernels' time only (default: the server's)",
    )
    group.add_argument(
        "--request-ms",
        type=at_least(0),
        default=Host.request * 1e3,
        help="of the API process a request (default: %(default)g)",
    )
    group.add_argument(
        "--event-us",
        type=at_least(0),
        default=Host.event * 1e6,
        help="of the API process an event, or of a slower client (default: %(default)g)",
    )
    group.add_argument(
        "--delay-ms",
        type=at_least(0),
        help=f"of a request on its way to the engine and back (default: {Host.delay * 1e3:g}; CPU 0)",
    )
    group.add_argument("--seconds", type=at_least(0.1), default=180.0, help="length of a point (default: 180)")


def server_side(args: argparse.Namespace, memory: float, parameters: int) -> ServerSide:
    """The options with the server's own choices filled in for a device of ``memory`` bytes and a model with so many
    parameters in its layers; ValueError names the option that does not fit."""
    if args.cpu and not args.custom_card:
        raise ValueError("--cpu needs --custom-card NAME:MEMORY_GB:BANDWIDTH_GBS:TFLOPS: no CPU is in data/cards.json")
    kind = "cpu" if args.cpu else kind_of_card(int(memory), parameters)
    usual = (CPU_STEP_MS, 0.0, 0.0) if args.cpu else (0.0, Host.prompt_pass * 1e3, Host.delay * 1e3)
    given = (args.overhead_ms, args.prompt_pass_ms, args.delay_ms)
    overhead, launch, delay = (own if said is None else said for own, said in zip(usual, given, strict=True))
    dense = args.weights in ("fp16", "bf16") and args.weights_map is None and args.tp == 1 and not args.cpu
    graph_rows = args.graph_rows if args.graph_rows is not None else PROMPT_ROWS if dense else 0
    return ServerSide(
        host=Host(launch / 1e3, 0.0, args.request_ms / 1e3, args.event_us / 1e6, graph_rows, delay / 1e3),
        overhead=overhead / 1e3,
        batch_tokens=args.batch_tokens or max(BATCH_TOKENS[kind], args.max_num_seqs),
        most=args.max_num_seqs,
        kv_memory=(args.kv_memory_mib or (CPU_KV_MIB if args.cpu else 0)) << 20,
    )
