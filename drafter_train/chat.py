"""Turns conversations into token ids exactly as the server will, and fingerprints how that is done.

Drafting quality falls apart, silently, when training text was rendered with another template, thinking mode or
tokenizer than the served text. The fingerprint travels with the token store and the checkpoint and is compared
wherever they meet. This file knows no model weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fingerprint:
    """How prompts became ids: hashes of the template text and tokenizer file, and the mode the template was run in."""

    template_sha256: str
    tokenizer_sha256: str
    thinking: str
    vocab_size: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """One line per field that differs from ``other`` (a stored ``to_json``), naming both values."""
        mine = self.to_json()
        return [f"{key}: {mine[key]!r} here, {other.get(key)!r} there" for key in mine if mine[key] != other.get(key)]


class ChatTokenizer:
    """Chat template plus tokenizer of one model folder. ``thinking`` is "default", "on" or "off"."""

    def __init__(self, folder: str | Path, thinking: str = "default") -> None:
        from transformers import AutoTokenizer

        if thinking not in ("default", "on", "off"):
            raise ValueError(f"thinking must be default, on or off, got {thinking!r}")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if not self._tokenizer.chat_template:
            raise ValueError(f"{folder} has no chat template")
        self._extra = {} if thinking == "default" else {"enable_thinking": thinking == "on"}
        tokenizer_file = Path(folder) / "tokenizer.json"
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        self.fingerprint = Fingerprint(
            template_sha256=hashlib.sha256(str(self._tokenizer.chat_template).encode()).hexdigest(),
            tokenizer_sha256=hashlib.sha256(tokenizer_file.read_bytes()).hexdigest(),
            thinking=thinking,
            vocab_size=int(config["vocab_size"]),
        )

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The text the model is prompted with, up to and including the assistant header. Raises ValueError where the
        template refuses the conversation (two user turns in a row, a system turn it has no place for)."""
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **self._extra
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses {str(list(messages))[:200]}: {error}") from error
        return text

    def encode_text(self, text: str) -> list[int]:
        """Token ids of rendered text; special tokens only where the text spells them."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode_prompts(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        """Token ids of every conversation, ready for the model to answer."""
        texts = [self.render(messages) for messages in prompts]
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text
