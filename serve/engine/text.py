"""Where one request's text goes and where it ends: tokens in, in the order they were produced; text and a finish out.

Pure logic on the host, one token at a time, so that an answer is the same however its tokens were grouped into blocks
and whether it is streamed. It does not know the scheduler, tensors or HTTP.

What is decided here:
- A character is released when its last byte has arrived. Bytes that can never become a character give U+FFFD, as the
  tokenizer's own decoder does; an unfinished character at the end of the answer is dropped.
- Text that may still become a stop string is held back, and released when it cannot or when the answer ends otherwise.
- The stop string that is complete first wins; of those complete at the same character, the longest.
- The token that completes an ending counts (``completion_tokens``), its text does not show; nothing after it counts.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from serve.protocol import SamplingParams
from serve.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# How many prompt tokens the first generated token can depend on: a character has at most four bytes.
PROMPT_TAIL = 8


class IncrementalDetokenizer:
    """Text of a growing token sequence, each piece once, never a part of a character. O(1) amortised per token.

    ``prompt_tail_ids``: the last few prompt tokens, when the text continues theirs: a character begun there is
    finished here, and a word-start space stays. Without them the text is that of the pushed ids alone. Special tokens
    have no text unless ``skip_special_tokens`` is False.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._first = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []  # only where tokens are not byte-exact: the last released group and what follows it
        self._released = 0  # how many of _ids have been released
        for token_id in prompt_tail_ids[-PROMPT_TAIL:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Text completed by this token; may be empty."""
        if token_id >= self._tokenizer.vocab_size or (self._skip and token_id in self._tokenizer.special_ids):
            return ""
        if not self._tokenizer.byte_exact:
            return self._push_decoded(token_id)
        data = self._tokenizer.token_bytes(token_id, first=self._first)
        self._first = False
        text = self._utf8.decode(data)
        begun = self._utf8.getstate()[0]
        if begun[:1] == b"\xed" and begun[1:] >= b"\xa0":
            # Half of a surrogate, which Python waits for the rest of; in UTF-8 it is no character whatever follows.
            text += self._utf8.decode(b"", final=True)
        return text

    def _push_decoded(self, token_id: int) -> str:
        """For decoders that look at neighbours: what a token adds is the difference of two decodes of a window."""
        self._ids.append(token_id)
        before = self._decode(self._ids[: self._released])
        text = self._decode(self._ids)
        unfinished = text.endswith(REPLACEMENT) and len(self._ids) - self._released < 4
        if unfinished or len(text) <= len(before):
            return ""
        self._ids = self._ids[self._released :]
        self._released = len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class StopChecker:
    """Finds stop strings in text that arrives in pieces, releasing nothing that could still be the start of one.

    One Knuth-Morris-Pratt automaton per stop string: its state is the length of the longest end of the text that
    begins the stop string, which is exactly what must be held back. Constant time per character and stop string,
    however long the stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stops = [(text, _failure_table(text)) for text in dict.fromkeys(stop) if text]
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text safe to release now, matched stop string or None). Text from the match on is discarded.

        ``armed`` False: a stop string completed by this text does not count (and is text like any other).
        """
        if not self._stops:
            return text, None
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            matched = ""
            for index, (stop, failure) in enumerate(self._stops):
                state = self._states[index]
                if state == len(stop):  # completed while not armed
                    state = failure[state]
                while state and stop[state] != character:
                    state = failure[state]
                state += stop[state] == character
                self._states[index] = state
                if state == len(stop) > len(matched):
                    matched = stop
            if matched and armed:
                self._held = ""
                return pending[: end - len(matched)], matched
        hold = max(
            failure[state] if state == len(stop) else state
            for state, (stop, failure) in zip(self._states, self._stops, strict=True)
        )
        cut = len(pending) - hold
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """The held-back text, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held


def _failure_table(text: str) -> list[int]:
    """table[n]: length of the longest proper prefix of text[:n] that is also its suffix (n from 0 to len(text))."""
    table = [0] * (len(text) + 1)
    state = 0
    for n in range(1, len(text)):
        while state and text[state] != text[n]:
            state = table[state]
        state += text[state] == text[n]
        table[n + 1] = state
    return table


class Released(NamedTuple):
    """What one token adds to an answer. ``finish_reason`` is None, "stop" or "length"; ``stop_reason`` is the stop
    string or the id from ``stop_token_ids`` that ended it, None for an end token or the length."""

    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class TextStream:
    """Detokeniser, stop strings, end tokens and length of one request, applied to one token after the other.

    max_tokens: tokens this answer may have, already cut to the context (params.max_tokens is not looked at).
    end_token_ids: tokens that end an answer unless ``params.ignore_eos``; their text never shows.
    prompt_tail_ids: see IncrementalDetokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        max_tokens: int,
        end_token_ids: frozenset[int],
        prompt_tail_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_tail_ids)
        self._stops = StopChecker(params.stop)
        self._end_token_ids = end_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._ignore_end = params.ignore_eos
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._finished = False
        self.completion_tokens = 0

    def push(self, token_id: int) -> Released:
        """The next token of the answer. Raises RuntimeError after the answer has finished: the caller drops the rest.

        An ending counts only from token ``min_tokens`` + 1 on; a stop string also when it began before that. A stop
        that is complete within the cap wins over the length.
        """
        if self._finished:
            raise RuntimeError("the answer has finished; tokens after its end must be dropped")
        self.completion_tokens += 1
        armed = self.completion_tokens > self._min_tokens
        is_end = token_id in self._end_token_ids
        if armed and is_end and not self._ignore_end:
            return self._finish("", "stop", None)
        if armed and token_id in self._stop_token_ids:
            return self._finish("", "stop", token_id)
        text, matched = self._stops.push("" if is_end else self._detokenizer.push(token_id), armed=armed)
        if matched is not None:
            return self._finish(text, "stop", matched)
        if self.completion_tokens >= self._max_tokens:
            return self._finish(text, "length", None)
        return Released(text)

    def close(self) -> str:
        """Held-back text of an answer that something else ended (cancelled, failed)."""
        self._finished = True
        return self._stops.flush()

    def _finish(self, text: str, finish_reason: str, stop_reason: str | int | None) -> Released:
        return Released(text + self.close(), finish_reason, stop_reason)
