"""The fused kernels give the plain step's numbers; kept taps are the target's; a grown drafter starts where it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter_train.blocks import cut_blocks, dense_mask, draft_hidden, embed_blocks
from drafter_train.corpus import Batch, BatchOrder, Corpus
from drafter_train.fused import forward
from drafter_train.fused.forward import fused_causal_layer, fused_draft_hidden
from drafter_train.fused.loss import statistics
from drafter_train.loss import Teacher, Weighting, head_loss, teacher_of
from drafter_train.recipe import Recipe, TrainConfig
from drafter_train.simulate import draft_everywhere
from drafter_train.stepper import Stepper, flatten_gradients
from drafter_train.tapcache import TapCache
from drafter_train.target import causal_layer
from drafter_train.warmstart import load_stored
from serve.drafter.dflash import DFlashConfig, DFlashModel, rope_tables
from tests.drafter_train.tiny_models import tiny_drafter, tiny_drafter_config, tiny_target


def _batch(width: int = 70, count: int = 18) -> Batch:
    """More blocks than one tile holds, anchors beyond the second context tile, and a sequence with unused anchors."""
    generator = torch.Generator().manual_seed(3)
    anchors = torch.stack([torch.randperm(width - 5, generator=generator)[:count].sort().values + 2 for _ in range(2)])
    anchors[1, -3:] = 0
    return Batch(
        ids=torch.randint(6, 61, (2, width), generator=generator),
        lengths=torch.tensor([width, width - 9]),
        anchors=anchors,
        valid=anchors > 0,
    )


def _drafts(fused: bool, block_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    target = tiny_target()
    model = tiny_drafter(tiny_drafter_config(target.config, block_size=block_size))
    batch, config = _batch(), model.config
    blocks = cut_blocks(batch, config.block_size, config.mask_token_id)
    taps, _ = target.hidden_states(batch.ids, config.target_layer_ids)
    embeds = embed_blocks(blocks, target.embedding)
    if fused:
        hidden = fused_draft_hidden(model, embeds, taps, blocks.positions, batch.anchors)
    else:
        mask = dense_mask(batch.anchors, config.block_size, batch.ids.shape[1])
        hidden = draft_hidden(model, embeds, taps, blocks.positions, mask, None)
    toss = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden * toss).sum().backward()  # type: ignore[no-untyped-call]
    return hidden.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("block_size", [4, 8])
def test_fused_drafts_and_all_gradients_equal_the_specification(block_size: int) -> None:
    plain, gradients = _drafts(False, block_size)
    fused, fused_gradients = _drafts(True, block_size)
    torch.testing.assert_close(fused, plain, atol=2e-5, rtol=1e-4)
    assert set(fused_gradients) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=1e-3)


def test_fused_target_layer_equals_the_plain_one() -> None:
    target = tiny_target()
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(torch.arange(30)[None], 8, 10_000.0)
    plain = causal_layer(x, cos, sin, *target.layers[0], target.shape)
    fused = fused_causal_layer(x, cos, sin, *target.layers[0], target.shape)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("kl_weight", [0.0, 0.4])
def test_fused_head_loss_equals_the_plain_one(kl_weight: float) -> None:
    torch.manual_seed(0)
    head = torch.randn(300, 16)
    labels, valid = torch.randint(0, 300, (9, 3)), torch.rand(9, 3) > 0.2
    hidden = torch.randn(9, 4, 16)
    teacher = teacher_of(torch.randn(9, 3, 16), head, 7, rows=100) if kl_weight else None
    if teacher is not None:  # labels that the teacher names, first or last, and others that it does not
        labels[:2], labels[2:4] = teacher.ids[:2, :, 0], teacher.ids[2:4, :, -1]
    results = []
    for fused in (False, True):
        mine = hidden.clone().requires_grad_()
        # Strided, as the trainer gives it: a block's first row has no loss.
        sums = head_loss(
            mine[:, 1:], head, labels, valid, Weighting(), teacher=teacher, kl_weight=kl_weight, rows=12, fused=fused
        )
        sums.loss.backward()  # type: ignore[no-untyped-call]
        results.append((sums, mine.grad))
    (plain, gradient), (fused_sums, fused_gradient) = results
    torch.testing.assert_close(fused_sums.loss, plain.loss)
    torch.testing.assert_close(fused_sums.weight, plain.weight)
    torch.testing.assert_close(fused_gradient, gradient, atol=1e-5, rtol=1e-4)
    assert torch.equal(fused_sums.correct, plain.correct)


@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
@pytest.mark.parametrize(
    ("fault", "said"), [(0.0, "fused kernels agree: "), (0.3, "fused kernels are not used: Arith")]
)
def test_fused_kernels_are_used_only_where_they_come_as_close_to_float32_as_bf16_does(
    fault: float, said: str, kl_weight: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target()
    model = tiny_drafter(tiny_drafter_config(target.config, block_size=4))
    gradients = flatten_gradients(model)
    recipe = Recipe("r", "t", train=TrainConfig(kl_weight=kl_weight, kl_top=5))
    stepper = Stepper(recipe, model, target, gradients)
    stepper._wants_fused = True
    right = forward.fused_draft_hidden
    monkeypatch.setattr(forward, "fused_draft_hidden", lambda *given: right(*given) * (1 + fault))
    stepper._try_fused(_batch(width=24, count=4), Weighting())
    assert said in capsys.readouterr().err
    assert stepper.fused == (fault == 0.0)
    assert (target.layer is causal_layer) == (fault > 0.0)
    assert not gradients.any()


def test_statistics_hold_for_labels_far_from_the_top() -> None:
    logits = torch.tensor([[-40.0, 0.0, 15.0], [50.0, 0.0, -50.0]])
    log_norm, label, best = statistics(logits, torch.tensor([0, 2]))
    torch.testing.assert_close(log_norm[0], logits[0].logsumexp(-1))
    assert label.tolist() == [-40.0, -50.0]
    assert best.tolist() == [15.0, 50.0]
    assert float(log_norm[1]) == pytest.approx(10.0, abs=1e-3)  # counted as if 60 above its label


def test_a_sample_meets_the_same_process_in_every_epoch_and_each_is_visited_once() -> None:
    lengths = np.random.default_rng(0).integers(10, 90, 1003)
    order = BatchOrder(lengths, 16, 5)
    stray = 0
    for epoch in range(2):
        seen: list[int] = []
        for step in range(order.steps_per_epoch):
            samples = order(epoch * order.steps_per_epoch + step)
            seen += samples.tolist()
            stray += int((samples % 2 != np.arange(len(samples)) % 2).sum())
        assert sorted(seen) == list(range(1003))
    assert stray <= 2 * 16


def test_kept_taps_are_given_back_for_known_sequences_only() -> None:
    lengths = np.array([5, 3, 4, 6])
    corpus = Corpus(np.zeros(18, np.uint32), np.array([0, 5, 8, 12]), lengths, lengths, lengths, ("a",) * 4, dropped=0)
    cache = TapCache(corpus, rank=1, world=2, size=2, device=torch.device("cpu"), dtype=torch.float32, best=3)
    assert cache.rows(np.array([0, 1]), 6) is None
    rows = cache.rows(np.array([3, 1]), 6)
    assert rows is not None
    assert not cache.knows(rows)
    taps = torch.arange(24.0).view(2, 6, 2)
    said = Teacher(torch.arange(36, dtype=torch.int32).view(2, 6, 3), torch.rand(2, 6, 3))
    cache.write(rows, rows, taps, said)
    assert cache.knows(rows)
    out = torch.empty(2, 6, 2)
    heard = said.map(torch.zeros_like)
    cache.read(rows, out, heard)
    assert torch.equal(heard.ids[0], said.ids[0])
    assert torch.equal(heard.probs[1, :3], said.probs[1, :3])
    assert torch.equal(out[0], taps[0])
    assert torch.equal(out[1, :3], taps[1, :3])
    alone = cache.rows(np.array([1]), 4)
    assert alone is not None
    out = torch.empty(1, 4, 2)
    cache.read(alone, out)
    assert torch.equal(out[0, :3], taps[1, :3])
    assert TapCache.gigabytes(corpus, 1, 2, 2, torch.float32) == pytest.approx(9 * 8 / 1e9)
    assert TapCache.gigabytes(corpus, 1, 2, 2, torch.float32, best=3) == pytest.approx(9 * (8 + 24) / 1e9)


def test_taps_kept_in_eight_bits_are_close_whatever_their_size() -> None:
    lengths = np.array([5, 3])
    corpus = Corpus(np.zeros(8, np.uint32), np.array([0, 5]), lengths, lengths, lengths, ("a",) * 2, dropped=0)
    cache = TapCache(corpus, rank=0, world=1, size=64, device=torch.device("cpu"), dtype=torch.bfloat16, parts=2)
    rows = cache.rows(np.array([1, 0]), 5)
    assert rows is not None
    # Taps differ in size by thousands, and one value of a tap may stand far out.
    sizes = torch.tensor([1e-3, 4e3]).repeat_interleave(32)
    taps = (torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)) * sizes).bfloat16()
    taps[..., 40] *= 50
    cache.write(rows, rows, taps)
    out = torch.empty_like(taps)
    cache.read(rows, out)
    for row, length in enumerate((3, 5)):
        for part in (slice(0, 32), slice(32, 64)):
            kept, real = out[row, :length, part].float(), taps[row, :length, part].float()
            assert float((kept - real).norm() / real.norm()) < 0.04
            assert float(((kept - real).abs() / real.abs().clamp(min=1e-4 * float(real.abs().max()))).max()) < 0.08
    assert TapCache.gigabytes(corpus, 0, 1, 64, torch.bfloat16, 2) == pytest.approx(8 * 72 / 1e9)


def _grown(stored: DFlashConfig, **changes: int) -> DFlashConfig:
    return DFlashConfig(**{**stored.__dict__, **changes})


def test_new_layers_change_no_draft_and_gradients_reach_them() -> None:
    target = tiny_target()
    model = tiny_drafter(tiny_drafter_config(target.config))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    grown = DFlashModel(_grown(model.config, num_hidden_layers=4))
    load_stored(grown, model.config, weights)
    batch = _batch()
    hits = [draft_everywhere(m, target, batch.ids, batch.anchors, batch.lengths)[0] for m in (model, grown)]
    assert torch.equal(*hits)
    parameters = dict(grown.named_parameters())
    assert torch.equal(parameters["layers.3.mlp.down_proj.weight"], weights["layers.1.mlp.down_proj.weight"])
    blocks = cut_blocks(batch, 4, 5)
    taps, _ = target.hidden_states(batch.ids, model.config.target_layer_ids)
    mask = dense_mask(batch.anchors, 4, batch.ids.shape[1])
    embeds = embed_blocks(blocks, target.embedding)
    draft_hidden(grown, embeds, taps, blocks.positions, mask, None).square().mean().backward()  # type: ignore[no-untyped-call]
    reached = parameters["layers.1.self_attn.o_proj.weight"].grad
    assert reached is not None
    assert reached.abs().max() > 0


def test_a_narrower_mlp_keeps_the_neurons_that_matter_and_a_wider_one_is_refused() -> None:
    target = tiny_target()
    model = tiny_drafter(tiny_drafter_config(target.config))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name in weights:
        if name.endswith("down_proj.weight"):
            weights[name][:, :15] = 0
    model.load_state_dict(weights)
    narrow = DFlashModel(_grown(model.config, intermediate_size=25))
    load_stored(narrow, model.config, weights)
    batch = _batch()
    hits = [draft_everywhere(m, target, batch.ids, batch.anchors, batch.lengths)[0] for m in (model, narrow)]
    assert torch.equal(*hits)
    with pytest.raises(ValueError, match="as many or fewer neurons"):
        load_stored(DFlashModel(_grown(model.config, intermediate_size=41)), model.config, weights)
