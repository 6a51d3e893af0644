"""Chat messages as clients send them, made plain: a list of ``{"role", "content"}`` with string content.

It knows OpenAI's shapes (text parts, the developer role) and refuses what this server cannot give a text model: images,
audio, tool calls. It knows no chat template.
"""

from __future__ import annotations

from typing import Any

from serve.api.errors import invalid

MAX_MESSAGES = 4096
MAX_PARTS = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")

_PART_SCHEMA = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "maxItems": MAX_PARTS, "items": _PART_SCHEMA},
                ]
            },
        },
    },
}


def read_messages(value: Any) -> list[dict[str, str]]:
    """Checked messages, text parts joined as they are; ``developer`` is today's name of ``system`` and becomes it."""
    if not isinstance(value, list):
        raise invalid("messages", "must be a list of messages")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid("messages", f"must hold between 1 and {MAX_MESSAGES} messages, got {len(value)}")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _read_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(where, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    for name in ("tool_calls", "function_call", "audio", "prefix"):  # prefix: elsewhere, "continue this turn"
        if message.get(name):
            raise invalid(f"{where}.{name}", "not supported by this server", "unsupported_parameter")
    content = _read_content(message.get("content"), f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of text parts")
    if not 1 <= len(content) <= MAX_PARTS:
        raise invalid(where, f"must hold between 1 and {MAX_PARTS} parts, got {len(content)}")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise invalid(f"{where}[{i}].type", 'must be "text": this server reads text only', "unsupported_parameter")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{where}[{i}].text", "must be a string")
        texts.append(part["text"])
    return "".join(texts)
