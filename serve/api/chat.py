"""Chat messages to the prompt the model was trained on, through the model's own chat template.

The template comes from the model folder, never from a client, and runs in jinja2's sandbox; without a usable jinja2 a
ChatML renderer written by hand takes over (serve/api/chatml.py). This file knows no HTTP and no sampling.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from serve.api.chatml import ChatML, recognise
from serve.tokenizer import Tokenizer, TokenizerError, read_chat_template

ROLES = ("system", "user", "assistant", "tool")
SEAMS = (range(0xFDD0, 0xFDF0), range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Noncharacters, then characters of private use: it takes half a megabyte of text to have them all."""

Renderer = Callable[[Sequence[Mapping[str, Any]], bool], str]

log = logging.getLogger(__name__)


class ChatTemplateError(ValueError):
    """The chat template refuses these messages, or cannot be used at all. The message is never empty."""

    def __init__(self, message: str) -> None:
        super().__init__(message.strip() or "the model's chat template refuses these messages")


class ChatRenderer:
    """Renders messages for one model. Safe for threads.

    source: what renders, for the log: ``jinja2``, ``built-in ChatML`` or ``none`` (the model has no chat template).
    """

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer, source: str, template: str = "") -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._words = frozenset(re.findall(r"\w+", template))
        self.source = source

    def reads(self, name: str) -> bool:
        """Whether the template may look at a variable of this name: whether the word is in it at all."""
        return name in self._words

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Content is a string or text parts, which are joined without a separator.

        Raises ChatTemplateError with the template's own words where it refuses (roles that must alternate, ...), and
        for messages no template can take.
        """
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        if not plain:
            raise ChatTemplateError("messages must not be empty")
        try:
            return self._renderer(plain, add_generation_prompt)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template may fail in any way on messages it was not written for
            raise ChatTemplateError(f"the model's chat template fails on these messages: {error}") from error

    def encode(self, messages: Sequence[Mapping[str, Any]], limit: int | None = None) -> list[int]:
        """Prompt token ids, generation header included. The template writes every special token, so none is added.

        Only the template does: the text of a message that looks like a control token stays text, so that nobody can
        write a turn of somebody else. ``limit``: see ``Tokenizer.encode``.
        """
        specials = self._tokenizer.special_texts()
        texts = [_plain_message(index, message)["content"] for index, message in enumerate(messages)]
        if not any(special in text for text in texts for special in specials):
            return self._tokenizer.encode(self.render(messages), add_special_tokens=False, limit=limit)
        seam = _unused(texts)
        marked = [
            {**message, "content": _cut_specials(text, specials, seam)}
            for message, text in zip(messages, texts, strict=True)
        ]
        return self._tokenizer.encode_apart(self.render(marked).split(seam), limit)


def load_chat_renderer(model_dir: Path, tokenizer: Tokenizer) -> ChatRenderer:
    """The renderer of a model folder. A model without a template gets one that refuses every request.

    Raises ChatTemplateError for a template that is broken, or that is unknown where jinja2 is missing and the
    vocabulary has no ChatML markers to fall back to.
    """
    try:
        template = read_chat_template(model_dir)
    except TokenizerError as error:
        raise ChatTemplateError(str(error)) from error
    if template is None:
        return ChatRenderer(tokenizer, _refuse_all, "none")
    if _jinja2_is_usable():
        return ChatRenderer(tokenizer, _compile(template, tokenizer.special_tokens), "jinja2", template)
    known = recognise(template)
    if known is None:
        if not {tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")} <= tokenizer.special_ids:
            raise ChatTemplateError(
                f"the chat template of {model_dir} is not one of the built-in ones; install jinja2 >= 3.1 to use it"
            )
        log.warning(
            "jinja2 >= 3.1 is missing and the chat template of %s is not a known one: rendering plain ChatML, "
            "which may differ from what the model was trained on",
            model_dir,
        )
        known = ChatML(tool_turns=tokenizer.token_id("<tool_response>") is not None, plain_arguments=True)
    return ChatRenderer(tokenizer, known.render, "built-in ChatML", template)


def _unused(texts: Sequence[str]) -> str:
    """A character that none of these texts has, preferably one that no text should have.

    One character, found in one pass: a longer seam would be put into a text many times, however long a client made it.
    """
    taken = set().union(*texts)
    seam = next((character for character in map(chr, chain(*SEAMS)) if character not in taken), None)
    if seam is None:
        raise ChatTemplateError("messages that hold every character of private use cannot hold control tokens too")
    return seam


def _cut_specials(text: str, specials: Sequence[str], seam: str) -> str:
    """``text`` with a seam inside everything that would be read as a control token."""
    for special in specials:
        text = text.replace(special, special[:1] + seam + special[1:])
    return text


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ChatTemplateError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if isinstance(content, list | tuple):
        content = "".join(_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise ChatTemplateError(f"{where}.content must be a string or a list of text parts")
    return {**message, "content": content}


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ChatTemplateError(f'{where} must be {{"type": "text", "text": ...}}; other kinds are not supported')


def _refuse_all(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> NoReturn:
    raise ChatTemplateError("this model has no chat template; use /v1/completions")


def _jinja2_is_usable() -> bool:
    try:
        import jinja2.sandbox  # noqa: F401

        version = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("jinja2"))
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return False
    return version is not None and (int(version[1]), int(version[2])) >= (3, 1)


def _compile(template: str, special_tokens: Mapping[str, str]) -> Renderer:
    """A renderer with the environment that chat templates are written for: that of transformers.

    Sandboxed; blocks trimmed; loop controls; ``tojson`` without HTML escapes; ``raise_exception`` and ``strftime_now``;
    the special tokens by name; ``{% generation %}`` parts, which mark training targets, rendered as they are.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (the name and type that jinja2 asks for)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the model's chat template is broken at line {error.lineno}: {error}") from error
    except (jinja2.TemplateError, RecursionError, ValueError) as error:
        raise ChatTemplateError(f"the model's chat template cannot be compiled: {str(error)[:200]}") from error

    def render(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        return compiled.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )

    return render


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
