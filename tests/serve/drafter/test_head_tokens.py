"""A drafter that guesses among listed tokens: the best of those in every back end, and lists that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from serve.drafter.base import DraftRequest
from serve.drafter.block import BlockDrafter
from serve.drafter.checkpoint import DrafterError
from serve.drafter.head import HEAD_TOKENS, head_rows, read_head_tokens
from serve.engine.prepare import drafter_class
from serve.kernels.native.ops import NativeLibrary
from serve.model.loader import load_target
from serve.model.target import TargetModel
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.serve.model.test_triton_layers import load_triton
from tests.tiny_models import write_model

VOCAB = 320
PAGES = (5, 11, 8, 2)
SOME = torch.arange(1, VOCAB, 3)


def write_list(folder: Path, ids: Tensor, name: str = "token_ids") -> Path:
    path = folder / HEAD_TOKENS
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: ids}, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("head")
    write_model(place / "target", "qwen3", num_hidden_layers=5)
    write_drafter(place / "drafter", random_drafter(drafter_config(intermediate_size=96)))
    write_list(place / "drafter", SOME.int())
    return place


def load(folder: Path, weights: str) -> TargetModel:
    if weights == "triton":
        return load_triton(folder / "target", "fp16", torch.device("cpu"))
    return load_target(folder / "target", device=torch.device("cpu"), weights=weights)


@pytest.mark.parametrize("weights", ["fp32", "int8", "triton"])
def test_the_best_of_the_listed_tokens_is_guessed(folder: Path, weights: str) -> None:
    target = load(folder, weights)
    drafter = drafter_class(target).load(folder / "drafter", target)
    hidden = torch.randn(9, target.config.hidden_size, generator=torch.Generator().manual_seed(3))
    logits = target.lm_head(hidden)[:, SOME]
    guessed = drafter.best(hidden.to(target.cache_dtype))
    assert set(guessed.tolist()) <= set(SOME.tolist())
    places = torch.searchsorted(SOME, guessed)
    # Activations of 8 bits may change places with a token as good.
    lost = logits.amax(1) - logits.gather(1, places[:, None])[:, 0]
    assert float((lost / logits.std()).max()) < (1e-5 if weights == "fp32" else 0.1)
    assert f"head of {len(SOME)} tokens" in drafter.description


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_whole_drafts_are_of_listed_tokens(folder: Path, weights: str) -> None:
    target = load(folder, weights)
    drafts = {}
    for frequent in (True, False):
        drafter = drafter_class(target).load(folder / "drafter", target, frequent)
        drafter.allocate_cache(12, 16)
        requests = [DraftRequest("x", list(range(4, 24)), 5, PAGES), DraftRequest("y", [9, 8], 2, (1, 3))]
        drafts[frequent] = drafter.propose(requests)
        assert [len(draft) for draft in drafts[frequent]] == [5, 2]
    assert {token for draft in drafts[True] for token in draft} <= set(SOME.tolist())
    assert not {token for draft in drafts[False] for token in draft} <= set(SOME.tolist())


def test_a_list_of_every_token_changes_nothing(folder: Path, tmp_path: Path) -> None:
    target = load(folder, "fp32")
    write_drafter(tmp_path / "all", random_drafter(drafter_config()))
    write_list(tmp_path / "all", torch.arange(VOCAB))
    plain, listed = (BlockDrafter.load(tmp_path / "all", target, frequent) for frequent in (False, True))
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(5))
    assert torch.equal(plain.best(hidden), listed.best(hidden))


@pytest.mark.parametrize("weights", ["fp32", "int8", "triton"])
def test_rows_of_the_head_come_out_of_any_format(folder: Path, weights: str) -> None:
    target = load(folder, weights)
    units = torch.eye(target.config.hidden_size)
    torch.testing.assert_close(head_rows(target, SOME), target.lm_head(units)[:, SOME].T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "name", "message"),
    [
        (torch.tensor([3, 4, 4]), "token_ids", "ascending, each id once"),
        (torch.tensor([4, 3]), "token_ids", "ascending"),
        (torch.tensor([3, VOCAB]), "token_ids", f"holds {VOCAB}, outside the target's vocabulary of {VOCAB}"),
        (torch.tensor([-1, 3]), "token_ids", "holds -1"),
        (torch.tensor([0.0, 1.0]), "token_ids", "it is float32 of shape"),
        (torch.tensor([], dtype=torch.int32), "token_ids", "of shape \\[0\\]"),
        (torch.tensor([[1, 2]]), "token_ids", "of shape \\[1, 2\\]"),
        (torch.tensor([1, 2]), "ids", "one tensor 'token_ids', it holds \\['ids'\\]"),
    ],
)
def test_a_bad_list_is_refused_by_its_file_and_fault(tmp_path: Path, ids: Tensor, name: str, message: str) -> None:
    path = write_list(tmp_path, ids, name)
    with pytest.raises(DrafterError, match=message) as caught:
        read_head_tokens(tmp_path, VOCAB)
    assert str(path) in str(caught.value)


def test_half_a_file_is_refused_and_none_is_no_list(tmp_path: Path) -> None:
    assert read_head_tokens(tmp_path, VOCAB) is None
    path = write_list(tmp_path, torch.tensor([1, 2]))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DrafterError, match="not a whole safetensors file"):
        read_head_tokens(tmp_path, VOCAB)


@pytest.mark.parametrize("outputs", [1, 7, 16, 40, 321])
def test_the_best_row_in_c_is_the_first_largest(folder: Path, outputs: int) -> None:
    target = load(folder, "int8")
    if target.native is None:
        return  # this machine runs no C, so there is nothing of it to compare
    assert isinstance(target.native, NativeLibrary)
    from serve.kernels.native.grouped import GroupedProduct

    drafter = drafter_class(target).load(folder / "drafter", target)
    stack = drafter._stack  # type: ignore[attr-defined]
    weight = torch.randn(outputs, 64, generator=torch.Generator().manual_seed(outputs))
    weight[outputs // 2 :] = weight[: outputs - outputs // 2].clone()
    product = GroupedProduct(target.native, weight, None, 8)
    x, norm = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), torch.rand(64) + 0.5
    want = stack.product(x, norm, product).argmax(-1)
    assert torch.equal(stack.best(x, norm, product), want)
