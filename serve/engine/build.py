"""From settings to a ready engine: loads the target and the drafter, sizes the KV pool, measures what a step costs.

Everything that can be wrong with a folder or a setting is found here, before the first request, as a StartError with
one clear sentence. This file does not know processes or HTTP.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from serve.config import ServeConfig
from serve.drafter.base import DraftRequest
from serve.drafter.block import BlockDrafter
from serve.drafter.checkpoint import DrafterError
from serve.drafter.prompt_lookup import PromptLookup
from serve.engine.engine import Engine
from serve.engine.pages import PagePool
from serve.engine.runner import ModelRunner
from serve.engine.scheduler import Scheduler
from serve.engine.trace import TraceWriter
from serve.model.batch import FlatBatch
from serve.model.config import ModelConfig, ModelError, load_model_config
from serve.model.loader import load_target
from serve.model.target import TargetModel
from serve.tokenizer import TokenizerError, load_tokenizer
from verify.block_length import BlockLengthController
from verify.costs import CostTable
from verify.estimates import AcceptancePrior

LOOKUP_BLOCK_LENGTH = 15
"""Longest draft of prompt lookup; a block drafter has its own block size."""
CPU_KV_MIB = 768
BATCH_TOKENS = {"cpu": 256, "cuda": 8192}
"""Rows of a step where --max-batch-tokens does not say."""
SCRATCH_PAGES = 1
COST_ROWS = (1, 2, 4, 8, 16, 32)
COST_SEQUENCES = (1, 4, 16)
COST_REPEATS = 3
COST_SECONDS = 3.0
"""Time after which every cost is taken from a single run."""
COST_CONTEXT = 64


class StartError(Exception):
    """The server cannot start; the message says why in one sentence."""


def build_engine(config: ServeConfig) -> tuple[Engine, dict[str, Any]]:
    """A ready engine and the facts about it (for the ready line, /version and the metrics). Raises StartError."""
    started = time.monotonic()
    device = _device(config)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    folder = Path(config.model_dir)
    try:
        model_config = load_model_config(folder)
        tokenizer = load_tokenizer(folder)
        model = load_target(folder, device=device, weights=config.weights)
    except (ModelError, TokenizerError) as error:
        raise StartError(str(error)) from error
    if tokenizer.vocab_size > model_config.vocab_size:
        raise StartError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary only {model_config.vocab_size}"
        )
    loaded = time.monotonic()
    spent = MemorySpent(device)
    spent.note("weights")
    warnings: list[str] = []
    drafter = _load_drafter(config, model, warnings)
    if drafter is not None:
        spent.note("drafter")
    engine = assemble(config, model, tokenizer, drafter, spent, warnings)
    log.info("%s", spent.describe())
    info = {
        "model_dir": str(folder),
        "max_model_len": engine.max_model_len,
        "kv_pages": engine.scheduler.pool.num_pages,
        "page_size": config.page_size,
        "vocab_size": model_config.vocab_size,
        "weights": model.weights,
        "kernel_path": model.kernel_path,
        "proposer": _proposer_name(engine.lookup, drafter),
        "drafter": drafter.description if drafter is not None else None,
        "block_length_max": engine.controller.max_length,
        "device": str(device),
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
) -> Engine:
    """The engine around a loaded model: sizes the pages, captures graphs where the model has them, measures costs."""
    max_batch_tokens = config.max_batch_tokens or BATCH_TOKENS[model.device.type]
    lookup = PromptLookup() if config.lookup and config.proposer != "none" else None
    block_length_max = _block_length_max(config, lookup, drafter)
    draft_size = drafter.block_size if drafter is not None else 0
    lookahead = max(block_length_max, draft_size)
    page_bytes = model.kv_bytes_per_page(config.page_size)
    if drafter is not None:
        page_bytes += drafter.kv_bytes_per_page(config.page_size)
    graphs = graph_maker(config, model, drafter, block_length_max)
    if model.device.type == "cuda":
        _rehearse(config, model, drafter, graphs, max_batch_tokens, spent)
    num_pages = _num_pages(config, model, page_bytes, spent)
    max_model_len = _max_model_len(config, model.config, num_pages)
    # The last page belongs to nobody: padding rows of graphs write there.
    cache = model.allocate_cache(num_pages + SCRATCH_PAGES, config.page_size)
    if drafter is not None:
        drafter.allocate_cache(num_pages + SCRATCH_PAGES, config.page_size)
    spent.note("pages", f"{num_pages} pages of {config.page_size} tokens, {page_bytes} bytes each")
    ahead = None
    if graphs is not None:
        captured = graphs(cache, max_model_len)
        count = captured.capture()
        spent.note("graphs", f"{count} graphs, up to {captured.row_buckets[-1]} rows")
        ahead = _ahead(captured)
    runner = ModelRunner(model, cache, config.page_size, drafter, ahead)
    costs = measure_costs(runner, drafter, num_pages * config.page_size)
    controller = BlockLengthController(
        costs,
        block_length_max,
        prior=_prior(config, warnings) if drafter is not None else None,
        fixed=config.block_length if config.block_length >= 0 else None,
    )
    scheduler = Scheduler(
        PagePool(num_pages, config.page_size, reuse=config.prefix_cache),
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        lookahead=lookahead,
    )
    return Engine(
        runner,
        scheduler,
        controller,
        tokenizer,
        lookup=lookup,
        block=drafter,
        max_model_len=max_model_len,
        trace=TraceWriter(config.trace_dir),
    )


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
        return drafter_class(model).load(Path(config.drafter_dir), model)
    except (DrafterError, OSError) as error:
        if not config.drafter_optional:
            raise StartError(f"drafter {config.drafter_dir}: {error}") from error
        line = f"serving WITHOUT the drafter in {config.drafter_dir}: {error}"
        warnings.append(line)
        return None


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
        return AcceptancePrior.from_eval(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        line = f"{path} is not usable as acceptance prior: {error}"
        warnings.append(line)
        return None


def measure_costs(runner: ModelRunner, drafter: BlockDrafter | None, pool_tokens: int) -> CostTable:
    """Seconds of a verify pass by rows and of a draft pass by sequences, each the best of a few runs on free pages.

    The pages written here belong to nobody; nothing that a request can see depends on their contents. Other work on the
    machine makes single figures absurd, so no count is believed to cost more, per unit of work, than a smaller one.
    """
    context = min(COST_CONTEXT, pool_tokens // 2)
    deadline = time.perf_counter() + COST_SECONDS

    def verify(rows: int) -> float:
        batch = _probe_batch(runner, context, rows)
        return _best_seconds(lambda: runner.forward_batch(batch), deadline)

    verify_points = {rows: verify(rows) for rows in COST_ROWS if context + rows <= pool_tokens}
    draft_points: dict[int, float] = {}
    if drafter is not None and context + drafter.block_size <= pool_tokens:
        longest = drafter.block_size - 1
        pages = tuple(range(runner.pages_for(context + drafter.block_size)))

        def draft(count: int) -> float:
            requests = [DraftRequest(str(i), [0] * (context + 1), longest, pages) for i in range(count)]
            return _best_seconds(lambda: drafter.propose(requests), deadline)

        draft_points = {count: draft(count) for count in COST_SEQUENCES}
    return CostTable(_at_most_proportional(verify_points), _at_most_proportional(draft_points))


def _best_seconds(run: Callable[[], object], deadline: float) -> float:
    """Best of COST_REPEATS timed runs after one for warming up; once past ``deadline`` the first run has to do."""
    best = float("inf")
    for attempt in range(1 + COST_REPEATS):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ended = time.perf_counter()
        if attempt or ended > deadline:
            best = min(best, ended - started)
        if ended > deadline:
            break
    return best


def _at_most_proportional(points: dict[int, float]) -> dict[int, float]:
    """Each cost cut to what the cheapest smaller count would give in proportion."""
    cut: dict[int, float] = {}
    for count in sorted(points):
        cut[count] = min([points[count], *(seconds * count / smaller for smaller, seconds in cut.items())])
    return cut


def _probe_batch(runner: ModelRunner, context: int, rows: int) -> FlatBatch:
    """``rows`` rows of one sequence after ``context`` positions, on the first pages of the pool."""
    device = runner.model.device
    positions = torch.arange(context, context + rows, device=device)
    pages = tuple(range(runner.pages_for(context + rows)))
    return FlatBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=positions,
        slots=positions.clone(),
        visible=positions + 1,
        query_starts=(0, rows),
        page_tables=(pages,),
        logit_rows=torch.arange(rows, device=device),
    )
