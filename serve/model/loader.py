"""From a model folder to a TargetModel: which format each matrix gets, whose kernels run it, and a cache of the packed.

Knows devices and options; no tensor names and no forward pass.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from serve.kernels import fp8_rows, triton
from serve.kernels.builder import choose_kernels
from serve.kernels.formats import CARD_FORMATS, HOST_FORMATS, stored_format
from serve.kernels.native.build import NativeUnavailable
from serve.kernels.native.ops import NativeLibrary
from serve.kernels.native.pack import GROUP, is_exact
from serve.kernels.triton.pack import PackedWeight
from serve.kernels.triton.tiles import FP8_CARD, NormPlan
from serve.model.channel_scales import NO_SCALES, read_channel_scales
from serve.model.checkpoint import Checkpoint
from serve.model.config import ModelConfig, load_model_config
from serve.model.errors import ModelError
from serve.model.native_check import checked_library
from serve.model.native_layers import NativeTargetModel
from serve.model.packed_cache import CacheFault, PackedCache, cache_key, cache_path, write_cache
from serve.model.reader import WeightReader
from serve.model.target import TargetModel, TargetSettings, TargetWeights
from serve.model.weights_map import BESIDE, HEAD, MATRICES, WeightsMap, check_for_card, read_weights_map
from serve.parallel.group import ALONE, RankGroup
from serve.parallel.split import Split

log = logging.getLogger(__name__)

TURING = 75
_FORMATS = {"cpu": HOST_FORMATS, "cuda": CARD_FORMATS}


@dataclass(frozen=True)
class Storage:
    """How matrices are to be kept. weights: a format of the device or ``auto``; weights_map: a file that says it matrix
    by matrix; cache: a folder that keeps packed matrices between starts; prefill: ``w8a8`` takes prompts through whole
    numbers where their matrices are int8, ``off`` does not, ``auto`` does on Turing where the weights are scaled for
    it; ``fp8`` takes them through 8-bit floats, by a second copy of the matrices."""

    weights: str = "auto"
    weights_map: Path | None = None
    cache: Path | None = None
    prefill: str = "auto"


def load_target(
    model_dir: Path,
    *,
    device: torch.device,
    weights: str = "auto",
    int8_kv: bool = False,
    group: RankGroup = ALONE,
    storage: Storage | None = None,
) -> TargetModel:
    """Loads the model in ``model_dir``, or of its matrices a rank's part; storage: in place of ``weights``, more than
    a format; int8_kv: K/V in int8, which the Triton kernels serve. Raises ModelError naming the field, file or tensor
    at fault."""
    model_dir = Path(model_dir)
    storage = storage or Storage(weights)
    split = Split(load_model_config(model_dir), group.rank, group.size)
    config = split.whole
    native = _native_library() if device.type == "cpu" else None
    plan, where = _plan(storage, device, config, model_dir, native)
    try:
        # The library's integer product takes codes that lie row by row.
        kernels = choose_kernels(plan.default, device, native, blocks=storage.prefill != "w8a8")
    except ValueError as error:
        raise ModelError(str(error)) from error
    if int8_kv and not kernels.triton:
        raise ModelError(
            "an int8 K/V cache needs the Triton kernels of a CUDA card, in a 16-bit or integer weight format"
        )
    if kernels.triton:
        check_for_card(plan, "fp16" if kernels.activation_dtype == torch.float16 else "bf16", where)
        _check_width(config.hidden_size)
    elif storage.cache is not None:
        raise ModelError("a weights cache is for the Triton kernels of a CUDA card, in a 16-bit or integer format")
    if storage.prefill == "fp8":
        _check_fp8(device, kernels.triton)
    scales = NO_SCALES if plan.scales is None else read_channel_scales(plan.scales, config)
    with Checkpoint(model_dir) as checkpoint:
        reader = WeightReader(checkpoint, split, kernels.builder, plan, scales)
        parts = reader.read() if storage.cache is None else read_through_cache(reader, model_dir, storage.cache)
    settings = TargetSettings(
        plan.default,
        device,
        kernels.activation_dtype,
        kernels.builder.describe() + (", channels scaled" if scales.by_matrix else ""),
        int8_kv,
        group,
        integer_prompts=_integer_prompts(storage.prefill, parts, kernels.triton, device, bool(scales.by_matrix)),
        fp8_prompts=storage.prefill == "fp8",
    )
    config = split.local
    if kernels.triton:
        from serve.model.triton_layers import TritonTargetModel

        return TritonTargetModel(config, parts, settings)
    # The C layers run all of a pass in one call; ranks have to add up in between, so torch runs their layers.
    if native is not None and plan.default != "fp32" and group.size == 1:
        try:
            return NativeTargetModel(config, parts, native, settings)
        except NativeUnavailable as reason:
            log.info("torch runs the layers, not native code: %s", reason)
    return TargetModel(config, parts, settings)


def _plan(
    storage: Storage, device: torch.device, config: ModelConfig, model_dir: Path, native: NativeLibrary | None
) -> tuple[WeightsMap, str]:
    """The format of every matrix, and where it is said. A map beside the weights is taken where nothing else is said;
    a format that was asked for is the default of a map that has none. Raises ModelError."""
    path, beside, asked = storage.weights_map, model_dir / BESIDE, storage.weights
    default = _resolve_weights(asked, device, config, model_dir, native)
    if path is None and beside.exists():
        if asked == "auto":
            path = beside
        else:
            log.info("weights are %s, as asked for; %s is not looked at", asked, beside)
    if path is None:
        return WeightsMap(default), "--weights"
    plan = read_weights_map(path, config.num_layers, _FORMATS[device.type], default)
    if asked != "auto" and stored_format(plan.default) != stored_format(default):
        raise ModelError(f"{path}: default is {plan.default}, but --weights {asked} was asked for")
    log.info("weights by %s: %s", path, plan.describe(config.num_layers))
    return plan, str(path)


def read_through_cache(reader: WeightReader, model_dir: Path, folder: Path) -> TargetWeights:
    """What the reader reads, from the cache in ``folder`` where one fits; else it is written there. A cache that does
    not fit, or a disk that is full, costs a line of the log."""
    builder, split = reader.builder, reader.split
    made_of = (
        reader.plan.text(split.whole.num_layers),
        reader.scales.digest,
        (split.rank, split.ranks),
        *builder.packs_for,
    )
    path = cache_path(folder, model_dir, *made_of)
    key = cache_key(model_dir, *made_of)
    if path.exists():
        try:
            with PackedCache(path, key, builder.device) as cache:
                weights = replace(reader, cache=cache).read()
            log.info("weights read from the cache %s", path)
            return weights
        except CacheFault as fault:
            log.warning("weights cache: %s; it is made anew", fault)
    weights = reader.read()
    try:
        size = write_cache(path, key, packed_matrices(weights))
        log.info("weights cache: %s written, %.2f GiB", path, size / (1 << 30))
    except OSError as error:
        log.warning("weights cache: %s cannot be written: %s; served without it", path, error.strerror or error)
    return weights


def packed_matrices(weights: TargetWeights) -> dict[str, PackedWeight]:
    """Every matrix by the name that the reader gives it."""
    from serve.model.triton_layers import skinny

    found = {HEAD: skinny(weights.head).weight}
    for index, layer in enumerate(weights.layers):
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        for name, linear in zip(MATRICES, linears, strict=True):
            found[f"model.layers.{index}.{name}"] = skinny(linear).weight
    return found


def _integer_prompts(
    prefill: str, weights: TargetWeights, triton_layers: bool, device: torch.device, scaled: bool
) -> bool:
    """Whether prompts go through whole numbers. ``auto``: on Turing, whose integer units have twice the rate, where the
    weights are scaled; without scales it costs several times what int8 weights do. Raises ModelError where that was
    asked for and cannot be."""
    if prefill in ("off", "fp8"):
        return False
    able = turing = False
    if triton_layers:
        from serve.kernels.triton.card import capability
        from serve.model.integer_prompts import able_layers

        able, turing = able_layers(weights.layers) > 0, capability(device) == TURING
    if prefill == "w8a8":
        if not able:
            raise ModelError(
                "--prefill w8a8 needs int8 matrices with a scale a row, and the Triton kernels of a CUDA card"
            )
        return True
    if able and turing:
        told = "run in int8 x int8" if scaled else "stay in 16 bits, as the weights are not scaled for int8 x int8"
        log.info("prompts %s (--prefill auto)", told)
    return able and turing and scaled


def _check_width(hidden_size: int) -> None:
    """Raises ModelError for rows that the kernels of a card do not norm."""
    try:
        NormPlan.of(hidden_size, interpreted=False)
    except ValueError as error:
        raise ModelError(f"hidden_size: {error}") from error


def _check_fp8(device: torch.device, triton_layers: bool) -> None:
    """Raises ModelError where prompts cannot go through 8-bit floats."""
    needs = "--prefill fp8 needs the Triton kernels of a CUDA card of compute capability 8.9 or more"
    if not triton_layers:
        raise ModelError(needs)
    from serve.kernels.triton.card import capability

    if capability(device) < FP8_CARD:
        raise ModelError(f"{needs}; this one has {capability(device) / 10}")
    reason = fp8_rows.fault(device)
    if reason is not None:
        raise ModelError(f"--prefill fp8: torch {torch.__version__} has no such product on this card: {reason}")


def _native_library() -> NativeLibrary | None:
    try:
        return checked_library()
    except NativeUnavailable as reason:
        log.info("torch runs the layers, not native code: %s", reason)
        return None


def _resolve_weights(
    weights: str, device: torch.device, config: ModelConfig, model_dir: Path, native: NativeLibrary | None
) -> str:
    """The format ``auto`` stands for, or the given one. Raises ModelError when this device does not serve it.

    On CUDA auto is the checkpoint's 16-bit dtype, but int8 on Turing. On a CPU it is int4, but int8 where
    the C layers run a model whose weights were not 4-bit at their source: four bits would cost agreement with it.
    """
    formats = _FORMATS.get(device.type)
    if formats is None:
        raise ModelError(f"device {device.type!r} is not served; known: {', '.join(_FORMATS)}")
    if weights == "auto":
        if device.type == "cpu":
            return "int4" if native is None or _were_four_bits(model_dir, config) else "int8"
        return _auto_on_cuda(device, config)
    if weights not in formats:
        raise ModelError(f"weights {weights!r} are not served on {device.type}; choose from {', '.join(formats)}")
    return weights


def _auto_on_cuda(device: torch.device, config: ModelConfig) -> str:
    """Turing has some 300 GB/s of memory and no bf16: int8 halves what a step reads, where the kernels for it work."""
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "int8" if triton.self_test(device).ok else "fp16"
    return "fp16" if config.dtype == "float16" else "bf16"


def _were_four_bits(model_dir: Path, config: ModelConfig) -> bool:
    """Whether 4-bit codes stand for the checkpoint's very weights; one matrix is taken for all."""
    shape = (config.hidden_size, config.intermediate_size)
    with Checkpoint(model_dir) as checkpoint:
        weight = checkpoint.take("model.layers.0.mlp.down_proj.weight", shape)
        return config.intermediate_size % GROUP == 0 and is_exact(weight, 4)
