"""Chat rendering by hand for the ChatML family, for images without a usable jinja2.

A template is recognised by what it does, read off its text; one that does more than this file can is not recognised.
It knows no files and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What a template of this family never uses: refusals, reasoning parts, trimming, further special tokens, the date.
_FOREIGN = re.compile(
    r"raise_exception|think|reasoning|strftime|macro|\btrim\b|strip\(|split\(|bos_token|eos_token|capitalize"
    r"|\bupper\b|\blower\b|\breplace\b|custom_|documents|message\.name|message\[['\"]name['\"]\]"
)
_NEEDED = ("<|im_start|>", "<|im_end|>", "add_generation_prompt", "<|im_start|>assistant\n")
# The whole of a template without tools, in the spelling of _canonical. A turn that is left out, a line break more or
# less, a word of its own: such a template looks alike and renders another prompt.
_SYSTEM = r"\{\{'<\|im_start\|>system\n([^'{}<\\]*)<\|im_end\|>\n'\}\}\{%endif%\}"
_PLAIN = re.compile(
    r"(?:\{%if not add_generation_prompt is defined%\}\{%set add_generation_prompt = false%\}\{%endif%\})?"
    rf"(?:\{{%if messages\[0\]\['role'\] != 'system'%\}}{_SYSTEM})?"
    r"\{%for message in messages%\}"
    rf"(?:\{{%if loop\.first and messages\[0\]\['role'\] != 'system'%\}}{_SYSTEM})?"
    r"\{\{'<\|im_start\|>'\s*\+\s*message\['role'\]\s*\+\s*'\n'\s*\+\s*message\['content'\]\s*\+\s*'<\|im_end\|>\n'\}\}"
    r"\{%endfor%\}\{%if add_generation_prompt%\}\{\{'<\|im_start\|>assistant\n'\}\}\{%endif%\}"
)
_TOOL_PARTS = ("<|im_start|>user", "\n<tool_response>\n", "\n</tool_response>")


@dataclass(frozen=True)
class ChatML:
    """One member of the family.

    default_system: system message written when the first message is none; None writes nothing.
    tool_turns: tool results become user turns with ``<tool_response>`` (neighbours share a turn) and an assistant's
    calls are written as ``<tool_call>``; else every role is its own turn and calls are not shown.
    plain_arguments: call arguments given as a string are written as they are, not quoted again.
    """

    default_system: str | None = None
    tool_turns: bool = False
    plain_arguments: bool = False

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        parts: list[str] = []
        if self.default_system is not None and messages and messages[0]["role"] != "system":
            parts.append(_turn("system", self.default_system))
        for index, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if not self.tool_turns or role in ("system", "user"):
                parts.append(_turn(role, content))
            elif role == "assistant":
                parts.append(_turn(role, content + self._calls(message, bool(content))))
            elif role == "tool":
                if index == 0 or messages[index - 1]["role"] != "tool":
                    parts.append("<|im_start|>user")
                parts.append(f"\n<tool_response>\n{content}\n</tool_response>")
                if index + 1 == len(messages) or messages[index + 1]["role"] != "tool":
                    parts.append("<|im_end|>\n")
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)

    def _calls(self, message: Mapping[str, Any], after_text: bool) -> str:
        calls = []
        for call in message.get("tool_calls") or ():
            call = call.get("function") or call
            arguments = call["arguments"]
            if not (self.plain_arguments and isinstance(arguments, str)):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append(f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {arguments}}}\n</tool_call>')
        return ("\n" if after_text and calls else "") + "\n".join(calls)


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def recognise(template: str) -> ChatML | None:
    """The member of the family that renders like ``template``, or None."""
    text = template.replace("\\n", "\n")
    if _FOREIGN.search(text) or not all(part in text for part in _NEEDED):
        return None
    if not all(part in text for part in _TOOL_PARTS):
        plain = _PLAIN.fullmatch(_canonical(text))
        if plain is None or None not in (plain[1], plain[2]):
            return None
        return ChatML(plain[1] if plain[2] is None else plain[2])
    default_system = re.search(r"<\|im_start\|>system\n(?!['\"])([^'\"{}<\\]*)(<\|im_end\|>\n)?", text)
    if default_system is not None and not default_system[2]:
        return None
    return ChatML(
        default_system=None if default_system is None else default_system[1],
        tool_turns=True,
        plain_arguments="arguments is string" in text,
    )


def _canonical(text: str) -> str:
    """The template as one line would write it: white space that is not rendered gone, one spelling of the rest."""
    text = re.sub(r"(?m)^[ \t]+(?=\{%)", "", text.removesuffix("\n")).replace("%}\n", "%}")
    text = re.sub(r"\s*(\{[{%])-", r"\1", text)
    text = re.sub(r"-([%}]\})\s*", r"\1", text)
    text = re.sub(r"(\{[{%])\s+", r"\1", text)
    text = re.sub(r"\s+([%}]\})", r"\1", text).replace('"', "'")
    text = re.sub(r"\b(messages?(?:\[0\])?)\.(role|content)\b", r"\1['\2']", text)
    return re.sub(r"'\s*\+\s*'", "", text)
