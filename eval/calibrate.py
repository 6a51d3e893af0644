"""``python -m eval.calibrate``: finds input-channel scales for a model's quantised matrices from calibration prompts.

For every matrix the mean size of each input channel, to a power between 0 and 1, is tried as its scale, and the power
whose rounded matrix gives the nearest outputs on rows the float32 model saw is kept; 0, which is no scale, is among
them. Writes a safetensors file that a weights map names ("scales"). The search is AWQ's (Lin et al. 2024, arXiv
2306.00978), with each matrix by itself. Runs the server's own model and packing code; knows no serving.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from eval.fidelity import DEFAULT_MODEL, continue_text, next_token_logs
from eval.json_report import write_report
from eval.options import new_file
from serve.kernels.formats import CARD_FORMATS, stored_format
from serve.kernels.linear import Linear, LinearBuilder
from serve.kernels.quantize import Factors
from serve.kernels.row_codes import code_rows, integer_product, scaled
from serve.kernels.row_policy import RowPolicy
from serve.kernels.triton.pack import PackedWeight, dequantize, pack_as
from serve.model.channel_scales import LARGEST, per_query_head, scale_name
from serve.model.checkpoint import Checkpoint
from serve.model.config import ModelConfig, load_model_config
from serve.model.errors import ModelError
from serve.model.reader import WeightReader
from serve.model.target import TargetModel, TargetSettings
from serve.model.weights_map import MATRICES, WeightsMap, read_weights_map
from serve.parallel.split import Split
from serve.tokenizer import TokenizerError, load_tokenizer

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper who collects stamps.",
    "Translate to French: The train leaves at seven in the morning.",
    "def fibonacci(n):",
    "List five uses for an old newspaper.",
    "What happens to iron when it rusts?",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "Solve for x: 3x + 7 = 22. Show the steps.",
    "Give me a recipe for lentil soup.",
    "Who was Ada Lovelace and what did she write?",
    "Draft a polite email that declines an invitation.",
    "What are the planets of the solar system, from the sun outwards?",
)
"""Continued greedily; none of them is among the questions of ``eval.fidelity``."""
POWERS = tuple(step / 10 for step in range(11))
ROWS = 256
"""Rows of each matrix's input that the search compares outputs on, evenly from all that came."""


class SeenLinear(Linear):
    """A float32 matrix that keeps what came: rows [T, K], all of them until ``rows`` is read."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(self.product, RowPolicy(), "fp32", (weight.shape[0], weight.shape[1]), weight.numel() * 4)
        self.weight, self.bias = weight, bias
        self.seen: list[Tensor] = []

    def product(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return F.linear(x, self.weight, self.bias)

    def rows(self) -> Tensor:
        return torch.cat(self.seen)


class SeenBuilder(LinearBuilder):
    """Matrices in float32 that keep what came."""

    def build(
        self, weight: Tensor, bias: Tensor | None = None, weights: str | None = None, factors: Factors | None = None
    ) -> Linear:
        return SeenLinear(
            weight.float().clone().to(self.device), None if bias is None else bias.float().to(self.device)
        )


@dataclass(frozen=True)
class Found:
    """One matrix: the power that was best, the error of its outputs with it over that without, and the scales."""

    layer: int
    matrix: str
    power: float
    error: float
    scale: Tensor


def see(model_dir: Path, device: torch.device, prompts: Sequence[str], tokens: int) -> TargetModel:
    """The float32 model, having continued every prompt by ``tokens`` tokens and read each text once more."""
    config, tokenizer = load_model_config(model_dir), load_tokenizer(model_dir)
    builder = SeenBuilder("fp32", device)
    with Checkpoint(model_dir) as checkpoint:
        weights = WeightReader(checkpoint, Split(config), builder, WeightsMap("fp32")).read()
    model = TargetModel(config, weights, TargetSettings("fp32", device, torch.float32))
    texts = [continue_text(model, tokenizer.encode(one, add_special_tokens=True), tokens) for one in prompts]
    for linear in (linear for _, _, linear in matrices(model)):
        linear.seen.clear()
    for text in texts:
        next_token_logs(model, text)
    return model


def matrices(model: TargetModel) -> Iterator[tuple[int, str, SeenLinear]]:
    """Every layer's matrices with their names."""
    for index, layer in enumerate(model._parts.layers):
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        for name, linear in zip(MATRICES, linears, strict=True):
            assert isinstance(linear, SeenLinear)
            yield index, name, linear


