"""The drafter a run starts from: its shape after the recipe and the target, and its first weights.

Starting from copies of target layers is worth more than any other choice at small scale. A copied layer's input norm is
folded into its q, k and v columns (and the drafter's norms start at one), so that the context, which does not pass the
layer's input norm, reaches k and v as it did in the target. A target without q/k norm gets norm weights that restore
the typical size of its queries and keys. This file knows no optimiser and no data beyond a few probe sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_train.recipe import DraftConfig, InitConfig
from drafter_train.target import Target, TargetConfig, project
from serve.drafter.checkpoint import TargetFacts, load_drafter
from serve.drafter.dflash import DFlashConfig, DFlashModel, default_target_layer_ids


def draft_config(draft: DraftConfig, target: TargetConfig) -> DFlashConfig:
    """The drafter's shape: what the recipe leaves open follows the target. Raises ValueError."""
    ids = draft.target_layer_ids or default_target_layer_ids(target.num_layers, draft.taps)
    if len(set(ids)) != len(ids) or not all(0 <= i < target.num_layers for i in ids):
        raise ValueError(f"target_layer_ids {list(ids)} must be different layers of 0..{target.num_layers - 1}")
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise ValueError(f"mask_token_id {draft.mask_token_id} is outside the vocabulary of {target.vocab_size}")
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=draft.intermediate_size or target.intermediate_size,
        num_hidden_layers=draft.layers,
        num_attention_heads=draft.num_attention_heads or target.num_heads,
        num_key_value_heads=draft.num_key_value_heads or target.num_kv_heads,
        head_dim=draft.head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        block_size=draft.block_size,
        mask_token_id=draft.mask_token_id,
        target_layer_ids=tuple(ids),
        num_target_layers=target.num_layers,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_ids[0] if target.eos_token_ids else None,
    )


def target_facts(target: Target) -> TargetFacts:
    config = target.config
    return TargetFacts(
        config.hidden_size,
        config.num_layers,
        config.vocab_size,
        embedding=target.embedding.__getitem__,
        lm_head=target.lm_head.__getitem__,
    )


