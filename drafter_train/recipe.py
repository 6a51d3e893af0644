"""The recipe: one YAML file, checked into frozen dataclasses, with ``--set a.b=value`` on top.

Unknown keys and wrong types are errors that name the key. This file knows what the settings mean, not how they are
carried out.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

T = TypeVar("T")


@dataclass(frozen=True)
class PassConfig:
    """One way of answering every prompt (or the first ``share`` of them). ``sampled_tokens`` [low, high]: how many
    leading tokens are sampled, drawn per prompt; [0, 0] is greedy, a huge number samples everything."""

    sampled_tokens: tuple[int, ...] = (0, 0)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 20
    share: float = 1.0


@dataclass(frozen=True)
class DataConfig:
    """Token stores and how they are read. Lengths are in tokens."""

    tokens: str = "runs/tokens"
    eval_tokens: str = "runs/eval_tokens"
    prompts: str = "runs/prompts.jsonl"
    eval_prompts: str = "runs/eval_prompts.jsonl"
    thinking: str = "default"
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 256
    max_length: int = 1280
    passes: tuple[PassConfig, ...] = (PassConfig(),)
    anchors_in_sampled: bool = True


@dataclass(frozen=True)
class DraftConfig:
    """Shape of the drafter; what is None follows the target (or the layout's rule for target_layer_ids)."""

    layers: int = 2
    block_size: int = 8
    mask_token_id: int = 0
    taps: int = 5
    target_layer_ids: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True)
class InitConfig:
    """Where training starts: ``random``, ``target_layers`` (copies of the listed target layers, in order; None is the
    last ones) or ``checkpoint`` (a DFlash folder)."""

    source: str = "target_layers"
    layers: tuple[int, ...] | None = None
    checkpoint: str | None = None


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation. One of max_steps, epochs, max_seconds ends the run, whichever comes first (0 is no limit).
    ``fused``: Triton kernels and CUDA graphs where there is a CUDA device and they agree with the plain step.
    ``tap_cache_gb``: keep the target's taps of all tokens on the device when a process's share fits in this, with
    ``tap_cache_bits`` 16 or 8 bits a value.
    ``kl_weight``: how much of a label is replaced by the target's distribution over its ``kl_top`` likeliest tokens.
    ``replay_weight``: how much likelier a block starts where a round of speculative decoding did (``replay`` says)."""

    output: str = "runs/drafter"
    seed: int = 0
    batch_sequences: int = 64
    micro_sequences: int = 64
    anchors: int = 64
    epochs: float = 0.0
    max_steps: int = 0
    max_seconds: float = 0.0
    optimizer: str = "adamw"
    lr: float = 1e-3
    adam_lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    warmup: float = 0.04
    final_lr: float = 0.02
    clip: float = 1.0
    loss: str = "dpace"
    dpace_alpha: float = 0.5
    decay_gamma: float = 4.0
    decay_until: float = 0.1
    kl_weight: float = 0.0
    kl_top: int = 16
    head_rows: int = 8192
    attention: str = "auto"
    fused: bool = True
    tap_cache_gb: float = 0.0
    tap_cache_bits: int = 16
    replay_weight: float = 1.0
    precision: str = "auto"
    log_every: int = 20
    eval_every: int = 0
    eval_sequences: int = 96
    save_every_seconds: float = 120.0
    keep_checkpoints: int = 2
    trackers: tuple[str, ...] = ()
    first_position_floor: float = 0.0


@dataclass(frozen=True)
class PublishConfig:
    """What the model card says besides what is measured, and where the drafter goes. ``repo`` is OWNER/NAME on the hub
    (its token is then checked before training starts), ``data`` is markdown naming the prompt sources and licences."""

    repo: str = ""
    base_model: str = ""
    base_revision: str = ""
    license: str = "apache-2.0"
    data: str = ""


_FREE_TO_CHANGE = (
    "output",
    "max_seconds",
    "max_steps",
    "epochs",
    "fused",
    "tap_cache_gb",
    "tap_cache_bits",
    "log_every",
    "eval_every",
    "eval_sequences",
    "save_every_seconds",
    "keep_checkpoints",
    "trackers",
    "first_position_floor",
)


@dataclass(frozen=True)
class Recipe:
    """Everything one drafter is made from."""

    name: str
    target: str
    data: DataConfig = field(default_factory=DataConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    init: InitConfig = field(default_factory=InitConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def sha256(self) -> str:
        """Hash of what a resumed run must not have changed: everything but how long, how often and where."""
        data = self.to_json()
        del data["publish"]
        for name in _FREE_TO_CHANGE:
            del data["train"][name]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _convert(value: Any, kind: Any, where: str) -> Any:
    """``value`` from YAML as ``kind`` (a dataclass, tuple[X, ...], X | None or a plain type)."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build(kind, value, where)
    options = get_args(kind)
    if type(None) in options:
        return None if value is None else _convert(value, next(o for o in options if o is not type(None)), where)
    if getattr(kind, "__origin__", None) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return tuple(_convert(item, options[0], f"{where}[{i}]") for i, item in enumerate(value))
    if kind is float and isinstance(value, str):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            raise ValueError(f"{where} must be a number, got {value!r}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        hint = (
            " (YAML reads on, off, yes and no as that: quote them)" if kind is str and isinstance(value, bool) else ""
        )
        raise ValueError(f"{where} must be {kind.__name__}, got {value!r}{hint}")
    return value


