"""Where rounds begin: the chain that is walked, what the store keeps of it, and anchors that favour those places."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter_train import replay, train
from drafter_train.corpus import Corpus, load_corpus, make_batch
from drafter_train.replay import visited_places
from drafter_train.simulate import Tally
from drafter_train.tokens import TokenStore
from tests.drafter_train.tiny_runs import metrics, write_run


def test_a_chain_starts_rounds_where_the_simulation_counts_them() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, length = 5, int(rng.integers(7, 40))
        leading = np.zeros(length, dtype=np.int64)
        leading[first:] = rng.integers(0, 4, length - first)
        tally = Tally(3)
        tally.add_chain(leading, first, length)
        places = visited_places(leading[first:], first, length)
        assert len(places) == tally.rounds
        assert places[0] == first
        assert all(b - a == leading[a] + 1 for a, b in pairwise(places))


def _corpus(visited: np.ndarray | None) -> Corpus:
    count, length = 16, 60
    return Corpus(
        ids=np.arange(count * length, dtype=np.uint32) % 50,
        starts=np.arange(count) * length,
        lengths=np.full(count, length),
        prompt_lengths=np.full(count, 10),
        first=np.full(count, 10),
        categories=("a",) * count,
        dropped=0,
        visited=visited,
    )


def test_favoured_places_come_as_much_more_often_as_asked() -> None:
    visited = np.zeros(16 * 60, dtype=np.bool_)
    visited.reshape(16, 60)[:, 12:60:12] = True
    corpus = _corpus(visited)
    counts = np.zeros(60)
    for step in range(400):
        batch = make_batch(corpus, np.arange(16), 1, 7, step, replay_weight=5.0)
        chosen = batch.anchors[batch.valid].numpy()
        np.add.at(counts, chosen, 1)
    assert counts[:10].sum() == 0
    often = counts[[12, 24, 36, 48]].mean()
    seldom = np.delete(counts, [12, 24, 36, 48, *range(10), 59]).mean()
    assert often / seldom == pytest.approx(5.0, rel=0.15)
    plain = make_batch(_corpus(None), np.arange(16), 8, 7, 0)
    assert torch.equal(plain.anchors, make_batch(corpus, np.arange(16), 8, 7, 0).anchors)


def test_the_command_keeps_places_that_training_then_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path, name="first", max_steps=2)
    arguments = ["--config", str(recipe), "--device", "cpu"]
    assert train.main(arguments) == 0
    drafter = str(tmp_path / "first" / "final")
    for shard in ("0/2", "1/2"):
        assert replay.main([*arguments, "--drafter", drafter, "--shard", shard]) == 0
    store = TokenStore(tmp_path / "tokens-23")
    corpus = load_corpus(store, 64)
    assert set(store.replay()) == set(corpus.keys)
    assert corpus.visited is not None
    for i, key in enumerate(corpus.keys):
        row = corpus.visited[corpus.starts[i] : corpus.starts[i] + corpus.lengths[i]]
        assert row[corpus.first[i]]
        assert row.nonzero()[0].tolist() == store.replay()[key].tolist()
    store.write_replay({key: np.array([store.prompt(key[0]).size + 3]) for key in corpus.keys}, 0, 2)
    again = tmp_path / "again"
    assert train.main([*arguments, "--set", "train.replay_weight=4.0", "--set", f"train.output={again}"]) == 0
    assert [line["loss"] for line in metrics(again)] != [line["loss"] for line in metrics(tmp_path / "first")]
    assert replay.main([*arguments, "--drafter", drafter]) == 0
    assert [path.name for path in store.folder.glob("replay-*")] == ["replay-000of001.npz"]
    with pytest.raises(SystemExit):
        replay.main([*arguments, "--drafter", drafter, "--set", "data.thinking='off'"])
    assert "was written with another chat setup" in capsys.readouterr().err
