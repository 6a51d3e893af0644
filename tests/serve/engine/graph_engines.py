"""Engines whose decoding goes through graphs: of real Triton models (in the interpreter on a CPU, or on a card) and of
hash models, which are quick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serve.config import ServeConfig
from serve.drafter.triton_block import TritonBlockDrafter
from serve.engine.ahead import StepsAhead
from serve.engine.build import assemble
from serve.engine.engine import Engine
from serve.engine.graphs import StepGraphs
from serve.engine.memory import MemorySpent
from serve.engine.pages import PagePool
from serve.engine.runner import ModelRunner
from serve.engine.scheduler import Scheduler
from serve.kernels.triton.step import append_rows_eager, prepare_rows_eager, settle_rows_eager
from serve.tokenizer import load_tokenizer
from tests.serve.engine.hash_model import HashDrafter, HashModel
from tests.serve.model.test_triton_layers import load_triton
from verify.block_length import BlockLengthController
from verify.costs import CostTable

CPU = torch.device("cpu")
PAGE = 16


def use_twins(patch: pytest.MonkeyPatch) -> None:
    """The step kernels' twins, a hundred times quicker than the interpreter (tests/serve/kernels compares)."""
    patch.setattr("serve.engine.step_buffers.prepare_rows", prepare_rows_eager)
    patch.setattr("serve.engine.graphs.settle_rows", settle_rows_eager)
    patch.setattr("serve.engine.context.append_rows", append_rows_eager)


def choose_in_every_step(patch: pytest.MonkeyPatch) -> None:
    """How long a choice or a search takes, here or on a busy machine, decides nothing: all sequences, every step."""
    patch.setattr("serve.engine.drafting.LONGEST_PAUSE", 0)
    patch.setattr("serve.engine.drafting.LONGEST_KEPT", 0)
    patch.setattr("serve.engine.copying.SEARCH_SHARE", 1e9)


def triton_engine(
    folder: Path,
    drafter_folder: Path | None = None,
    *,
    graphs: bool = True,
    device: torch.device = CPU,
    weights: str = "fp16",
    **changes: Any,
) -> Engine:
    """An engine of the model in ``folder`` in one weight format; without graphs every step is eager and settled at
    once."""
    settings: dict[str, Any] = {
        "page_size": PAGE,
        "max_num_seqs": 4,
        "max_batch_tokens": 32,
        "block_length": 3,
        "kv_memory_mib": 4,
        "proposer": "none",
        **changes,
    }
    config = ServeConfig(model_dir=str(folder), drafter_dir=str(drafter_folder) if drafter_folder else None, **settings)
    model = load_triton(folder, weights, device, config.kv_cache_dtype == "int8")
    drafter = None
    if drafter_folder is not None:
        drafter = TritonBlockDrafter.load(drafter_folder, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.engine.costs.GRAPH_REPEATS", 1)
        if not graphs:
            patch.setattr("serve.engine.build.graph_maker", lambda *_: None)
        return assemble(config, model, load_tokenizer(folder), drafter, MemorySpent(device), [])


def hash_engine(
    tokenizer_folder: Path,
    *,
    drafter: HashDrafter | None = None,
    graphs: bool = True,
    pages: int = 64,
    max_num_seqs: int = 6,
    max_rows: int = 24,
    block_length: int = 3,
    prompt_rows: int = 0,
) -> Engine:
    """An engine of a hash model with ``pages`` pages."""
    model: Any = HashModel()
    block: Any = drafter
    cache = model.allocate_cache(pages + 1, PAGE)
    if block is not None:
        block.allocate_cache(pages + 1, PAGE)
    ahead = None
    if graphs:
        step_graphs = StepGraphs(
            model,
            cache,
            block,
            max_rows=max_rows,
            max_sequences=max_num_seqs,
            max_length=pages * PAGE,
            prompt_rows=prompt_rows,
        )
        step_graphs.capture()
        ahead = StepsAhead(step_graphs)
    return Engine(
        ModelRunner(model, cache, PAGE, block, ahead),
        Scheduler(PagePool(pages, PAGE), max_num_seqs=max_num_seqs, max_batch_tokens=32, lookahead=block_length + 1),
        BlockLengthController(CostTable({1: 1.0, 64: 1.2}, {1: 0.1, 8: 0.11}), block_length),
        load_tokenizer(tokenizer_folder),
        block=block,
        max_model_len=min(512, pages * PAGE),
    )
