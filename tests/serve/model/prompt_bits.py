"""What must be true of a model whose prompts go through products of their own: its bits, and its decoding as it was."""

from __future__ import annotations

import torch

from serve.model.target import TargetModel
from serve.model.triton_layers import TritonTargetModel
from tests.serve.model.test_triton_layers import PAGE, relative, run


def error_of_a_prompt(model: TritonTargetModel, plain: TritonTargetModel, eager: TargetModel) -> float:
    """How far a prompt's logits are from the eager model's, relative; AssertionError where it has other bits in parts
    or in company, or where decoding over its pages differs from ``plain``, whose prompts are usual ones."""
    caches = [one.allocate_cache(16, PAGE) for one in (eager, plain, model, model)]
    want, _ = run(eager, caches[0], [(0, 34)])
    alone, taps = run(model, caches[2], [(0, 34)])
    # The same prompt in two parts, the first in company.
    parts = [run(model, caches[3], spans) for spans in ([(0, 17), (0, 18)], [(17, 17)])]
    assert torch.equal(torch.cat([logits[:17] for logits, _ in parts]), alone)
    assert torch.equal(torch.cat([part[:17] for _, part in parts]), taps)
    for got, other in zip(caches[3].layers, caches[2].layers, strict=True):
        assert torch.equal(got[:3], other[:3])
    # Rows of decoding and verifying go on as they did, over the same pages.
    for first, second in zip(caches[1].layers, caches[2].layers, strict=True):
        first.copy_(second)
    rows = [run(one, cache, [(34, 1)]) for one, cache in ((plain, caches[1]), (model, caches[2]))]
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][1], rows[1][1])
    return float(relative(alone, want))
