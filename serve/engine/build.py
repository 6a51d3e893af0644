"""From settings to a ready engine: loads the target and the drafter, sizes the KV pool, measures what a step costs.

Everything that can be wrong with a folder or a setting is found here, before the first request, as a StartError with
one clear sentence. This file does not know processes or HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serve.config import ServeConfig, readable_path
from serve.cores import usable_cores
from serve.drafter.base import DraftRequest
from serve.drafter.block import BlockDrafter
from serve.drafter.prompt_lookup import PromptLookup
from serve.engine.costs import graph_costs, measure_costs
from serve.engine.engine import Engine
from serve.engine.memory import MemorySpent
from serve.engine.pages import PagePool
from serve.engine.prepare import (
    SCRATCH_PAGES,
    drafter_class,
    graph_maker,
    least_chunk,
    rehearse,
    scored_rows,
    step_tokens,
    steps_ahead,
)
from serve.engine.runner import ModelRunner
from serve.engine.scheduler import Scheduler
from serve.engine.trace import TraceWriter
from serve.json_file import read_object
from serve.model.config import ModelConfig, ModelError, load_model_config
from serve.model.loader import Storage, load_target
from serve.model.target import TargetModel
from serve.parallel.group import RankGroup
from serve.parallel.ranks import RankProcesses, Ranks
from serve.parallel.split import Split
from serve.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from verify.block_length import BlockLengthController
from verify.estimates import AcceptancePrior

LOOKUP_BLOCK_LENGTH = 15
"""Longest draft of prompt lookup; a block drafter has its own block size."""
CPU_KV_MIB = 768


log = logging.getLogger(__name__)


class StartError(Exception):
    """The server cannot start; the message says why in one sentence."""


@dataclass(frozen=True)
class Ready:
    """What a rank runs passes with, and the sizes it was made for."""

    runner: ModelRunner
    num_pages: int
    max_model_len: int


def build_engine(config: ServeConfig, on_lost: Callable[[str], None] | None = None) -> tuple[Engine, dict[str, Any]]:
    """A ready engine and the facts about it (for the ready line, /version and the metrics). Raises StartError.

    on_lost: called with a reason from another thread when a rank ends before this process does."""
    device = rank_device(config, 0)
    if config.tensor_parallel == 1:
        return build_on(Ranks(), config, device)
    try:
        Split(load_model_config(Path(config.model_dir)), 0, config.tensor_parallel)
    except ModelError as error:
        raise StartError(str(error)) from error
    processes = RankProcesses(config, on_lost)
    try:
        return build_on(processes.ready(device), config, device)
    except (StartError, OSError, ValueError):
        processes.close()
        raise
    except Exception as error:
        reason = processes.reason()
        processes.close()
        raise StartError(reason or f"{type(error).__name__}: {error}") from error


def rank_device(config: ServeConfig, rank: int) -> torch.device:
    """The device of a rank, made the current one; on a CPU every rank has its share of the cores. Raises StartError."""
    ranks = config.tensor_parallel
    device = _device(config)
    torch.set_num_threads(config.threads or max(1, usable_cores() // ranks))
    if device.type == "cpu" or ranks == 1:
        return device
    if ranks > torch.cuda.device_count():
        raise StartError(f"--tensor-parallel {ranks}: this machine has {torch.cuda.device_count()} CUDA devices")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def load_models(
    config: ServeConfig, device: torch.device, group: RankGroup, spent: MemorySpent, warnings: list[str]
) -> tuple[TargetModel, BlockDrafter | None]:
    """This rank's part of the target, and the whole drafter if there is one. Raises StartError."""
    try:
        int8_kv = config.kv_cache_dtype == "int8"
        folder = Path(config.model_dir)
        storage = Storage(
            config.weights,
            Path(config.weights_map) if config.weights_map else None,
            Path(config.weights_cache) if config.weights_cache else None,
            config.prefill,
        )
        model = load_target(folder, device=device, int8_kv=int8_kv, group=group, storage=storage)
    except ModelError as error:
        raise StartError(str(error)) from error
    spent.note_weights(model.copies_bytes)
    drafter = _load_drafter(config, model, warnings)
    if drafter is not None:
        spent.note("drafter")
    return model, drafter


def start_rank(config: ServeConfig, device: torch.device, group: RankGroup) -> tuple[TargetModel, Ready]:
    """All that a rank which follows needs, by the same steps as on rank 0. Raises StartError."""
    spent = MemorySpent(device)
    model, drafter = load_models(config, device, group, spent, [])
    return model, make_runner(config, model, drafter, spent)