def _build(kind: type[T], data: Any, where: str) -> T:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where or 'the recipe'} must be a mapping, got {data!r}")
    hints = get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"unknown setting {where + '.' if where else ''}{unknown[0]}; known: {', '.join(hints)}")
    prefix = where + "." if where else ""
    return kind(**{name: _convert(value, hints[name], prefix + name) for name, value in data.items()})


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Parse a YAML recipe and apply ``section.key=value`` overrides (values in YAML). Raises ValueError."""
    data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a mapping")
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"--set wants section.key=value, got {override!r}")
        *sections, key = name.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"--set {name}: {section} is not a section")
        place[key] = yaml.safe_load(text)
    recipe = _build(Recipe, data, "")
    _check(recipe)
    return recipe


# Lowest and highest value of numbers that would end in a fault, a silent nothing or an endless run beyond them.
_LIMITS: dict[str, dict[str, tuple[float, float]]] = {
    "data": {"max_prompt_tokens": (1, inf), "max_new_tokens": (1, inf), "max_length": (1, inf)},
    "draft": {"layers": (1, 64), "taps": (1, 64)},
    "train": {
        "seed": (0, inf),
        "anchors": (1, inf),
        "epochs": (0, inf),
        "max_steps": (0, inf),
        "max_seconds": (0, inf),
        "weight_decay": (0, inf),
        "warmup": (0, 1),
        "final_lr": (0, 1),
        "dpace_alpha": (0, 1),
        "decay_until": (0, 1),
        "head_rows": (1, inf),
        "tap_cache_gb": (0, inf),
        "log_every": (1, inf),
        "eval_every": (0, inf),
        "eval_sequences": (1, inf),
        "save_every_seconds": (0, inf),
        "keep_checkpoints": (1, inf),
    },
}
_ABOVE_ZERO = ("lr", "adam_lr", "clip", "decay_gamma", "replay_weight")


def _check_numbers(recipe: Recipe) -> None:
    for section, limits in _LIMITS.items():
        for name, (low, high) in limits.items():
            value = getattr(getattr(recipe, section), name)
            if not low <= value <= high:
                wanted = f"at least {low}" if high == inf else f"between {low} and {high}"
                raise ValueError(f"{section}.{name} must be {wanted}, got {value}")
    for name in _ABOVE_ZERO:
        if not getattr(recipe.train, name) > 0:
            raise ValueError(f"train.{name} must be above 0, got {getattr(recipe.train, name)}")
    betas = recipe.train.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"train.betas must be two numbers from 0 to below 1, got {list(betas)}")


def _check(recipe: Recipe) -> None:
    train, draft = recipe.train, recipe.draft
    _check_numbers(recipe)
    choices = {
        "train.loss": (train.loss, ("dpace", "decay")),
        "train.optimizer": (train.optimizer, ("adamw", "muon")),
        "train.attention": (train.attention, ("auto", "dense", "flex")),
        "train.precision": (train.precision, ("auto", "bf16", "fp32")),
        "init.source": (recipe.init.source, ("random", "target_layers", "checkpoint")),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if recipe.init.source == "checkpoint" and not recipe.init.checkpoint:
        raise ValueError("init.source is checkpoint, so init.checkpoint must name a folder")
    if not (train.max_steps or train.epochs or train.max_seconds):
        raise ValueError("one of train.max_steps, train.epochs and train.max_seconds must end the run")
    if not 0 <= train.kl_weight <= 1 or train.kl_top < 1:
        raise ValueError(
            "train.kl_weight must be between 0 and 1 and train.kl_top at least 1, got "
            f"{train.kl_weight} and {train.kl_top}"
        )
    if train.tap_cache_bits not in (8, 16):
        raise ValueError(f"train.tap_cache_bits must be 8 or 16, got {train.tap_cache_bits}")
    if train.micro_sequences > train.batch_sequences or train.micro_sequences < 1:
        raise ValueError(
            f"train.micro_sequences must be between 1 and train.batch_sequences {train.batch_sequences}, "
            f"got {train.micro_sequences}"
        )
    if not 2 <= draft.block_size <= 64:
        raise ValueError(f"draft.block_size must be between 2 and 64, got {draft.block_size}")
    for i, item in enumerate(recipe.data.passes):
        if len(item.sampled_tokens) != 2 or not 0 <= item.sampled_tokens[0] <= item.sampled_tokens[1]:
            raise ValueError(f"data.passes[{i}].sampled_tokens must be [low, high], got {list(item.sampled_tokens)}")


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """``--config`` and ``--set``, the same for every command of this folder."""
    parser.add_argument("--config", required=True, help="YAML recipe, e.g. drafter_train/configs/smollm2-135m.yaml")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change one setting of the recipe; may be given many times",
    )


def recipe_from(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Recipe:
    """The recipe the arguments name; bad settings end the process with a message (exit 2)."""
    try:
        return load_recipe(arguments.config, arguments.overrides)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(f"{arguments.config}: {error}")
