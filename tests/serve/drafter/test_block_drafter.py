"""The drafter over pages says what the eager specification says, whatever was computed, shared or rejected before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve.config import ServeConfig
from serve.drafter.base import DraftRequest
from serve.drafter.block import BlockDrafter
from serve.drafter.checkpoint import DrafterError
from serve.drafter.dflash import DFlashModel
from serve.engine.build import build_engine
from serve.engine.runner import ModelRunner
from serve.model.batch import FlatBatch
from serve.model.loader import load_target
from serve.protocol import SamplingParams
from tests.serve.drafter.random_drafters import TARGET_LAYERS, drafter_config, random_drafter, write_drafter
from tests.tiny_models import greedy, write_model
from verify.lossless import RandomLengths

PAGE = 16


@dataclass(frozen=True)
class Pair:
    """A target folder with its transformers model, and a drafter folder with its eager specification."""

    folder: Path
    reference: Any
    drafter_folder: Path
    spec: DFlashModel

    def taps(self, token_ids: Sequence[int], shift: int = 0) -> Tensor:
        """[1, N, taps * H] from transformers, whose hidden_states[0] is the embedding; ``shift`` reads wrong layers."""
        config = self.spec.config
        if not token_ids:
            return torch.zeros(1, 0, len(config.target_layer_ids) * config.hidden_size)
        states = self.reference(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        return torch.cat([states[i + 1 + shift] for i in config.target_layer_ids], dim=-1)

    @torch.inference_mode()
    def expected(self, token_ids: Sequence[int], shift: int = 0) -> tuple[Tensor, list[int]]:
        """Hidden states [B, H] of the block behind ``token_ids`` (its last token is the anchor), and the draft."""
        config, anchor = self.spec.config, len(token_ids) - 1
        ids = torch.tensor([[token_ids[-1]] + [config.mask_token_id] * (config.block_size - 1)])
        hidden = self.spec(
            self.reference.model.embed_tokens(ids),
            self.spec.fuse(self.taps(token_ids[:-1], shift)),
            torch.arange(anchor, anchor + config.block_size)[None],
            torch.arange(anchor)[None],
        )[0]
        return hidden, self.reference.lm_head(hidden[1:]).argmax(-1).tolist()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder, drafter_folder = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    reference = write_model(folder, "llama", seed=5, num_hidden_layers=TARGET_LAYERS)
    spec = random_drafter(drafter_config())
    return Pair(folder, reference, write_drafter(drafter_folder, spec), spec)


class Bench:
    """The engine's own pieces without its scheduling: rows go through the target, their taps to the drafter."""

    def __init__(self, pair: Pair, num_pages: int = 24) -> None:
        self.pair = pair
        target = load_target(pair.folder, device=torch.device("cpu"), weights="fp32")
        self.drafter = BlockDrafter.load(pair.drafter_folder, target)
        self.drafter.allocate_cache(num_pages, PAGE)
        self.runner = ModelRunner(target, target.allocate_cache(num_pages, PAGE), PAGE, self.drafter)

    def feed(self, *pieces: tuple[Sequence[int], Sequence[int], int, int]) -> None:
        """One pass over pieces (token ids of a sequence, its pages, first row, last row + 1)."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, tables = [0], []
        for ids, pages, start, stop in pieces:
            token_ids += ids[start:stop]
            positions += range(start, stop)
            slots += [pages[p // PAGE] * PAGE + p % PAGE for p in range(start, stop)]
            starts.append(len(token_ids))
            tables.append(tuple(pages[: -(-stop // PAGE)]))
        place = torch.tensor(positions)
        self.runner.forward_batch(
            FlatBatch(
                torch.tensor(token_ids),
                place,
                torch.tensor(slots),
                place + 1,
                tuple(starts),
                tuple(tables),
                torch.tensor([len(token_ids) - 1]),
            )
        )

    def check(self, *sequences: tuple[Sequence[int], Sequence[int]]) -> None:
        """Blocks behind (token ids, pages) of all sequences in one pass: hidden states and drafts of the spec."""
        size = self.drafter.block_size
        requests = [DraftRequest(str(i), ids, size - 1, tuple(pages)) for i, (ids, pages) in enumerate(sequences)]
        batch, _ = self.drafter._blocks(requests)
        hidden = self.drafter.forward(batch)
        drafts = self.drafter.propose(requests)
        for i, (ids, _) in enumerate(sequences):
            states, draft = self.pair.expected(ids)
            torch.testing.assert_close(hidden[i * size : (i + 1) * size], states, atol=1e-4, rtol=1e-4)
            assert drafts[i] == draft


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_drafter_with_a_head_of_its_own_is_refused_and_one_with_a_copy_is_not(
    pair: Pair, tmp_path: Path, weights: str
) -> None:
    target = load_target(pair.folder, device=torch.device("cpu"), weights=weights)
    copies = {
        "embed_tokens.weight": pair.reference.model.embed_tokens.weight.detach().bfloat16(),
        "lm_head.weight": pair.reference.lm_head.weight.detach().bfloat16(),
    }
    BlockDrafter.load(write_drafter(tmp_path / "copies", pair.spec, extra=copies), target)
    for name, copy in copies.items():
        other = write_drafter(tmp_path / name, pair.spec, extra={**copies, name: copy.flip(0).contiguous()})
        with pytest.raises(DrafterError, match=f"{name} differs from the target's own"):
            BlockDrafter.load(other, target)


def text(length: int, seed: int) -> list[int]:
    return torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_prefill_in_one_piece(pair: Pair) -> None:
    bench, ids = Bench(pair), text(23, 1)
    bench.feed((ids, [0, 1], 0, 22))
    bench.check((ids, [0, 1]))


def test_a_prompt_of_one_token_drafts_without_context(pair: Pair) -> None:
    Bench(pair).check(([9], [3]))


def test_prefill_in_chunks_over_scattered_pages_of_several_sequences(pair: Pair) -> None:
    bench = Bench(pair)
    one, two, three = text(41, 2), text(18, 3), text(7, 4)
    tables = [9, 2, 17], [4, 0], [23]
    bench.feed((one, tables[0], 0, 13), (two, tables[1], 0, 5))
    bench.feed((two, tables[1], 5, 17), (three, tables[2], 0, 6), (one, tables[0], 13, 31))
    bench.feed((one, tables[0], 31, 40))
    bench.check((one, tables[0]), (two, tables[1]), (three, tables[2]))
    bench.check((three, tables[2]), (one, tables[0]))


def test_rejected_rows_leave_no_trace(pair: Pair) -> None:
    """Verify rows of a wrong draft and the block's own K/V lie behind the new anchor; nothing may see them."""
    bench, ids, pages = Bench(pair), text(40, 5), [5, 11, 8]
    bench.feed((ids, pages, 0, 14))
    length = 15
    for kept in (0, 2, 5, 1):
        bench.check((ids[:length], pages))
        wrong = text(5, 100 + length)
        drafted = [*ids[:length], *ids[length : length + kept], *wrong[kept:]]
        bench.feed((drafted, pages, length - 1, length + 5))
        length += kept + 1
    bench.check((ids[:length], pages))


