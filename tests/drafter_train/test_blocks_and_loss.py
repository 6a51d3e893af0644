"""Training blocks see what serving sees, and the chunked loss is the plain loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_train.blocks import cut_blocks, dense_mask, draft_hidden, embed_blocks, flex_attend
from drafter_train.corpus import Batch
from drafter_train.loss import Weighting, head_loss, teacher_of
from drafter_train.stepper import before_labels
from tests.drafter_train.tiny_models import tiny_drafter, tiny_drafter_config, tiny_target


def _batch(vocab: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(6, vocab, (2, 24), generator=generator)
    return Batch(
        ids=ids,
        lengths=torch.tensor([24, 15]),
        anchors=torch.tensor([[3, 7, 20, 22], [2, 12, 13, 0]]),
        valid=torch.tensor([[True] * 4, [True, True, True, False]]),
    )


def test_every_block_of_a_packed_forward_equals_that_block_alone_with_its_own_context() -> None:
    target = tiny_target()
    model = tiny_drafter(tiny_drafter_config(target.config))
    batch = _batch(target.config.vocab_size)
    config = model.config
    blocks = cut_blocks(batch, config.block_size, config.mask_token_id)
    taps, _ = target.hidden_states(batch.ids, config.target_layer_ids)
    mask = dense_mask(batch.anchors, config.block_size, batch.ids.shape[1])
    packed = draft_hidden(model, embed_blocks(blocks, target.embedding), taps, blocks.positions, mask, None)
    for s in range(2):
        for n in range(4):
            if not batch.valid[s, n]:
                continue
            anchor = int(batch.anchors[s, n])
            ids = torch.tensor([int(batch.ids[s, anchor])] + [config.mask_token_id] * (config.block_size - 1))
            # Taps from the committed prefix alone, as a server would have them: nothing later can leak in.
            prefix_taps, _ = target.hidden_states(batch.ids[s : s + 1, :anchor], config.target_layer_ids)
            alone = model(
                F.embedding(ids, target.embedding)[None],
                model.fuse(prefix_taps),
                torch.arange(anchor, anchor + config.block_size)[None],
                torch.arange(anchor)[None],
            )
            torch.testing.assert_close(packed[s, n], alone[0], atol=2e-5, rtol=1e-4)


def test_taps_shifted_by_one_layer_change_the_drafts() -> None:
    target = tiny_target()
    model = tiny_drafter(tiny_drafter_config(target.config))
    batch = _batch(target.config.vocab_size)
    right, _ = target.hidden_states(batch.ids, (0, 2))
    wrong, _ = target.hidden_states(batch.ids, (1, 3))
    assert (model.fuse(right) - model.fuse(wrong)).abs().max() > 1e-2


def test_labels_stop_at_the_end_of_the_sequence_and_at_unused_anchors() -> None:
    batch = _batch(61)
    blocks = cut_blocks(batch, 4, 5)
    assert blocks.valid[0, 2].tolist() == [True, True, True]
    assert blocks.valid[0, 3].tolist() == [True, False, False]
    assert blocks.valid[1, 2].tolist() == [True, False, False]
    assert not blocks.valid[1, 3].any()
    assert blocks.ids[0, 0].tolist() == [int(batch.ids[0, 3]), 5, 5, 5]
    assert blocks.labels[0, 0].tolist() == batch.ids[0, 4:7].tolist()


def test_the_teacher_speaks_one_position_before_each_label() -> None:
    target = tiny_target()
    ids = torch.tensor([[5, 9, 11]])
    for _ in range(21):  # greedy text: the target's likeliest token after each position is the next one
        _, final = target.hidden_states(ids, ())
        ids = torch.cat((ids, (final[:, -1] @ target.lm_head.T).argmax(-1, keepdim=True)), dim=1)
    batch = Batch(ids, torch.tensor([24]), torch.tensor([[3, 7, 16, 22]]), torch.tensor([[True] * 4]))
    blocks = cut_blocks(batch, 4, 0)
    teacher = before_labels(teacher_of(target.hidden_states(ids, ())[1], target.lm_head, 3, rows=5), blocks)
    assert teacher is not None
    valid = blocks.valid.flatten(0, 1)
    assert torch.equal(teacher.ids[..., 0][valid].long(), blocks.labels.flatten(0, 1)[valid])
    torch.testing.assert_close(teacher.probs.sum(-1), torch.ones(4, 3))


def test_flex_attention_sees_what_the_dense_mask_sees() -> None:
    target = tiny_target()
    model = tiny_drafter(tiny_drafter_config(target.config))
    batch = _batch(target.config.vocab_size)
    config = model.config
    blocks = cut_blocks(batch, config.block_size, config.mask_token_id)
    taps, _ = target.hidden_states(batch.ids, config.target_layer_ids)
    embeds = embed_blocks(blocks, target.embedding)
    mask = dense_mask(batch.anchors, config.block_size, batch.ids.shape[1])
    dense = draft_hidden(model, embeds, taps, blocks.positions, mask, None)
    attend = flex_attend(batch.anchors, config.block_size, batch.ids.shape[1], compiled=False)
    with torch.no_grad():  # flex attention has no backward on a CPU
        flex = draft_hidden(model, embeds, taps, blocks.positions, None, attend)
    used = batch.valid
    torch.testing.assert_close(flex[used], dense[used], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.4])
def test_chunked_head_loss_and_gradient_equal_the_plain_ones(kind: str, kl_weight: float) -> None:
    torch.manual_seed(0)
    blocks, size, hidden_size, vocab = 7, 3, 16, 29
    hidden = torch.randn(blocks, size, hidden_size, requires_grad=True)
    states = torch.randn(blocks, size, hidden_size)
    head = torch.randn(vocab, hidden_size)
    labels = torch.randint(0, vocab, (blocks, size))
    valid = torch.tensor([[True, True, True]] * 5 + [[True, False, False], [False] * 3])
    weighting = Weighting(kind, 0.5, 4.0)
    teacher = teacher_of(states, head, 5, rows=4) if kl_weight else None
    sums = head_loss(hidden, head, labels, valid, weighting, teacher=teacher, kl_weight=kl_weight, rows=6)
    (sums.loss / sums.weight).backward()  # type: ignore[no-untyped-call]
    got = hidden.grad
    assert got is not None

    again = hidden.detach().clone().requires_grad_()
    logits = again @ head.T
    log_probs = logits.log_softmax(-1)
    label_log_probs = log_probs.gather(-1, labels[..., None])[..., 0]
    weights = weighting.weights(label_log_probs.exp().detach(), valid)
    said = states @ head.T
    soft = said.masked_fill(said < said.topk(5, dim=-1).values[..., -1:], -torch.inf).softmax(-1)
    rows = -(1 - kl_weight) * label_log_probs - kl_weight * (soft * log_probs).sum(-1)
    expected = (rows * weights).sum() / weights.sum()
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(sums.loss / sums.weight, expected.detach())
    assert again.grad is not None
    torch.testing.assert_close(got, again.grad, atol=1e-6, rtol=1e-4)
    best = logits.argmax(-1) == labels
    assert sums.correct.tolist() == (best & valid).sum(0).tolist()
    assert int(sums.accepted) == int((best & valid).long().cumprod(1).sum())
    assert int(sums.blocks) == 6


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.05, 0.95))
@settings(max_examples=60, deadline=None)
def test_dpace_weight_is_the_expected_number_of_positions_reached_from_here(probs: list[float], alpha: float) -> None:
    valid = torch.ones(1, len(probs), dtype=torch.bool)
    weights = Weighting("dpace", alpha).weights(torch.tensor([probs]), valid)[0].tolist()
    mixed = [(1 - alpha) * p + alpha for p in probs]
    for j in range(len(probs)):
        expected, reach = 0.0, 1.0
        for m, value in enumerate(mixed):
            reach *= value
            expected += reach if m >= j else 0.0
        assert weights[j] == pytest.approx(expected, rel=1e-4)
