"""The card's weight formats on a CPU: a model whose matrices are what the card's codes stand for, in float32.

The codes are packed by the server's own code, and rows are rounded to float16 before a product as on a Turing card;
sums are float32 and K/V is not rounded. Prompts may go through whole numbers or 8-bit floats as they do on the card.
For measuring how far a format is from float32; knows no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels import fp8_rows
from serve.kernels.linear import Linear, LinearBuilder
from serve.kernels.quantize import Factors
from serve.kernels.row_codes import code_rows, integer_product, scaled
from serve.kernels.row_policy import RowPolicy
from serve.kernels.triton.pack import PackedWeight, dequantize, pack_as
from serve.model.channel_scales import NO_SCALES, ChannelScales
from serve.model.checkpoint import Checkpoint
from serve.model.config import load_model_config
from serve.model.reader import WeightReader
from serve.model.target import TargetModel, TargetSettings
from serve.model.weights_map import WeightsMap
from serve.parallel.split import Split

CPU = torch.device("cpu")
DTYPE = torch.float16


@dataclass
class PromptSwitch:
    """Whether the rows that come are a prompt's, and what those go through: ``w8a8`` or ``fp8``; halves: bytes of the
    codes of the down projection's rows (in fp8 two are 16-bit floats)."""

    on: bool = False
    kind: str = "w8a8"
    halves: int = 2


class TwinLinear(Linear):
    """A packed matrix with the face of a Linear. halves: bytes of its rows' codes while the switch is on, 0: none."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None, switch: PromptSwitch) -> None:
        super().__init__(self.product, RowPolicy(), packed.kind, (packed.rows, packed.depth), packed.nbytes)
        self.packed, self.bias, self.switch = packed, bias, switch
        self.is_down = False
        self._meant = dequantize(packed)

    def product(self, x: Tensor) -> Tensor:
        packed, halves = self.packed, self.switch.halves
        kind = self.switch.kind if self.switch.on else ""
        if kind == "fp8" and not (self.is_down and halves == 2):
            y = fp8_rows.product(*fp8_rows.code_rows(x), *fp8_rows.code_rows(self._meant)).float()
            return y if self.bias is None else y + self.bias
        if kind == "w8a8" and packed.weight_format == "int8" and packed.scale is not None:
            # The card forms the gated rows in float32; all others are float16 when they come.
            rows, scale = code_rows(x, halves) if self.is_down else code_rows(x.to(DTYPE))
            return scaled(integer_product(rows, packed.data), scale, packed.scale, self.bias)
        return F.linear(x.to(DTYPE).float(), self._meant, self.bias)


class TwinBuilder(LinearBuilder):
    """Packs matrices as the card does, and keeps them."""

    def __init__(self, weights: str, switch: PromptSwitch) -> None:
        super().__init__(weights, CPU)
        self.switch = switch

    def build(
        self, weight: Tensor, bias: Tensor | None = None, weights: str | None = None, factors: Factors | None = None
    ) -> Linear:
        packed = pack_as(weights or self.weights, weight, CPU, DTYPE, factors)
        self.kinds[packed.kind] = RowPolicy()
        return TwinLinear(packed, None if bias is None else bias.float(), self.switch)

    def describe(self) -> str:
        return "the card's " + ", ".join(self.kinds)


class CardTwin(TargetModel):
    """A model on twin matrices; ``switch`` says which of its rows are a prompt's."""

    def __init__(self, model_dir: Path, plan: WeightsMap, scales: ChannelScales = NO_SCALES) -> None:
        """Raises ModelError as the server's loader does."""
        config = load_model_config(model_dir)
        self.switch = PromptSwitch()
        builder = TwinBuilder(plan.default, self.switch)
        with Checkpoint(model_dir) as checkpoint:
            weights = WeightReader(checkpoint, Split(config), builder, plan, scales).read()
        for layer in weights.layers:
            assert isinstance(layer.down, TwinLinear)
            layer.down.is_down = True
        # The head is no matrix of prompts: it sees one row of each.
        assert isinstance(weights.head, TwinLinear)
        weights.head.switch = PromptSwitch()
        super().__init__(config, weights, TargetSettings(plan.default, CPU, torch.float32, builder.describe()))
