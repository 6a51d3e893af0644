"""The shapes of chat completions: message, delta, and log-probabilities by token with their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve.api.reply import Choice, Reply, ReplyHead
from serve.protocol import TokenLogprob
from serve.tokenizer import Tokenizer


class ChatReply(Reply):
    """``top_logprobs``: alternatives to show for each token, None without log-probabilities."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prompt_ids_in_choices = False

    def __init__(
        self, head: ReplyHead, tokenizer: Tokenizer, prompt_tokens: Sequence[int], n: int, top_logprobs: int | None
    ) -> None:
        super().__init__(head, tokenizer, prompt_tokens, n)
        self._top = top_logprobs

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._shape(index, choice, "message", {"role": "assistant", "content": choice.text})

    def _part(self, index: int, choice: Choice) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": choice.text}
        if not choice.started:
            delta = {"role": "assistant", **delta}
        return self._shape(index, choice, "delta", delta)

    def _shape(self, index: int, choice: Choice, name: str, value: dict[str, Any]) -> dict[str, Any]:
        shape = {
            "index": index,
            name: value,
            "logprobs": None if self._top is None else {"content": [self._entry(item) for item in choice.entries]},
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            shape["stop_reason"] = choice.stop_reason
        return shape

    def _entry(self, item: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in item.top[: self._top]]
        return {**self._token(item.token_id, item.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
