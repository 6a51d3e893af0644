"""What a verify pass and a draft pass cost on this machine, measured before the first request on pages that belong to
nobody; nothing that a request can see depends on what is written there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from serve.drafter.base import DraftRequest
from serve.drafter.block import BlockDrafter
from serve.engine.runner import ModelRunner
from serve.model.batch import FlatBatch
from verify.costs import CostTable

if TYPE_CHECKING:
    from serve.engine.graphs import StepGraphs

COST_ROWS = (1, 2, 4, 8, 16, 32)
COST_SEQUENCES = (1, 4, 16)
COST_REPEATS = 3
COST_SECONDS = 3.0
"""Time after which every cost is taken from a single run."""
COST_CONTEXT = 64
GRAPH_ROWS_EACH = 4
"""Rows of one sequence when graphs are timed."""
GRAPH_REPEATS = 4


def graph_costs(graphs: StepGraphs) -> CostTable:
    """Seconds of a verify pass by rows and of a draft pass by sequences, each the best of a few replays. The pages
    written belong to nobody."""
    from serve.engine.lanes import Lane

    pages = tuple(range(min(graphs.cache.num_pages - 1, -(-COST_CONTEXT * 2 // graphs.cache.page_size))))
    end = len(pages) * graphs.cache.page_size
    start = min(COST_CONTEXT, end // 2)

    def lane(rows: int = 1, wanted: int = 0) -> Lane:
        return Lane(-1, start, 0, pages, end, start, (0,) * (rows - 1 if not wanted else 0), wanted)

    verify: dict[int, float] = {}
    for rows in graphs.row_buckets:
        each = min(rows, GRAPH_ROWS_EACH)
        lanes = [lane(each) for _ in range(rows // each)]
        verify[rows] = min(graphs.read(graphs.launch(lanes)).verify_seconds for _ in range(GRAPH_REPEATS))
    draft: dict[int, float] = {}
    for count in graphs.draft_buckets:
        lanes = [lane(wanted=1) for _ in range(count)]
        if 2 * count <= graphs.row_buckets[-1]:
            draft[count] = min(graphs.read(graphs.launch(lanes)).draft_seconds for _ in range(GRAPH_REPEATS))
    return CostTable(verify, draft)


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
