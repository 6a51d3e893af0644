"""One rank of the bench over several cards: ``python -m eval.device_tp_rank``, started by device_tp for each of them.

A rank makes its part of a model whose weights are random but the same at every split, so that a split model writes what
the whole one writes. Rank 0 measures an engine, which the others follow as they do in the server; then all of them run
the same prompts side by side. Rank 0 writes what it found as JSON. This file knows no report and no other process.
"""

from __future__ import annotations

import argparse
import gc
import socket
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval import device_bits
from eval.device_engine import decode, device_ms, engine_config, engine_of, lanes_at, wrong_drafter
from eval.json_report import write_report
from scripts.kernel_timing import read_bandwidth
from serve.drafter.triton_block import TritonBlockDrafter
from serve.engine.build import make_runner
from serve.engine.engine import Engine
from serve.engine.memory import MemorySpent
from serve.engine.runner import ModelRunner
from serve.kernels.triton.linear import TritonLinearBuilder
from serve.model.config import ModelConfig, load_model_config
from serve.model.reader import WeightReader
from serve.model.target import TargetSettings
from serve.model.triton_layers import TritonTargetModel
from serve.model.weights_map import WeightsMap
from serve.parallel.follower import follower_of
from serve.parallel.group import ALONE, RankGroup
from serve.parallel.leader import Leader
from serve.parallel.mirror import NO_MIRROR
from serve.parallel.ranks import Ranks, join, meeting
from serve.parallel.split import Part, Split

CONTEXT = 1024
STREAMS = (1, 8, 32)
BLOCK_ROWS = 16
LONG_PROMPT = 4096
DRAFTER_LAYERS = 5
EXCHANGES = 64
"""In one graph, so that the time of one is that of a stream of them."""


