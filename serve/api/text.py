"""Text to token ids for the routes: off the event loop, and only text that could fit the context at all.

It knows the tokenizer and the chat renderer of the served model; it does not know requests or sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from serve.api.chat import ChatRenderer, ChatTemplateError, load_chat_renderer
from serve.api.errors import ApiError, invalid
from serve.tokenizer import Tokenizer, TooManyTokens, load_tokenizer

_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


class ModelText:
    """Tokenizer and chat template of one model behind a small thread pool."""

    def __init__(self, tokenizer: Tokenizer, renderer: ChatRenderer) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, model_dir: Path) -> ModelText:
        """Read the model folder. Raises TokenizerError or ChatTemplateError with the reason."""
        tokenizer = load_tokenizer(model_dir)
        return cls(tokenizer, load_chat_renderer(model_dir, tokenizer))

    async def encode(self, text: str, context: int, *, add_special_tokens: bool, field: str) -> list[int]:
        """Ids of ``text``; ApiError 400 at once when it is too long for ``context`` tokens however it is cut."""
        self._check_size(len(text.encode("utf-8")), context, field)
        try:
            return await self._run(self.tokenizer.encode, text, add_special_tokens=add_special_tokens, limit=context)
        except TooManyTokens as error:
            raise _too_long(field, f"{error}", context) from None

    async def encode_chat(self, messages: list[dict[str, str]], context: int) -> list[int]:
        """Ids of the rendered messages with the generation header; ApiError 400 with the template's own refusal."""
        self._check_size(sum(len(message["content"].encode("utf-8")) for message in messages), context, "messages")
        try:
            return await self._run(self.renderer.encode, messages, context)
        except TooManyTokens as error:
            raise _too_long("messages", f"{error}", context) from None
        except ChatTemplateError as error:
            raise invalid("messages", str(error), "chat_template_error") from None

    def refuse_settings(self, settings: Mapping[str, Any]) -> None:
        """ApiError 400 for ``chat_template_kwargs`` that would change a prompt: clients of many models send the same
        ones to all, and what this model's template does not read asks for nothing."""
        if any(map(self.renderer.reads, settings)):
            raise invalid(
                "chat_template_kwargs", "what the model's chat template reads cannot be set", "unsupported_parameter"
            )

    async def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return await self._run(self.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_size(self, size: int, context: int, field: str) -> None:
        limit = context * max(1, self.tokenizer.max_token_bytes)
        if size > limit:
            raise _too_long(field, f"{size} bytes of text are too long (at most {limit} bytes can fit)", context)

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))


def _too_long(field: str, reason: str, context: int) -> ApiError:
    return invalid(field, f"{reason}; the context limit is {context} tokens", "context_length_exceeded")