def build_on(ranks: Ranks, config: ServeConfig, device: torch.device) -> tuple[Engine, dict[str, Any]]:
    """``build_engine`` on rank 0 of ranks that have met."""
    started = time.monotonic()
    folder = Path(config.model_dir)
    try:
        model_config = load_model_config(folder)
        tokenizer = load_tokenizer(folder)
    except (ModelError, TokenizerError) as error:
        raise StartError(str(error)) from error
    if tokenizer.vocab_size > model_config.vocab_size:
        raise StartError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary only {model_config.vocab_size}"
        )
    spent = MemorySpent(device)
    warnings: list[str] = []
    model, drafter = load_models(config, device, ranks.group, spent, warnings)
    loaded = time.monotonic()
    engine = assemble(config, model, tokenizer, drafter, spent, warnings, ranks)
    log.info("%s", spent.describe())
    info = {
        "model_dir": readable_path(str(folder)),
        "max_model_len": engine.max_model_len,
        "kv_pages": engine.scheduler.pool.num_pages,
        "page_size": config.page_size,
        "vocab_size": model_config.vocab_size,
        "weights": model.weights,
        "kernel_path": model.kernel_path,
        "kernels": f"{device.type}-{model.kernels}-{model.weights}",
        "proposer": _proposer_name(engine.lookup, drafter),
        "drafter": readable_path(drafter.description) if drafter is not None else None,
        "block_length_max": engine.controller.max_length,
        "device": str(device),
        "tensor_parallel": ranks.group.size,
        "memory": spent.to_json(),
        "warnings": warnings,
        "costs": engine.controller.costs.to_json(),
        "tokenizer": tokenizer.fingerprint,
        "load_seconds": round(loaded - started, 2),
        "prepare_seconds": round(time.monotonic() - loaded, 2),
    }
    return engine, info


def assemble(
    config: ServeConfig,
    model: TargetModel,
    tokenizer: Tokenizer,
    drafter: BlockDrafter | None,
    spent: MemorySpent,
    warnings: list[str],
    ranks: Ranks | None = None,
) -> Engine:
    """The engine around a loaded model: sizes the pages, captures graphs where the model has them, measures costs.
    ranks: those that share the model, each about to do the same up to the costs."""
    ready = make_runner(config, model, drafter, spent)
    runner = ready.runner
    lookup = _lookup(config)
    block_length_max = _block_length_max(config, lookup, drafter)
    draft_size = drafter.block_size if drafter is not None else 0
    _mirror(runner, drafter, ranks or Ranks())
    if runner.ahead is not None:
        costs = graph_costs(runner.ahead.graphs)
    else:
        costs = measure_costs(runner, drafter, ready.num_pages * config.page_size)
    controller = BlockLengthController(
        costs,
        block_length_max,
        prior=_prior(config, warnings) if drafter is not None else None,
        fixed=config.block_length if config.block_length >= 0 else None,
    )
    scheduler = Scheduler(
        PagePool(ready.num_pages, config.page_size, reuse=config.prefix_cache),
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=step_tokens(config, model),
        lookahead=max(block_length_max, draft_size),
        least_chunk=least_chunk(model),
        max_scored_rows=scored_rows(model),
    )
    return Engine(
        runner,
        scheduler,
        controller,
        tokenizer,
        lookup=lookup,
        block=drafter,
        max_model_len=ready.max_model_len,
        trace=TraceWriter(config.trace_dir),
    )


def _mirror(runner: ModelRunner, drafter: BlockDrafter | None, ranks: Ranks) -> None:
    """From here on the other ranks run what is run here."""
    runner.mirror = ranks.mirror
    if drafter is not None:
        drafter.mirror = ranks.mirror
    if runner.ahead is not None:
        runner.ahead.graphs.mirror = ranks.mirror


def make_runner(config: ServeConfig, model: TargetModel, drafter: BlockDrafter | None, spent: MemorySpent) -> Ready:
    """Sizes the pages, as many on every rank, and captures graphs where the model has them. Raises StartError."""
    max_batch_tokens = step_tokens(config, model)
    block_length_max = _block_length_max(config, _lookup(config), drafter)
    page_bytes = model.kv_bytes_per_page(config.page_size)
    if drafter is not None:
        page_bytes += drafter.kv_bytes_per_page(config.page_size)
    graphs = graph_maker(config, model, drafter, block_length_max)
    if model.device.type == "cuda":
        try:
            rehearse(config, model, drafter, graphs, max_batch_tokens, spent)
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"the card has no room for a step of {max_batch_tokens} tokens beside the weights; "
                f"lower --max-batch-tokens or choose smaller --weights ({str(error)[:200]})"
            ) from error
    num_pages = model.group.least(_num_pages(config, model, page_bytes, spent), model.device)
    max_model_len = _max_model_len(config, model.config, num_pages)
    scratch = SCRATCH_PAGES if graphs is not None else 0
    cache = model.allocate_cache(num_pages + scratch, config.page_size)
    if drafter is not None:
        drafter.allocate_cache(num_pages + scratch, config.page_size)
    spent.note("pages", f"{num_pages} pages of {config.page_size} tokens, {page_bytes} bytes each")
    ahead = None
    if graphs is not None:
        captured = graphs(cache, max_model_len)
        count = captured.capture()
        spent.note("graphs", f"{count} graphs, up to {captured.sizes.rows[-1]} rows")
        ahead = steps_ahead(captured)
    return Ready(ModelRunner(model, cache, config.page_size, drafter, ahead), num_pages, max_model_len)


