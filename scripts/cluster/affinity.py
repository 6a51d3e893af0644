"""Which requests belong together: the key by which the router sends a conversation to the replica that has its K/V.

A conversation keeps its beginning, so its beginning names it: what comes before and in the first user message, or the
first characters of a plain prompt. A client that knows better says so in the ``x-session-id`` header, which wins. It
does not know replicas.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

PROMPT_CHARACTERS = 256


def affinity_key(body: bytes) -> str | None:
    """A short digest for the conversation in a JSON body, None where there is none to be seen. Never raises."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    beginning = _beginning(request)
    if beginning is None:
        return None
    text = json.dumps([request.get("model"), beginning])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _beginning(request: dict[str, Any]) -> Any:
    messages = request.get("messages")
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            if isinstance(message, dict) and message.get("role") == "user":
                return messages[: index + 1]
        return messages or None
    prompt = request.get("prompt")
    return prompt[:PROMPT_CHARACTERS] if isinstance(prompt, (str, list)) and prompt else None
