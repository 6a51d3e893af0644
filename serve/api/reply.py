"""What every generation reply shares: the state of each choice, usage, and the order of events in a stream.

Two subclasses give the shapes: chat (``chat_reply``) and text completions (``completion_reply``). A choice collects
what the engine sends; a stream hands on what is new as soon as there is text for it, so that no chunk comes before the
first text. It does not know the engine client or HTTP.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serve.api.provenance import provenance_entry
from serve.api.speculation import speculation_metrics
from serve.protocol import Output, TokenLogprob
from serve.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReplyHead:
    """What all chunks of a reply repeat."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    block_length_max: int


@dataclass
class Choice:
    """One answer: what has arrived and was not handed on yet (``text``, ``ids``, ``entries``, ``provenance``), and its
    end."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    provenance: list[dict[str, Any]] = field(default_factory=list)
    prompt_entries: tuple[TokenLogprob | None, ...] | None = None
    started: bool = False
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    final: dict[str, Any] | None = None

    @property
    def num_scores(self) -> int:
        return len(self.entries) + (0 if self.started else len(self.prompt_entries or ()))

    def take(self, output: Output) -> None:
        self.text += output.text
        self.entries.extend(output.logprobs or ())
        self.ids.extend(output.token_ids)
        self.tokens += len(output.token_ids)
        if output.pieces is not None:
            self.provenance.append(provenance_entry(output))
        if output.prompt_logprobs is not None:
            self.prompt_entries = output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self.final = output.final
            if output.final is not None:
                self.tokens = int(output.final.get("completion_tokens", self.tokens))


def encode_reply(body: dict[str, Any]) -> bytes:
    """A whole reply as JSON. Its choices are encoded one by one: while the encoder is busy no other thread runs."""
    choices = ",".join(map(_json, body["choices"]))
    fields = (f"{_json(name)}:{f'[{choices}]' if name == 'choices' else _json(body[name])}" for name in body)
    return f"{{{','.join(fields)}}}".encode()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Reply(ABC):
    """A reply under construction. ``prompt_tokens``: one count for each prompt, which has ``n`` choices each.
    ``prompt_ids_in_choices``: where ``show_token_ids`` puts a prompt's ids, as vLLM does."""

    object_name: str
    chunk_name: str
    prompt_ids_in_choices: bool

    def __init__(self, head: ReplyHead, tokenizer: Tokenizer, prompt_tokens: Sequence[int], n: int) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._prompt_tokens = list(prompt_tokens)
        self._n = n
        self._choices = [Choice() for _ in range(len(prompt_tokens) * n)]
        self._shown: list[list[int]] | None = None

    def show_token_ids(self, prompts: Sequence[list[int]]) -> None:
        """Give token ids beside the text: a choice's new ones in ``token_ids``, and ``prompts``' once."""
        self._shown = list(prompts)

    def take(self, index: int, output: Output) -> None:
        """Add an output of the engine to choice ``index``."""
        self._choices[index].take(output)

    def body(self) -> dict[str, Any]:
        """The whole reply, once every choice has its end."""
        choices = [self._with_ids(index, self._whole(index, c)) for index, c in enumerate(self._choices)]
        body = self._envelope(self.object_name, choices)
        if self._shown is not None and not self.prompt_ids_in_choices:
            body["prompt_token_ids"] = self._shown[0]
        body["usage"] = self.usage()
        return self._with_metrics(body)

    def num_scores(self, index: int | None = None) -> int:
        """Log-probabilities that choice ``index``, or all of them, have yet to hand on."""
        choices = self._choices if index is None else [self._choices[index]]
        return sum(choice.num_scores for choice in choices)

    def chunk(self, index: int, *, include_usage: bool, continuous_usage: bool) -> dict[str, Any] | None:
        """What choice ``index`` has to say now; None while there is neither text nor an end."""
        choice = self._choices[index]
        if not self._speaks(index, choice):
            return None
        entry = self._with_ids(index, self._part(index, choice))
        if choice.provenance:
            entry["provenance"] = choice.provenance
        first = not any(other.started for other in self._choices)
        choice.started = True
        choice.text = ""
        choice.ids = []
        choice.entries = []
        choice.provenance = []
        body = self._envelope(self.chunk_name, [entry])
        if self._shown is not None and first and not self.prompt_ids_in_choices:
            body["prompt_token_ids"] = self._shown[0]
        if continuous_usage:
            body["usage"] = self.usage()
        elif include_usage:
            body["usage"] = None
        return body

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage: no choices."""
        body = self._envelope(self.chunk_name, [])
        body["usage"] = self.usage()
        return self._with_metrics(body)

    def usage(self) -> dict[str, Any]:
        """Token counts so far; a prompt counts once however many choices it has."""
        prompt = sum(self._prompt_tokens)
        completion = sum(choice.tokens for choice in self._choices)
        cached = sum(int((choice.final or {}).get("cached_tokens", 0)) for choice in self._choices[:: self._n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _speaks(self, index: int, choice: Choice) -> bool:
        return bool(choice.text) or choice.finish_reason is not None

    def _with_ids(self, index: int, entry: dict[str, Any]) -> dict[str, Any]:
        choice = self._choices[index]
        if self._shown is not None:
            entry["token_ids"] = choice.ids
            if self.prompt_ids_in_choices and not choice.started:
                entry["prompt_token_ids"] = self._shown[index // self._n]
        return entry

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": kind,
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.system_fingerprint,
            "choices": choices,
        }

    def _with_metrics(self, body: dict[str, Any]) -> dict[str, Any]:
        # The figures describe one sequence; vLLM leaves them out for several, and so do we.
        if len(self._choices) == 1:
            figures = speculation_metrics(self._choices[0].final, self._head.block_length_max)
            if figures is not None:
                body["metrics"] = {"speculative_decoding": figures}
        return body

    @abstractmethod
    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """The choice in a reply that is not streamed."""

    @abstractmethod
    def _part(self, index: int, choice: Choice) -> dict[str, Any]:
        """The choice in a chunk that carries its pending text."""