def search(
    config: ModelConfig, matrix: str, weights: str, weight: Tensor, rows: Tensor, coded: bool = False
) -> tuple[float, float, Tensor]:
    """weight [N, K], rows [T, K] float32 -> the best power, its error over that of no scales, and the scales. coded:
    outputs are those of int8 x int8 where the matrix allows it."""
    picked = rows[:: max(1, rows.shape[0] // ROWS)]
    want = picked @ weight.t()
    size = rows.abs().mean(0)
    if matrix == "o_proj":  # query heads that share a value head share its scales
        groups = size.view(config.num_kv_heads, -1, config.head_dim)
        size = groups.mean(1).flatten()
    size = size.clamp_min(1e-4 * float(size.max()) or 1.0)
    best, plain = (0.0, float("inf"), torch.ones_like(size)), 0.0
    for power in POWERS:
        scale = size**power
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp_(1 / LARGEST, LARGEST)
        columns = per_query_head(scale, config) if matrix == "o_proj" else scale
        packed = pack_as(weights, weight, weight.device, torch.float16, Factors(columns=columns))
        error = float((_outputs(packed, picked / columns, coded, matrix) - want).square().mean())
        plain = error if power == 0 else plain
        if error < best[1]:
            best = (power, error, scale)
    return best[0], best[1] / plain if plain else 1.0, best[2]


def _outputs(packed: PackedWeight, rows: Tensor, coded: bool, matrix: str) -> Tensor:
    if not coded or packed.weight_format != "int8" or packed.scale is None:
        return rows @ dequantize(packed).t()
    codes, scale = code_rows(rows, 2 if matrix == "down_proj" else 1)
    return scaled(integer_product(codes, packed.data), scale, packed.scale, None)


def calibrate(model: TargetModel, plan: WeightsMap, coded: bool = False) -> list[Found]:
    """Every matrix that is stored in integers, in its own format; the model must have seen its prompts."""
    found = []
    for layer, matrix, linear in matrices(model):
        weights = plan.layer(layer, matrix)
        if stored_format(weights).integer:
            best = search(model.config, matrix, weights, linear.weight, linear.rows(), coded)
            found.append(Found(layer, matrix, *best))
    return found


def table(found: Sequence[Found]) -> list[str]:
    """One line a kind of matrix."""
    lines = [
        f"{'matrix':14}{'count':>6}{'scaled':>8}{'mean power':>12}{'squared error of outputs, of that before':>44}"
    ]
    for matrix in MATRICES:
        own = [one for one in found if one.matrix == matrix]
        if own:
            count = sum(one.power > 0 for one in own)
            power, error = (sum(getattr(one, name) for one in own) / len(own) for name in ("power", "error"))
            lines.append(f"{matrix:14}{len(own):>6}{count:>8}{power:>12.2f}{error:>34.3f}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.calibrate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="the .safetensors file to write")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="model folder (default: the default model)")
    parser.add_argument("--weights", default="int4-g64", help="format of a CUDA card (default: int4-g64)")
    parser.add_argument("--weights-map", type=Path, help="formats by layer and matrix, in place of --weights")
    parser.add_argument("--matrices", default=",".join(MATRICES), help="which may be scaled, comma-separated")
    parser.add_argument("--prompts", type=Path, help="text file, one prompt a line (default: twelve built in)")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each continuation (default: 60)")
    parser.add_argument("--w8a8", action="store_true", help="for prompts in int8 x int8: rows are rounded too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--json", type=new_file, help="write every matrix's power and error here")
    args = parser.parse_args(argv)
    names = args.matrices.split(",")
    if args.out.suffix != ".safetensors":
        parser.error(f"OUT must end in .safetensors, got {args.out}")
    if args.tokens < 1:
        parser.error(f"--tokens must be at least 1, got {args.tokens}")
    if unknown := sorted(set(names) - set(MATRICES)):
        parser.error(f"--matrices: {unknown[0]!r} is none of {', '.join(MATRICES)}")
    if args.weights not in CARD_FORMATS or not stored_format(args.weights).integer:
        parser.error(f"--weights must be an integer format of {', '.join(CARD_FORMATS)}, got {args.weights}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA card is visible")
    try:
        prompts = PROMPTS if args.prompts is None else [one for one in args.prompts.read_text().splitlines() if one]
        plan = WeightsMap(args.weights)
        if args.weights_map is not None:
            layers = load_model_config(args.model).num_layers
            plan = read_weights_map(args.weights_map, layers, CARD_FORMATS, args.weights)
        model = see(args.model, torch.device(args.device), prompts, args.tokens)
        found = [one for one in calibrate(model, plan, args.w8a8) if one.matrix in names]
        kept = {scale_name(one.layer, one.matrix): one.scale.cpu() for one in found if one.power > 0}
        about = {"format": plan.text(model.config.num_layers), "prompts": str(len(prompts)), "tokens": str(args.tokens)}
        save_file(kept, args.out, about)
    except (ModelError, TokenizerError, OSError, ValueError) as fault:
        parser.error(str(fault))
    print("\n".join(table(found)))
    print(f"{len(kept)} matrices scaled, written to {args.out}")
    if args.json:
        rows = [{"layer": one.layer, "matrix": one.matrix, "power": one.power, "error": one.error} for one in found]
        write_report(args.json, {**about, "matrices": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
