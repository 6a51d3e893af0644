"""More prompts out of those at hand: the same request with another wish about the answer, or into another language.

A drafter learns from the target's answers, and what it lacks first is *different* answers: a second sampled answer to
the same prompt says much the same. A wish changes greedy text from its first words on and keeps the subject. This file
knows no tokens and no model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

# Said before or after the request ({} is the request), each a thing that people do ask.
WISHES = (
    "{}\n\nKeep the answer short.",
    "{}\n\nPlease explain step by step.",
    "{}\n\nAnswer in one paragraph.",
    "{}\n\nGive an example.",
    "{}\n\nUse a numbered list.",
    "{}\n\nAnswer as if I were new to this.",
    "{}\n\nBe as detailed as you can.",
    "{}\n\nWrite in a friendly tone.",
    "{}\n\nWrite in a formal tone.",
    "{}\n\nEnd with a short conclusion.",
    "{}\n\nAnswer in simple words.",
    "{}\n\nSay first what the task is about.",
    "I need some help. {}",
    "Hello! {}",
    "{} Thank you!",
    "Think carefully before you answer. {}",
    "You are an expert. {}",
    "Please help me with the following.\n\n{}",
    "A friend asked me this: {}",
    "Give me two different answers to this.\n\n{}",
)
LANGUAGES = (
    "French",
    "German",
    "Spanish",
    "Italian",
    "Portuguese",
    "Dutch",
    "Polish",
    "Swedish",
    "Danish",
    "Finnish",
    "Turkish",
    "Russian",
    "Greek",
    "Czech",
    "Romanian",
    "Hungarian",
    "Indonesian",
    "Vietnamese",
)
_LANGUAGE = re.compile(rf"\b({'|'.join(LANGUAGES)})\b")


def vary(records: Iterable[dict[str, Any]], times: int) -> Iterator[dict[str, Any]]:
    """``times`` variants of every record with a ``prompt`` (others are passed over), no two of one record alike. Which
    ones is a function of the prompt. Of a request that names a language to translate into, every other variant names
    another. Raises ValueError when there are not so many wishes."""
    if not 1 <= times <= len(WISHES):
        raise ValueError(f"variants of a prompt must be 1 to {len(WISHES)}, got {times}")
    for record in records:
        prompt = record.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            continue
        start = int.from_bytes(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:4], "big")
        named = _LANGUAGE.search(prompt) if "ransl" in prompt or "say this in" in prompt else None
        for i in range(times):
            # Seven and the number of wishes have no common divisor: len(WISHES) steps are all different.
            text = WISHES[(start + 7 * i) % len(WISHES)].replace("{}", prompt.strip())
            if named and i % 2 == 0:
                others = [language for language in LANGUAGES if language != named[1]]
                text = prompt.strip().replace(named[1], others[(start + 7 * i) % len(others)])
            yield {"prompt": text, "category": record.get("category")}
