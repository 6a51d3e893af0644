"""Which format each matrix is stored in: one for all, or a JSON file that names layers and matrices.

    {"default": "int4-g64", "layers": {"0": "int8", "32-35": "int8", "*.down_proj": "int8", "lm_head": "int8"}}

A key is a layer, a range of layers or ``*``, with or without a matrix (MATRICES); or ``lm_head``. A later key wins over
an earlier one. "scales" names a file of input-channel scales beside the map (see channel_scales). Knows names and
bytes; no tensors and no kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from serve.json_file import shown
from serve.kernels.formats import StoredFormat, stored_format
from serve.model.config import read_json
from serve.model.errors import ModelError

MATRICES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""A layer's matrices as they are stored: those that read the same rows are one."""
HEAD = "lm_head"
BESIDE = "weights_map.json"
"""The map that lies beside the weights, taken where the operator names neither a map nor a format."""
_PARTS = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
_KEY = re.compile(r"(?P<first>\d{1,6})(?:-(?P<last>\d{1,6}))?|\*")


@dataclass(frozen=True)
class WeightsMap:
    """entries: (key's text, first layer, last layer, matrix or None for all, format), the last that fits wins; head:
    the head's format, None for the one that goes with the default; scales: the file of channel scales, if any."""

    default: str
    entries: tuple[tuple[str, int, int, str | None, str], ...] = ()
    head: str | None = None
    scales: Path | None = None

    def layer(self, index: int, matrix: str) -> str:
        """The format of one matrix of a layer."""
        found = [
            form for _, first, last, name, form in self.entries if first <= index <= last and name in (None, matrix)
        ]
        return found[-1] if found else self.default

    @property
    def head_format(self) -> str:
        """Four bits in the head cost far more agreement with float32 than its bytes save: on the default model 86 % of
        greedy tokens agree with a 4-bit head, 98 % with an 8-bit one. Groups are not looked up row by row."""
        if self.head is not None:
            return self.head
        return "int8" if stored_format(self.default).integer else self.default

    def counts(self, num_layers: int, matrix: str) -> dict[str, int]:
        """In how many layers the matrix has each format."""
        found: dict[str, int] = {}
        for index in range(num_layers):
            form = self.layer(index, matrix)
            found[form] = found.get(form, 0) + 1
        return found

    def text(self, num_layers: int) -> str:
        """Every format by matrix: the same text for maps that mean the same."""
        rows = [",".join(self.layer(index, matrix) for matrix in MATRICES) for index in range(num_layers)]
        return ";".join([*rows, self.head_format])

    def describe(self, num_layers: int) -> str:
        """How many matrices each format has."""
        counts: dict[str, int] = {}
        for matrix in MATRICES:
            for form, count in self.counts(num_layers, matrix).items():
                counts[form] = counts.get(form, 0) + count
        body = ", ".join(f"{count} matrices {form}" for form, count in counts.items())
        return f"{body}, head {self.head_format}"


def read_weights_map(path: Path, num_layers: int, formats: tuple[str, ...], default: str | None) -> WeightsMap:
    """The map in ``path`` for a model of ``num_layers`` layers on a device that serves ``formats``. default: the format
    of what it does not name where it has no default itself. Raises ModelError with the field at fault."""
    data = read_json(path)
    unknown = sorted(data.keys() - {"default", "layers", "scales"})
    if unknown:
        raise ModelError(f"{path}: {shown(unknown[0])} is not a field of a weights map (default, layers, scales)")
    given = data.get("default", default)
    if given is None:
        raise ModelError(f"{path}: default is missing; give it or --weights")
    chosen = _format(f"{path}: default", given, formats)
    layers = data.get("layers", {})
    if not isinstance(layers, dict):
        raise ModelError(f"{path}: layers must be an object, got {shown(layers)}")
    entries, head = [], None
    for key, value in layers.items():
        field = f"{path}: layers[{shown(key)}]"
        form = _format(field, value, formats)
        if key == HEAD:
            head = form
        else:
            entries.append((key, *_span(field, key, num_layers), form))
    scales = data.get("scales")
    if scales is not None and not _plain(scales):
        raise ModelError(f"{path}: scales must name a .safetensors file beside the map, got {shown(scales)}")
    return WeightsMap(chosen, tuple(entries), head, path.parent / scales if scales is not None else None)


def check_for_card(plan: WeightsMap, activations: str, where: str) -> None:
    """Raises ModelError where a format cannot be mixed with the others on a card: floats must be those it computes in
    (``activations``: fp16 or bf16), and rows of the head must have one scale each."""
    named = [("default", plan.default)]
    named += [(f"layers[{key!r}]", form) for key, _, _, _, form in plan.entries]
    for field, form in [*named, (f"layers[{HEAD!r}]", plan.head_format)]:
        if not stored_format(form).integer and form != activations:
            raise ModelError(f"{where}: {field} is {form}, but this map computes in {activations} on this card")
    head = stored_format(plan.head_format)
    if head.integer and head != StoredFormat(8):
        raise ModelError(f"{where}: layers[{HEAD!r}] is {plan.head_format}; the head is int8 or {activations}")


def _format(field: str, value: object, formats: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in formats:
        raise ModelError(f"{field} must be one of {', '.join(formats)} on this device, got {shown(value)}")
    return value


def _span(field: str, key: str, num_layers: int) -> tuple[int, int, str | None]:
    layer, _, matrix = key.partition(".")
    match = _KEY.fullmatch(layer)
    if match is None:
        raise ModelError(f"{field}: a key is LAYER, FIRST-LAST or *, with or without .MATRIX, or {HEAD}")
    if matrix in _PARTS:
        raise ModelError(f"{field}: {matrix} is stored as a part of {_PARTS[matrix]}; name that")
    if matrix not in MATRICES and (matrix or "." in key):
        raise ModelError(f"{field}: no matrix {shown(matrix)}; known: {', '.join(MATRICES)}")
    first, last = (0, num_layers - 1) if match["first"] is None else (int(match["first"]), int(match["first"]))
    if match["last"] is not None:
        last = int(match["last"])
    if not first <= last < num_layers:
        raise ModelError(f"{field}: the model has layers 0 to {num_layers - 1}")
    return first, last, matrix or None


def _plain(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and "\0" not in name and name.endswith(".safetensors")
