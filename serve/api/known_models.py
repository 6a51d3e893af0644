"""Whether a model folder is the model it looks like: config, tokenizer and rendered prompt against a short list.

Siblings of one family share every tensor shape, so the wrong one loads without a fault and then answers as another
model. The list (known_models.json) holds facts of published configs. Weights are not compared; it knows no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.api.chat import ChatTemplateError
from serve.api.text import ModelText
from serve.tokenizer import read_chat_template, read_json

KNOWN = Path(__file__).with_name("known_models.json")
_PROBE = ({"role": "user", "content": "Hi"},)


@dataclass(frozen=True)
class Identity:
    """``name``: the known model whose shape the folder has, None for any other model. ``differences``: how it departs
    from that model, one short text each."""

    name: str | None
    differences: tuple[str, ...] = ()

    @property
    def repository(self) -> str | None:
        """The known model that the folder holds, None for one that departs from it too."""
        return None if self.differences else self.name

    def warning(self) -> str | None:
        """One line for a folder that is not what it looks like, else None."""
        if not self.differences:
            return None
        return (
            f"WRONG MODEL? This folder has the shape of {self.name} but is not that model: "
            f"{'; '.join(self.differences)}. Serving it all the same."
        )


def identify(model_dir: Path, text: ModelText) -> Identity:
    """Compares the folder with the known model of its shape. Raises TokenizerError when config.json is broken."""
    config = read_json(model_dir / "config.json")
    known: dict[str, dict[str, Any]] = json.loads(KNOWN.read_text(encoding="utf-8"))
    for name, facts in known.items():
        if all(config.get(field) == value for field, value in facts["shape"].items()):
            template = read_chat_template(model_dir) or ""
            return Identity(name, tuple(_differences(facts, _settings(config), text, template)))
    return Identity(None)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with its rotary settings in one place, whichever way they were written."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        **config,
        "rope_theta": rope.get("rope_theta", config.get("rope_theta")),
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
    }


def _differences(facts: Mapping[str, Any], settings: Mapping[str, Any], text: ModelText, template: str) -> list[str]:
    found = [
        f"{field} is {settings.get(field)!r}, not {value!r}"
        for field, value in facts["settings"].items()
        if settings.get(field) != value
    ]
    ends = sorted(text.tokenizer.end_token_ids)
    if ends != facts["end_token_ids"]:
        found.append(f"an answer ends at tokens {ends}, not {facts['end_token_ids']}")
    if not facts["tokenizer_sha256"].startswith(text.tokenizer.fingerprint):
        wanted = facts["tokenizer_sha256"][: len(text.tokenizer.fingerprint)]
        found.append(f"tokenizer.json has SHA-256 {text.tokenizer.fingerprint}..., not {wanted}...")
    return found + _prompt_differences(facts["prompt"], text, template)


def _prompt_differences(wanted: str, text: ModelText, template: str) -> list[str]:
    try:
        prompt = text.renderer.render(_PROBE)
    except ChatTemplateError as error:
        return [f"its chat template fails on a plain message ({error})"]
    # Rendered by hand (no jinja2), a template that thinks comes out plain: then its text has to tell.
    if "<think>" in (prompt if text.renderer.source == "jinja2" else template):
        return ["its chat template opens a <think> part: a thinking model"]
    if prompt == wanted:
        return []
    return [f"its chat template writes {prompt[-80:]!r} for 'Hi', not {wanted[-80:]!r}"]