class RandomCheckpoint:
    """Random bf16 tensors on ``device``, each by its name, whatever part of it is asked for; vectors are ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        if len(shape) == 1:
            tensor = torch.ones(shape, device=self._device, dtype=torch.bfloat16)
        else:
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
            tensor = torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
            tensor *= shape[1] ** -0.5
        return tensor if part is None else tensor.narrow(part.axis, part.start, part.count).contiguous()

    def untaken(self) -> list[str]:
        return []


@dataclass(frozen=True)
class Place:
    """Where a rank stands. sockets: to the other ranks of each engine in turn, or from rank 0."""

    group: RankGroup
    device: torch.device
    weights: str
    tokenizer_dir: Path
    sockets: Sequence[socket.socket] = ()

    def model(self, config: ModelConfig) -> TritonTargetModel:
        split = Split(config, self.group.rank, self.group.size)
        builder = TritonLinearBuilder(self.weights, self.device)
        source: Any = RandomCheckpoint(self.device)
        with torch.inference_mode():
            weights = WeightReader(source, split, builder, WeightsMap(self.weights)).read()
            settings = TargetSettings(
                self.weights, self.device, builder.activation_dtype, builder.describe(), group=self.group
            )
            return TritonTargetModel(split.local, weights, settings)

    def lead_or_follow(
        self,
        engine_number: int,
        model: TritonTargetModel,
        drafter: TritonBlockDrafter | None,
        streams: int,
        work: Callable[[Engine], None],
    ) -> ModelRunner:
        """Rank 0 does ``work`` with an engine that the others follow; on every rank, what passes then run with."""
        if self.group.rank:
            config = engine_config(model, self.tokenizer_dir, drafter, streams)
            runner = make_runner(config, model, drafter, MemorySpent(self.device)).runner
            follower_of(runner).run(self.sockets[engine_number])
            return runner
        told = [self.sockets[engine_number]] if self.group.size > 1 else []
        ranks = Ranks(self.group, Leader(told, lambda: None)) if told else Ranks()
        engine = engine_of(model, self.tokenizer_dir, drafter, streams, ranks)
        work(engine)
        for sock in told:
            sock.close()
        engine.runner.mirror = NO_MIRROR
        return engine.runner


def model_times(place: Place, config: ModelConfig) -> dict[str, Any]:
    """Milliseconds of steps, a verify, a round and a prompt, by the names of the predictions; what the clock says of
    decoding; and whether bits are as they should be."""
    found: dict[str, Any] = {"tp": place.group.size}
    model = place.model(config)
    found["weight_gib"] = model.head_bytes / 2**30 + sum(m.nbytes for m in model.stack.dense_matrices()) / 2**30

    def plain(engine: Engine) -> None:
        graphs = _graphs(engine)
        for streams in STREAMS:
            found[f"{streams}x1"] = device_ms(graphs, lanes_at(graphs, streams, 1, CONTEXT))[1]
        found[f"1x{BLOCK_ROWS}"] = device_ms(graphs, lanes_at(graphs, 1, BLOCK_ROWS, CONTEXT))[1]
        for streams in (STREAMS[0], STREAMS[-1]):
            found[f"clock {streams}x1"] = decode(engine, streams, 60, CONTEXT).step_ms

    runner = place.lead_or_follow(0, model, None, STREAMS[-1], plain)
    together(place, model, runner, found)
    del runner
    _free(place.device)
    drafter = wrong_drafter(model, config)

    def speculative(engine: Engine) -> None:
        graphs = _graphs(engine)
        draft, rest = device_ms(graphs, lanes_at(graphs, 1, BLOCK_ROWS, CONTEXT, drafted=True))
        found["draft of a whole drafter"] = draft
        found["whole draft"] = draft + rest

    place.lead_or_follow(1, model, drafter, 1, speculative)
    return found


def together(place: Place, model: TritonTargetModel, runner: ModelRunner, found: dict[str, Any]) -> None:
    """What all ranks run side by side, with nobody telling: a long prompt, and the bits of prompts."""
    cache, group = runner.cache, place.group
    prompts = [[(17 * i) % 30_000 + 1000 for i in range(LONG_PROMPT)]]
    times = []
    for _ in range(5):
        group.least(0, place.device)
        started = time.perf_counter()
        logits = device_bits.run_whole(model, cache, prompts)
        _wait(place.device)
        times.append((time.perf_counter() - started) * 1e3)
    found["prompt 4096"] = sorted(times)[len(times) // 2]
    rows = group.gathered(logits) if group.size > 1 else logits[None]
    found["ranks with the same bits"] = all(torch.equal(row, rows[0]) for row in rows)
    company = device_bits.prompts(8)
    found["prompts with their own bits"] = device_bits.equal_prompts(model, cache, company)
    ids = device_bits.run_whole(model, cache, company).argmax(-1)
    found["first ids"] = ids.tolist()


def drafter_times(place: Place, config: ModelConfig) -> dict[str, Any]:
    """Milliseconds of a drafter's pass of BLOCK_ROWS rows if its layers were split like the target's: that of a target
    with as many layers."""
    found: dict[str, Any] = {}
    model = place.model(replace(config, num_layers=DRAFTER_LAYERS))

    def steps(engine: Engine) -> None:
        graphs = _graphs(engine)
        found["draft of a split drafter"] = device_ms(graphs, lanes_at(graphs, 1, BLOCK_ROWS, CONTEXT))[1]

    place.lead_or_follow(0, model, None, BLOCK_ROWS, steps)
    return found


def link_times(place: Place, config: ModelConfig) -> dict[str, Any]:
    """Microseconds of an exchange inside a CUDA graph: as steps of so many rows have it (float32, gathered), as prompts
    have it (16 bits, added by the library), and large ones; and the read bandwidth of this card."""
    found: dict[str, Any] = {"read_tb_s": read_bandwidth(place.device) / 1e12}
    group, hidden = place.group, config.hidden_size
    for rows in (1, 16, 32):
        parts = torch.randn(4, rows, hidden, device=place.device)
        found[f"step {rows}"] = _graph_us(place, lambda parts=parts: group.sum(parts))  # type: ignore[misc]
        own = parts[:1]
        found[f"gather {rows}"] = _graph_us(place, lambda own=own: group.sum(own))  # type: ignore[misc]
        short = parts[0].bfloat16()
        found[f"all-reduce {rows}"] = _graph_us(place, lambda short=short: group.sum(short))  # type: ignore[misc]
    ids = torch.zeros(16, dtype=torch.int64, device=place.device)
    found["best of 16"] = _graph_us(place, lambda: group.best(ids, ids.float(), 1000))
    for rows in (512, LONG_PROMPT):
        x = torch.randn(rows, hidden, device=place.device, dtype=torch.bfloat16)
        took = _graph_us(place, lambda x=x: group.sum(x))  # type: ignore[misc]
        found[f"all-reduce {rows}"] = took
        found[f"all-reduce {rows} GB/s"] = x.nbytes / took / 1e3
    return found


def _graph_us(place: Place, work: Callable[[], object], repeats: int = 7) -> float:
    """Microseconds of one ``work`` among EXCHANGES of them in a graph: the median of a few replays."""
    work()
    if place.device.type != "cuda":
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e6
    _wait(place.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(EXCHANGES):
            work()
    times = []
    for _ in range(repeats + 1):
        place.group.least(0, place.device)
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        graph.replay()
        events[0].record()
        graph.replay()
        events[1].record()
        _wait(place.device)
        times.append(events[0].elapsed_time(events[1]) * 1e3 / EXCHANGES)
    return float(sorted(times[1:])[repeats // 2])


PARTS: dict[str, Callable[[Place, ModelConfig], dict[str, Any]]] = {
    "model": model_times,
    "drafter": drafter_times,
    "link": link_times,
}


def _graphs(engine: Engine) -> Any:
    assert engine.runner.ahead is not None
    return engine.runner.ahead.graphs


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.device_tp_rank", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=tuple(PARTS), required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--model-dir", type=Path, required=True, help="folder with config.json and a tokenizer")
    parser.add_argument("--store", type=int, help="file descriptor through which ranks meet")
    parser.add_argument("--sockets", default="", help="file descriptors of sockets to the other rank, one an engine")
    parser.add_argument("--json", type=Path, required=True, help="where rank 0 writes what it found")
    options = parser.parse_args()
    device = torch.device(options.device, options.rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = ALONE
    if options.ranks > 1:
        group = join(options.rank, options.ranks, device, meeting(options.store, options.ranks))
    sockets = [socket.socket(fileno=int(number)) for number in options.sockets.split(",") if number]
    place = Place(group, device, options.weights, options.model_dir, sockets)
    found = PARTS[options.part](place, load_model_config(options.model_dir))
    if options.rank == 0:
        found["card"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        write_report(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