def build_drafter(config: DFlashConfig, init: InitConfig, target: Target, probe: Tensor, seed: int) -> DFlashModel:
    """A float32 drafter on the target's device. ``probe`` [S, L] holds ids without padding, used only to measure the
    size of the target's queries and keys. Raises ValueError when the start does not fit the shape."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DFlashModel(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.data /= (2 * config.num_hidden_layers) ** 0.5
    model.to(device=target.device, dtype=torch.float32)
    if init.source == "checkpoint":
        stored, weights = load_drafter(str(init.checkpoint), target_facts(target))
        if stored.target_layer_ids != config.target_layer_ids or stored.mask_token_id != config.mask_token_id:
            raise ValueError(
                f"init.checkpoint has target_layer_ids {list(stored.target_layer_ids)} and mask_token_id "
                f"{stored.mask_token_id}, the recipe {list(config.target_layer_ids)} and {config.mask_token_id}"
            )
        load_stored(model, stored, {name: tensor.float() for name, tensor in weights.items()})
    elif init.source == "target_layers":
        layers = init.layers
        if layers is None:
            layers = tuple(range(target.config.num_layers - config.num_hidden_layers, target.config.num_layers))
        copy_target_layers(model, target, layers, probe)
    return model


@torch.no_grad()
def load_stored(model: DFlashModel, stored: DFlashConfig, weights: dict[str, Tensor]) -> None:
    """Load a stored drafter into ``model``, which may have more layers and a narrower MLP. New layers stand before the
    last one: copies of it whose output projections are zero, so that they change nothing yet. Of the MLP the neurons
    with the largest product of norms stay. Raises ValueError for any other difference."""
    config = model.config
    have, want = stored.num_hidden_layers, config.num_hidden_layers
    if have > want or stored.intermediate_size < config.intermediate_size:
        raise ValueError(
            f"init.checkpoint has {have} layers with MLPs of {stored.intermediate_size}; the recipe's {want} layers of "
            f"{config.intermediate_size} must be as many or more, of as many or fewer neurons"
        )
    state = {name: weights[name] for name in ("fc.weight", "hidden_norm.weight", "norm.weight")}
    for i in range(want):
        source = f"layers.{i if i < have - 1 else have - 1}."
        part = {name.removeprefix(source): t for name, t in weights.items() if name.startswith(source)}
        gate, up, down = (part[f"mlp.{which}_proj.weight"] for which in ("gate", "up", "down"))
        kept = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(config.intermediate_size).indices
        kept = kept.sort().values
        part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"] = gate[kept], up[kept]
        part["mlp.down_proj.weight"] = down[:, kept]
        if have - 1 <= i < want - 1:
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                part[name] = torch.zeros_like(part[name])
        state |= {f"layers.{i}.{name}": tensor for name, tensor in part.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"init.checkpoint does not fit the recipe's draft: {error}") from None


@torch.no_grad()
def copy_target_layers(model: DFlashModel, target: Target, layers: tuple[int, ...], probe: Tensor) -> None:
    """Overwrite the drafter's weights with target layers ``layers`` (one per draft layer)."""
    config, source = model.config, target.config
    if len(layers) != config.num_hidden_layers:
        raise ValueError(f"init.layers names {len(layers)} target layers for {config.num_hidden_layers} draft layers")
    for what, ours, theirs in (
        ("intermediate_size", config.intermediate_size, source.intermediate_size),
        ("num_attention_heads", config.num_attention_heads, source.num_heads),
        ("num_key_value_heads", config.num_key_value_heads, source.num_kv_heads),
        ("head_dim", config.head_dim, source.head_dim),
    ):
        if ours != theirs:
            raise ValueError(f"init.source target_layers: the drafter's {what} is {ours}, the target's {theirs}")
    sizes = [
        source.num_heads * source.head_dim,
        source.num_kv_heads * source.head_dim,
        source.num_kv_heads * source.head_dim,
    ]
    inputs = [i - 1 for i in layers if i > 0]
    before, _ = target.hidden_states(probe, inputs)
    states = dict(zip(inputs, torch.split(before, source.hidden_size, dim=-1), strict=True)) if inputs else {}
    states[-1] = F.embedding(probe, target.embedding)
    for layer, i in zip(model.layers, layers, strict=True):
        origin = target.layers[i]
        if origin.qkv_bias is not None:
            raise ValueError("init.source target_layers: this target has attention biases, which DFlash layers lack")
        columns = origin.input_norm.float()
        q, k, v = torch.split(origin.qkv.float(), sizes)
        parts = dict(layer.named_parameters())
        parts["self_attn.q_proj.weight"].copy_(q * columns)
        parts["self_attn.k_proj.weight"].copy_(k * columns)
        parts["self_attn.v_proj.weight"].copy_(v * columns)
        parts["self_attn.o_proj.weight"].copy_(origin.out.float())
        parts["input_layernorm.weight"].fill_(1.0)
        parts["post_attention_layernorm.weight"].copy_(origin.post_norm.float())
        gate, up = origin.gate_up.float().chunk(2)
        parts["mlp.gate_proj.weight"].copy_(gate)
        parts["mlp.up_proj.weight"].copy_(up)
        parts["mlp.down_proj.weight"].copy_(origin.down.float())
        queries, keys, _ = project(states[i - 1], *origin[:5], target.shape)
        for norm, rows, own in (("q_norm", queries, origin.q_norm), ("k_norm", keys, origin.k_norm)):
            weight = parts[f"self_attn.{norm}.weight"]
            if own is not None:
                weight.copy_(own.float())
            else:
                # The first position's states are an outlier in most models; leave it out of the average.
                weight.fill_(float(rows[:, 1:].float().pow(2).mean(-1).sqrt().mean()))
    model.hidden_norm.weight.fill_(1.0)
    model.norm.weight.copy_(target.final_norm.float())
    nearest = min(range(len(config.target_layer_ids)), key=lambda j: abs(config.target_layer_ids[j] - layers[-1] + 1))
    model.fc.weight.zero_()
    start = nearest * config.hidden_size
    model.fc.weight[:, start : start + config.hidden_size].copy_(torch.eye(config.hidden_size))
