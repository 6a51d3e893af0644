"""The shapes of text completions: text, echo of the prompt, and log-probabilities as parallel lists with offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve.api.reply import Choice, Reply, ReplyHead
from serve.engine.text import IncrementalDetokenizer
from serve.protocol import Output, TokenLogprob
from serve.tokenizer import Tokenizer


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that the reply may repeat before the answer. ``text`` is only needed where it does."""

    text: str
    ids: list[int]


class CompletionReply(Reply):
    """``top_logprobs``: alternatives for each token, None without log-probabilities.

    ``echo``: the prompts are repeated. ``discard``: the answer itself is dropped (max_tokens 0 with echo; the
    engine generates one token then, because every pass ends in one).
    """

    object_name = "text_completion"
    chunk_name = "text_completion"
    prompt_ids_in_choices = True

    def __init__(
        self,
        head: ReplyHead,
        tokenizer: Tokenizer,
        prompts: Sequence[EchoedPrompt],
        n: int,
        top_logprobs: int | None,
        echo: bool = False,
        discard: bool = False,
    ) -> None:
        super().__init__(head, tokenizer, [len(prompt.ids) for prompt in prompts], n)
        self._top = top_logprobs
        self._echo = prompts if echo else None
        self._discard = discard
        scored = [] if top_logprobs is None else prompts
        self._offsets = [_Offsets(tokenizer, prompt, echo) for prompt in scored for _ in range(n)]
        if echo:
            for index, choice in enumerate(self._choices):
                choice.text = prompts[index // n].text

    def take(self, index: int, output: Output) -> None:
        if self._discard:
            final = None if output.final is None else {**output.final, "completion_tokens": 0}
            reason = None if output.finish_reason is None else "length"
            output = Output(output.id, prompt_logprobs=output.prompt_logprobs, finish_reason=reason, final=final)
        super().take(index, output)

    def _speaks(self, index: int, choice: Choice) -> bool:
        if self._echo is not None and not choice.started and choice.finish_reason is None:
            # The echo is there from the start; it waits for the first text, and for its log-probabilities if asked for.
            answered = len(choice.text) > len(self._echo[index // self._n].text)
            return answered and (self._top is None or choice.prompt_entries is not None)
        return super()._speaks(index, choice)

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._shape(index, choice)

    def _part(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._shape(index, choice)

    def _shape(self, index: int, choice: Choice) -> dict[str, Any]:
        shape = {
            "index": index,
            "text": choice.text,
            "logprobs": None if self._top is None else self._logprobs(index, choice),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            shape["stop_reason"] = choice.stop_reason
        return shape

    def _logprobs(self, index: int, choice: Choice) -> dict[str, Any]:
        entries: list[tuple[int, TokenLogprob | None]] = []
        offsets = self._offsets[index]
        places: list[int] = []
        if self._echo is not None and not choice.started:
            prompt = self._echo[index // self._n]
            known = choice.prompt_entries or (None,) * len(prompt.ids)
            entries += list(zip(prompt.ids, known, strict=True))
            places += offsets.of_prompt()
        entries += [(item.token_id, item) for item in choice.entries]
        places += [offsets.next(item.token_id) for item in choice.entries]
        return {
            "tokens": [self._tokenizer.token_text(token_id) for token_id, _ in entries],
            "token_logprobs": [None if item is None else item.logprob for _, item in entries],
            "top_logprobs": [None if item is None else self._alternatives(item) for _, item in entries],
            "text_offset": places,
        }

    def _alternatives(self, item: TokenLogprob) -> dict[str, float]:
        """The best tokens by text, the chosen one among them whatever its rank."""
        pairs = [*item.top[: self._top], (item.token_id, item.logprob)]
        found: dict[str, float] = {}
        for token_id, logprob in pairs:
            found.setdefault(self._tokenizer.token_text(token_id), logprob)
        return found


class _Offsets:
    """Where each token's text begins, in characters of a choice's text. A character cut across tokens counts where it
    ends. An answer continues its prompt's text: a word keeps the space before it, a character may have begun there.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: EchoedPrompt, echo: bool) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._answer = IncrementalDetokenizer(tokenizer, prompt.ids)
        self._at = len(prompt.text) if echo else 0

    def of_prompt(self) -> list[int]:
        """A special token has text only where the prompt has it at this place: written there by the client, not added
        by the tokenizer, and never in an answer."""
        detokenizer = IncrementalDetokenizer(self._tokenizer)
        at = 0
        places = []
        for token_id in self._prompt.ids:
            places.append(at)
            if token_id in self._tokenizer.special_ids:
                written = self._tokenizer.token_text(token_id)
                at += len(written) if self._prompt.text.startswith(written, at) else 0
            else:
                at += len(detokenizer.push(token_id))
        return places

    def next(self, token_id: int) -> int:
        """The place of the answer's next token."""
        at = self._at
        self._at += len(self._answer.push(token_id))
        return at