def _lookup(config: ServeConfig) -> PromptLookup | None:
    return PromptLookup() if config.lookup and config.proposer != "none" else None


def _device(config: ServeConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise StartError("--device cuda: no CUDA device is available")
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if use_cuda else "cpu")


def _load_drafter(config: ServeConfig, model: TargetModel, warnings: list[str]) -> BlockDrafter | None:
    """The block drafter, if one is wanted. One that does not fit stops the start, unless the contract forbids that."""
    if config.drafter_dir is None or config.proposer in ("none", "lookup"):
        return None
    try:
        drafter = drafter_class(model).load(Path(config.drafter_dir), model, config.frequent_tokens)
        _try_drafter(drafter, config.page_size)
        return drafter
    except Exception as error:  # whatever a folder from outside does to the loader, the contract is to serve
        if not config.drafter_optional:
            raise StartError(f"drafter {config.drafter_dir}: {error}") from error
        line = f"serving WITHOUT the drafter in {config.drafter_dir}: {error}"
        warnings.append(line)
        return None


def _try_drafter(drafter: BlockDrafter, page_size: int) -> None:
    """One draft on a few pages of its own: weights that are NaN have a good shape, and raise RuntimeError here."""
    pages = tuple(range(-(-(drafter.block_size + 2) // page_size)))
    drafter.allocate_cache(len(pages), page_size)
    drafter.propose([DraftRequest("trial", [0, 0], drafter.block_size - 1, pages)])


def _proposer_name(lookup: PromptLookup | None, drafter: BlockDrafter | None) -> str:
    return "+".join(proposer.name for proposer in (lookup, drafter) if proposer is not None) or "none"


def _block_length_max(config: ServeConfig, lookup: PromptLookup | None, drafter: BlockDrafter | None) -> int:
    longest = max(
        LOOKUP_BLOCK_LENGTH if lookup is not None else 0,
        drafter.block_size - 1 if drafter is not None else 0,
    )
    return longest if config.block_length < 0 else min(longest, config.block_length)


def _num_pages(config: ServeConfig, model: TargetModel, page_bytes: int, spent: MemorySpent) -> int:
    """Pages that the KV memory holds, the drafter's share included."""
    if config.kv_memory_mib:
        budget = config.kv_memory_mib << 20
    elif model.device.type == "cuda":
        budget = spent.room()
    else:
        budget = CPU_KV_MIB << 20
    if budget < page_bytes:
        raise StartError(
            f"--kv-memory-mib {budget >> 20} does not hold one page of {page_bytes} bytes; give at least "
            f"{-(-page_bytes >> 20) + 1}"
        )
    # More pages than every sequence at full context could use are memory for nothing.
    enough = config.max_num_seqs * -(-model.config.max_position_embeddings // config.page_size)
    return min(budget // page_bytes, enough)


def _max_model_len(config: ServeConfig, model_config: ModelConfig, num_pages: int) -> int:
    pool = num_pages * config.page_size
    limit = model_config.max_position_embeddings
    if config.max_model_len > limit:
        raise StartError(f"--max-model-len {config.max_model_len} exceeds the model's {limit} positions")
    if config.max_model_len > pool:
        raise StartError(
            f"--max-model-len {config.max_model_len} does not fit the KV pool of {pool} tokens; "
            "lower it or raise --kv-memory-mib"
        )
    return config.max_model_len or min(limit, pool)


def _prior(config: ServeConfig, warnings: list[str]) -> AcceptancePrior | None:
    """Acceptance expected from the drafter, from the evaluation file that training wrote beside it."""
    path = Path(config.drafter_dir or "") / "drafter_eval.json"
    try:
        data = read_object(path)
        return None if data is None else AcceptancePrior.from_eval(data)
    except ValueError as error:
        line = f"{path} is not usable as acceptance prior: {error}"
        warnings.append(line)
        return None
