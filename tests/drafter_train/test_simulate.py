"""Chain simulation equals speculative decoding done round by round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from drafter_train.corpus import Corpus
from drafter_train.rollout import Job, roll_out
from drafter_train.served import served_together
from drafter_train.simulate import Tally, simulate
from drafter_train.target import Target
from drafter_train.tokens import Response
from serve.drafter.dflash import DFlashModel
from tests.drafter_train.tiny_models import tiny_drafter, tiny_drafter_config, tiny_target

Taught = tuple[Target, DFlashModel, Corpus]


def _greedy_corpus(target: Target) -> Corpus:
    prompts = [np.arange(6, 6 + n) % 61 for n in (3, 9, 5)]
    found: dict[int, Response] = {}
    jobs = [Job(prompt=i, pass_index=0, ids=row, max_new_tokens=30) for i, row in enumerate(prompts)]
    assert roll_out(target, jobs, lambda r: found.update({r.prompt: r}), slots=2, burst=3)
    rows = [np.concatenate([prompts[i], found[i].ids]).astype(np.uint32) for i in range(3)]
    lengths = np.array([len(row) for row in rows])
    return Corpus(
        np.concatenate(rows),
        np.concatenate([[0], np.cumsum(lengths)[:-1]]),
        lengths,
        np.array([len(p) for p in prompts]),
        np.array([len(p) for p in prompts]),
        ("a", "b", "a"),
        0,
    )


def _speculate(
    model: DFlashModel, target: Target, prompt: list[int], first: int, length: int, head_tokens: torch.Tensor
) -> tuple[list[int], int]:
    """Greedy speculative decoding with no cache at all, guessing among ``head_tokens``: the slow definition."""
    config = model.config
    tokens, rounds = [*prompt, first], 0
    while len(tokens) < length:
        anchor = len(tokens) - 1
        taps, _ = target.hidden_states(torch.tensor([tokens[:-1]]), config.target_layer_ids)
        ids = torch.tensor([tokens[-1]] + [config.mask_token_id] * (config.block_size - 1))
        hidden = model(
            F.embedding(ids, target.embedding)[None],
            model.fuse(taps),
            torch.arange(anchor, anchor + config.block_size)[None],
            torch.arange(anchor)[None],
        )
        draft = head_tokens[(hidden[0, 1:] @ target.lm_head[head_tokens].T).argmax(-1)].tolist()
        _, final = target.hidden_states(torch.tensor([[*tokens, *draft]]), ())
        post = (final[0, anchor:] @ target.lm_head.T).argmax(-1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == post[accepted]:
            accepted += 1
        tokens += [*draft[:accepted], post[accepted]]
        rounds += 1
    return tokens[:length], rounds


@torch.no_grad()
def _teach(model: DFlashModel, target: Target, corpus: Corpus) -> None:
    """Fit the drafter to the very text it is judged on, so that drafts of every length get accepted."""
    from drafter_train.blocks import cut_blocks, dense_mask, draft_hidden, embed_blocks
    from drafter_train.corpus import make_batch
    from drafter_train.loss import Weighting, head_loss

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(60):
        batch = make_batch(corpus, np.arange(3), 24, 0, step)
        blocks = cut_blocks(batch, model.config.block_size, model.config.mask_token_id)
        taps, _ = target.hidden_states(batch.ids, model.config.target_layer_ids)
        mask = dense_mask(batch.anchors, model.config.block_size, batch.ids.shape[1])
        with torch.enable_grad():
            hidden = draft_hidden(model, embed_blocks(blocks, target.embedding), taps, blocks.positions, mask, None)
            sums = head_loss(
                hidden[:, :, 1:].flatten(0, 1),
                target.lm_head,
                blocks.labels.flatten(0, 1),
                blocks.valid.flatten(0, 1),
                Weighting(),
            )
            optimizer.zero_grad()
            (sums.loss / sums.weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.fixture(scope="module")
def taught() -> Taught:
    """A target, a drafter that knows its text, and the text."""
    target = tiny_target(scale=0.25)
    model = tiny_drafter(tiny_drafter_config(target.config))
    corpus = _greedy_corpus(target)
    _teach(model, target, corpus)
    return target, model, corpus


@pytest.mark.parametrize("every", [1, 3])
def test_simulated_rounds_equal_real_greedy_speculative_decoding(taught: Taught, every: int) -> None:
    """Also where one token in three is never guessed."""
    target, model, corpus = taught
    known = torch.tensor([i for i in range(target.config.vocab_size) if every == 1 or i % every])
    report = simulate(model, target, corpus, [0, 1, 2], head_tokens=None if every == 1 else known)
    rounds = tokens = 0
    for i in range(3):
        row = corpus.row(i).tolist()
        prompt = int(corpus.prompt_lengths[i])
        text, count = _speculate(model, target, row[:prompt], row[prompt], len(row), known)
        assert text == row, "greedy speculative decoding must reproduce the greedy response"
        rounds += count
        tokens += len(row) - prompt - 1
    assert (report["rounds"], report["tokens"]) == (rounds, tokens)
    assert report["acceptance_length"] > (1.3 if every == 1 else 1.1)
    assert sum(entry["rounds"] for entry in report["categories"].values()) == rounds
    assert report["recall"]["16"][0] >= report["recall"]["1"][0] > 0


@pytest.mark.parametrize(
    ("leading", "tokens", "rounds", "kept"),
    [
        ([0, 0, 0, 0, 0], 4, 4, [0, 0, 0]),
        ([3, 3, 2, 1, 0], 4, 1, [1, 1, 1]),
        ([1, 0, 0, 0, 0], 4, 3, [1, 0, 0]),
    ],
)
def test_a_chain_commits_what_matched_and_one_more(
    leading: list[int], tokens: int, rounds: int, kept: list[int]
) -> None:
    tally = Tally(3)
    tally.add_chain(leading, first=0, length=5)
    assert (tally.tokens, tally.rounds, tally.kept.tolist()) == (tokens, rounds, kept)


def test_full_blocks_of_all_requests_fit_a_recorded_step() -> None:
    assert served_together(48, 7, cuda=True) == 32
    assert served_together(8, 7, cuda=True) == 8
    assert served_together(48, 63, cuda=True) == 4
    assert served_together(48, 7, cuda=False) == 48
    assert served_together(2, 0, cuda=True) == 2