def test_a_shared_prefix_serves_every_sequence_that_names_its_pages(pair: Pair) -> None:
    bench, prefix = Bench(pair), text(32, 6)
    first, second = [*prefix, *text(9, 7)], [*prefix, *text(4, 8)]
    bench.feed((first, [7, 3, 12], 0, 40))
    bench.feed((second, [7, 3, 20], 32, 35))
    bench.check((first, [7, 3, 12]), (second, [7, 3, 20]))


def test_steps_without_a_draft_keep_the_context_fresh(pair: Pair) -> None:
    bench, ids = Bench(pair), text(30, 9)
    bench.feed((ids, [1, 2], 0, 20))
    for position in range(20, 25):
        bench.feed((ids, [1, 2], position, position + 1))
    bench.check((ids[:26], [1, 2]))


@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_one_layer_off_are_not_equal(pair: Pair, shift: int) -> None:
    """``target_layer_ids`` are layers whose output is tapped; reading them as hidden_states indices must not pass."""
    bench, ids = Bench(pair), text(23, 10)
    bench.feed((ids, [0, 1], 0, 22))
    batch, _ = bench.drafter._blocks([DraftRequest("x", ids, bench.drafter.block_size - 1, (0, 1))])
    served = bench.drafter.forward(batch)
    assert (served - pair.expected(ids)[0]).abs().max() < 1e-4
    assert (served - pair.expected(ids, shift)[0]).abs().max() > 0.1


class Witness:
    """Stands before the block drafter: keeps what it was asked and what it said, and sometimes drafts the truth so
    that rounds of every acceptance length occur."""

    name = "block"

    def __init__(self, drafter: BlockDrafter, truth: dict[tuple[int, ...], list[int]]) -> None:
        self.drafter, self.truth = drafter, truth
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = self.drafter.propose(requests)
        answers = []
        for request, draft in zip(requests, drafts, strict=True):
            ids = list(request.token_ids)
            self.seen.append((ids, draft))
            prompt = next(p for p in self.truth if tuple(ids[: len(p)]) == p)
            right = self.truth[prompt][len(ids) - len(prompt) :]
            kept = len(self.seen) % (len(draft) + 1)
            answers.append([*right[:kept], *draft[kept:]][: len(draft)])
        return answers


@pytest.mark.parametrize("pressure", [False, True])
def test_every_draft_in_a_running_engine_is_the_specifications(pair: Pair, pressure: bool) -> None:
    """Chunked prefill, batches, rejections, prefix hits and preemption, through the engine that serves."""
    shared = text(37, 20)
    prompts = [tuple(text(n, 30 + n)) for n in (5, 19, 50)] + [(*shared, *text(n, 50 + n)) for n in (3, 11)]
    truth = {prompt: greedy(pair.reference, list(prompt), 44) for prompt in prompts}
    engine, _ = build_engine(
        ServeConfig(
            model_dir=str(pair.folder),
            drafter_dir=str(pair.drafter_folder),
            weights="fp32",
            proposer="block",
            page_size=PAGE,
            max_num_seqs=8,
            max_batch_tokens=24,
            threads=1,
        )
    )
    assert isinstance(engine.block, BlockDrafter)
    witness = Witness(engine.block, truth)
    engine.lookup, engine.block = None, witness
    engine.controller = RandomLengths(engine.controller)
    if pressure:
        engine.scheduler.pool.allocate(engine.scheduler.pool.num_available - 9)
    got: dict[str, list[int]] = {}
    for name in ("cold", "warm"):
        for i, prompt in enumerate(prompts):
            engine.add(f"{name}{i}", prompt, SamplingParams(max_tokens=44, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                got.setdefault(output.id, []).extend(output.token_ids)
    for name in ("cold", "warm"):
        assert [got[f"{name}{i}"] for i in range(len(prompts))] == list(truth.values())
    stats = engine.stats()
    assert stats.preemptions > 0 if pressure else stats.prefix_hits > 0
    assert stats.accepted_tokens > 0
    assert stats.accepted_tokens < stats.draft_tokens
    assert len(witness.seen) > 30
    for ids, draft in witness.seen:
        assert draft == pair.expected(ids)[1][: len(draft)]
    assert any(draft for _, draft in witness.seen)
