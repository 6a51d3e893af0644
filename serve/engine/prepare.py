"""What only a device with the Triton kernels gets at the start: the drafter's class, graphs of decoding steps, and a
rehearsal that tells what graphs and the largest step take before the pages are sized.

Imports Triton only when the model runs on it. This file knows sizes; no requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from serve.config import ServeConfig
from serve.drafter.block import BlockDrafter
from serve.drafter.native_block import NativeBlockDrafter
from serve.engine.memory import MemorySpent
from serve.engine.runner import ModelRunner
from serve.kernels.kv_cache import KVCache
from serve.model.batch import FlatBatch
from serve.model.target import TargetModel

if TYPE_CHECKING:
    from serve.engine.ahead import StepsAhead
    from serve.engine.graphs import StepGraphs

GRAPH_ROWS = 256
"""Most rows of a graph of decoding steps."""
PROMPT_ROWS = 1024
"""Most rows of a graph of prefill passes: beyond them the host launches faster than the device runs."""
SCRATCH_PAGES = 1
"""The last page belongs to nobody: padding rows of graphs write there."""

BATCH_TOKENS = {"cpu": 256, "small": 2048, "large": 8192, "huge": 16_384}
"""Rows of a step where --max-batch-tokens does not say: as many as keep a step under a second or so."""
SMALL_CARD, HUGE_CARD = 32 << 30, 100 << 30
HUGE_STEP = 120 * 10**12
"""Rows times parameters of a step that a huge card runs in a third of a second: beyond it fewer rows are enough."""

SCORED_BYTES = 128 << 20
"""Logits that a step keeps of prompts to be scored, whose every row has some. Memory was sized for a row a prompt: all
logits of a step of 2,048 rows and 152,000 tokens are 1.2 GB."""

GraphMaker = Callable[[KVCache, int], "StepGraphs"]


def step_tokens(config: ServeConfig, model: TargetModel) -> int:
    """The token budget of a step."""
    if config.max_batch_tokens:
        return config.max_batch_tokens
    shape, kind = model.config, "cpu"
    if model.device.type == "cuda":
        attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        parameters = shape.num_layers * shape.hidden_size * (attention + 3 * shape.intermediate_size)
        kind = kind_of_card(torch.cuda.get_device_properties(model.device).total_memory, parameters)
    return max(BATCH_TOKENS[kind], config.max_num_seqs)


def kind_of_card(memory: int, parameters: int) -> str:
    """What a card of so many bytes counts as among BATCH_TOKENS, for a model of so many parameters in its layers."""
    if memory >= HUGE_CARD and BATCH_TOKENS["huge"] * parameters <= HUGE_STEP:
        return "huge"
    return "large" if memory >= SMALL_CARD else "small"


def in_triton(model: TargetModel) -> bool:
    # A model on the Triton kernels has imported them already; asking about another must not.
    module = sys.modules.get("serve.model.triton_layers")
    return module is not None and isinstance(model, module.TritonTargetModel)


def least_chunk(model: TargetModel) -> int:
    """Rows that a part of a longer prompt has at least: fewer go through the kernels of decoding steps."""
    if not in_triton(model):
        return 1
    from serve.kernels.triton.attention import SPLIT_ROWS

    return SPLIT_ROWS + 1


def drafter_class(model: TargetModel) -> type[BlockDrafter]:
    """The kind of block drafter that runs beside ``model``."""
    if model.native is not None:
        return NativeBlockDrafter
    if not in_triton(model):
        return BlockDrafter
    from serve.drafter.triton_block import TritonBlockDrafter

    return TritonBlockDrafter


def scored_rows(model: TargetModel) -> int:
    """Rows of a step at most whose logits are kept to score a prompt; room for two parts of one in any case."""
    return max(2 * least_chunk(model), SCORED_BYTES // (4 * model.config.vocab_size))


def graph_maker(
    config: ServeConfig, model: TargetModel, drafter: BlockDrafter | None, block_length_max: int
) -> GraphMaker | None:
    """From a cache and the longest context to graphs not captured yet; None where there are none or they are off."""
    if not config.graphs or not in_triton(model):
        return None
    from serve.drafter.triton_block import TritonBlockDrafter
    from serve.engine.graphs import StepGraphs
    from serve.model.triton_layers import TritonTargetModel

    assert isinstance(model, TritonTargetModel)
    assert drafter is None or isinstance(drafter, TritonBlockDrafter)
    # Stored matrices are widened for every prefill pass: not tried in a graph.
    dense = len(model.stack.dense_matrices()) == 4 * len(model.stack.layers)
    alone = model.device.type == "cuda" and model.group.size == 1
    wanted = config.prompt_graphs is not False and dense and alone
    prompt_rows = min(step_tokens(config, model), PROMPT_ROWS) if wanted else 0
    rows = max(config.max_num_seqs, min(GRAPH_ROWS, config.max_num_seqs * (1 + block_length_max)))

    def make(cache: KVCache, max_length: int) -> StepGraphs:
        return StepGraphs(
            model,
            cache,
            drafter,
            max_rows=rows,
            max_sequences=config.max_num_seqs,
            max_length=max_length,
            prompt_rows=prompt_rows,
        )

    return make


def rehearse(
    config: ServeConfig,
    model: TargetModel,
    drafter: BlockDrafter | None,
    graphs: GraphMaker | None,
    rows: int,
    spent: MemorySpent,
) -> None:
    """Runs a prefill of ``rows`` rows and captures every graph over a small cache, to see what both take; the
    cache and the graphs are given back, and what they took is reserved."""
    device, size = model.device, config.page_size
    pages = -(-rows // size)
    cache = model.allocate_cache(pages + SCRATCH_PAGES, size)
    if drafter is not None:
        drafter.allocate_cache(pages + SCRATCH_PAGES, size)
    runner = ModelRunner(model, cache, size, drafter)
    positions = torch.arange(rows, device=device)
    batch = FlatBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slots=positions.clone(),
        visible=positions + 1,
        query_starts=(0, rows),
        page_tables=(tuple(range(pages)),),
        logit_rows=positions[-1:],
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.forward_batch(batch)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    if graphs is not None:
        free = _free(device)
        most = free // model.kv_bytes_per_page(size) * size
        longest = min(config.max_model_len or model.config.max_position_embeddings, most)
        rehearsed = graphs(cache, longest)
        rehearsed.capture()
        spent.reserve("graphs", free - _free(device))
        del rehearsed
    spent.reserve("activations", activations)
    del cache, runner, batch
    if drafter is not None:
        drafter.allocate_cache(1, size)
    torch.cuda.empty_cache()


def steps_ahead(graphs: StepGraphs) -> StepsAhead:
    """What launches captured graphs."""
    from serve.engine.ahead import StepsAhead

    return StepsAhead(graphs)


def _free(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
