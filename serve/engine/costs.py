"""What a verify pass and a draft pass cost on this machine, measured before the first request on pages that belong to
nobody; nothing that a request can see depends on what is written there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from serve.drafter.base import DraftRequest
from serve.drafter.block import BlockDrafter
from serve.engine.runner import ModelRunner
from serve.model.batch import FlatBatch
from verify.costs import CostTable

if TYPE_CHECKING:
    from serve.engine.graphs import StepGraphs

COST_ROWS = (1, 2, 3, 4, 6, 8, 16, 32)
COST_DRAFTS = {1: 4, 4: 8, 16: 32}
"""Sequences drafted for, and the rows verified after it when a draft is timed."""
LEAST_SECONDS = 1e-6
COST_ROUNDS = 2
COST_REPEATS = 16
COST_REPEAT_SECONDS = 0.06
"""A round runs each count so often, or for so long (three times at least), one run after the other: weights come back
into the caches only over some ten passes, and served steps follow each other too."""
COST_SECONDS = 3.0
"""Time after which every cost is taken from the runs there are, or else from the one after a first that warms up."""
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
    for rows in graphs.sizes.rows:
        each = min(rows, GRAPH_ROWS_EACH)
        lanes = [lane(each) for _ in range(rows // each)]
        verify[rows] = min(graphs.read(graphs.launch(lanes)).verify_seconds for _ in range(GRAPH_REPEATS))
    draft: dict[int, float] = {}
    for count in graphs.sizes.drafts:
        lanes = [lane(wanted=1) for _ in range(count)]
        if 2 * count <= graphs.sizes.rows[-1]:
            draft[count] = min(graphs.read(graphs.launch(lanes)).draft_seconds for _ in range(GRAPH_REPEATS))
    return CostTable(verify, draft, copying_waits=True)


def measure_costs(runner: ModelRunner, drafter: BlockDrafter | None, pool_tokens: int) -> CostTable:
    """Seconds of a verify pass by rows and of a draft pass by sequences, each of several runs on free pages.

    The pages written here belong to nobody; nothing that a request can see depends on their contents. Other work on the
    machine makes single figures absurd, so no count is believed to cost more, per unit of work, than a smaller one.
    """
    context = min(COST_CONTEXT, pool_tokens // 2)

    def verify(rows: int) -> Callable[[], object]:
        return partial(runner.forward_batch, _probe_batch(runner, context, rows))

    passes = {rows: verify(rows) for rows in COST_ROWS if context + rows <= pool_tokens}
    rounds: dict[int, Callable[[], object]] = {}
    if drafter is not None and context + drafter.block_size <= pool_tokens:
        pages = tuple(range(runner.pages_for(context + drafter.block_size)))
        ids, longest = [0] * (context + 1), drafter.block_size - 1
        for count, rows in COST_DRAFTS.items():
            if rows in passes:
                requests = [DraftRequest(str(i), ids, longest, pages) for i in range(count)]
                rounds[count] = _both(partial(drafter.propose, requests), passes[rows])
    seconds = _usual_seconds([*passes.values(), *rounds.values()])
    verify_points = dict(zip(passes, seconds, strict=False))
    # What a draft adds to a pass: its own time, and the weights of the target that it pushes out of the caches.
    draft_points = {
        count: max(both - verify_points[COST_DRAFTS[count]], LEAST_SECONDS)
        for count, both in zip(rounds, seconds[len(passes) :], strict=True)
    }
    return CostTable(_at_most_proportional(verify_points), _at_most_proportional(draft_points))


def _both(first: Callable[[], object], then: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        first()
        then()

    return run


def _usual_seconds(passes: Sequence[Callable[[], object]]) -> list[float]:
    """What a run of each pass takes: three quarters of its runs took longer. The shortest would be a moment in which no
    other work touched the caches, which a short pass meets more easily than a draft and a pass; a plain step taken for
    too cheap makes drafts look dear. All are run in turn, more than once, so that a busy moment of the machine spoils
    one round and not one count. After COST_SECONDS the second run has to do; not the first, which warms up: a draft
    taken for too dear is never made, and so never timed again."""
    deadline = time.perf_counter() + COST_SECONDS
    runs: list[list[float]] = [[] for _ in passes]
    for place, run in [*enumerate(passes)] * COST_ROUNDS:
        begun = time.perf_counter()
        for attempt in range(1 + COST_REPEATS):
            started = time.perf_counter()
            late = started > deadline
            if (late and runs[place]) or (attempt > 3 and started - begun > COST_REPEAT_SECONDS):
                break
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if attempt:
                runs[place].append(time.perf_counter() - started)
    return [sorted(each)[len(each) // 4] for each in runs]


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
