"""Small random targets and drafters made in the test, with no files from elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from drafter_train.target import Target, TargetConfig
from serve.drafter.dflash import DFlashConfig, DFlashModel


def tiny_target_config(layers: int = 4, vocab: int = 61) -> TargetConfig:
    return TargetConfig(
        model_type="llama",
        hidden_size=32,
        intermediate_size=48,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=vocab,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=512,
        tied=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def tiny_target(layers: int = 4, vocab: int = 61, seed: int = 0, scale: float = 0.3) -> Target:
    config = tiny_target_config(layers, vocab)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights: dict[str, Tensor] = {"embed_tokens.weight": draw(vocab, 32), "norm.weight": 1 + draw(32) * 0.1}
    for i in range(layers):
        stem = f"layers.{i}."
        weights |= {
            stem + "input_layernorm.weight": 1 + draw(32) * 0.3,
            stem + "post_attention_layernorm.weight": 1 + draw(32) * 0.3,
            stem + "self_attn.q_proj.weight": draw(32, 32),
            stem + "self_attn.k_proj.weight": draw(16, 32),
            stem + "self_attn.v_proj.weight": draw(16, 32),
            stem + "self_attn.o_proj.weight": draw(32, 32),
            stem + "mlp.gate_proj.weight": draw(48, 32),
            stem + "mlp.up_proj.weight": draw(48, 32),
            stem + "mlp.down_proj.weight": draw(32, 48),
        }
    return Target(config, weights, torch.device("cpu"), torch.float32)


def tiny_drafter_config(target: TargetConfig, block_size: int = 4, layers: int = 2) -> DFlashConfig:
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=5,
        target_layer_ids=(0, 2),
        num_target_layers=target.num_layers,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
    )


def tiny_drafter(config: DFlashConfig, seed: int = 1, scale: float = 0.3) -> DFlashModel:
    torch.manual_seed(seed)
    model = DFlashModel(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=scale)
    return model
