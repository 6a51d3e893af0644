"""A rank that follows plays the graphs that rank 0 plays: after every launch its buffers hold the same numbers."""

from __future__ import annotations

import select
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.parallel.follower import Follower
from serve.parallel.leader import Leader
from serve.parallel.wire import receive
from serve.protocol import SamplingParams
from tests.serve.engine.graph_engines import hash_engine
from tests.serve.engine.hash_model import HashDrafter
from tests.tiny_models import write_tokenizer
from verify.lossless import RandomLengths


@pytest.mark.parametrize("drafts", [False, True])
def test_a_follower_plays_what_rank_0_plays(drafts: bool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    first, second = (
        hash_engine(tmp_path, drafter=HashDrafter() if drafts else None, max_rows=8, max_num_seqs=2) for _ in range(2)
    )
    ours, theirs = socket.socketpair()
    mirror: Any = Leader([ours], lambda: None)
    assert first.runner.ahead is not None
    assert second.runner.ahead is not None
    leading, following = first.runner.ahead.graphs, second.runner.ahead.graphs
    leading.mirror = first.runner.mirror = mirror
    first.controller = RandomLengths(first.controller)
    drafter: Any = second.block
    follower = Follower(second.runner, drafter, following)
    for name in range(2):
        first.add(str(name), [5 + name, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
    launches = 0
    while first.has_work:
        first.step()
        while select.select([theirs], [], [], 0)[0]:
            message = receive(theirs)
            assert message is not None
            follower.do(message)
            launches += 1
        assert torch.equal(leading._outbox.answers.results, following._outbox.answers.results)
        assert torch.equal(leading.state.anchor, following.state.anchor)
    assert launches > 4
