"""Where the tokens of a text completion begin in its text, for tokens whose text depends on what is before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from serve.api.completion_reply import CompletionReply, EchoedPrompt
from serve.api.reply import ReplyHead
from serve.engine.text import TextStream
from serve.protocol import Output, SamplingParams, TokenLogprob
from serve.tokenizer import Tokenizer, load_tokenizer
from tests.serve.test_tokenizer import folder, llama_backend

WORDS = {"[UNK]": 0, "river": 1, "##s": 2, "run": 3, "##ning": 4}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    words = Backend(models.WordPiece(WORDS, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece(cleanup=False)
    words.add_special_tokens(["[UNK]"])
    backends = {"llama": llama_backend(), "words": words}
    return {name: load_tokenizer(folder(root / name, backend)) for name, backend in backends.items()}


@pytest.mark.parametrize("echo", [False, True], ids=["answer", "echo"])
@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("name", "prompt", "answer", "text", "places"),
    [
        # A word keeps the space before it, unless it opens the text.
        ("llama", ["\u2581hello"], ["\u2581hello", "\u2581hello", "\u2581"], " hello hello ", [0, 6, 12]),
        ("llama", ["<s>", "\u2581hello"], ["\u2581", "a", "\u2581hello"], " a hello", [0, 1, 2]),
        # The answer ends a character of the prompt.
        ("llama", ["a", "<0xE4>"], ["<0xBD>", "<0xA0>", "b", "c"], "你bc", [0, 0, 1, 2]),
        ("llama", ["a", "<0xE4>"], ["b", "c"], "\ufffdbc", [0, 2]),
        # Half of a surrogate.
        ("llama", ["a"], ["<0xED>", "<0xA0>", "b"], "\ufffd\ufffdb", [0, 0, 2]),
        ("words", ["river"], ["##s", "run", "##ning"], "s running", [0, 1, 5]),
    ],
)
def test_offsets_of_an_answer_are_those_of_its_text(
    tokenizers: dict[str, Tokenizer],
    name: str,
    prompt: Sequence[str],
    answer: Sequence[str],
    text: str,
    places: list[int],
    whole: bool,
    echo: bool,
) -> None:
    tokenizer = tokenizers[name]
    prompt_ids, answer_ids = ([_id(tokenizer, token) for token in tokens] for tokens in (prompt, answer))
    repeated = EchoedPrompt(tokenizer.decode(prompt_ids), prompt_ids)
    reply = CompletionReply(ReplyHead("id", 0, "m", "fp", 0), tokenizer, [repeated], 1, 0, echo=echo)
    stream = TextStream(tokenizer, SamplingParams(max_tokens=16), len(answer_ids), frozenset(), prompt_ids)
    choices: list[dict[str, Any]] = []
    for position, token_id in enumerate(answer_ids):
        piece, finish_reason, _ = stream.push(token_id)
        scored = [None if i == 0 else TokenLogprob(i, -1.0) for i in prompt_ids] if echo and position == 0 else None
        entry = TokenLogprob(token_id, -1.0)
        reply.take(
            0,
            Output(
                "id",
                piece,
                (token_id,),
                logprobs=(entry,),
                prompt_logprobs=None if scored is None else tuple(scored),
                finish_reason=finish_reason,
            ),
        )
        chunk = None if whole else reply.chunk(0, include_usage=False, continuous_usage=False)
        choices += [] if chunk is None else chunk["choices"]
    choices = reply.body()["choices"] if whole else choices
    shift = len(repeated.text) if echo else 0
    assert "".join(choice["text"] for choice in choices)[shift:] == text
    found = [place for choice in choices for place in choice["logprobs"]["text_offset"]]
    assert found[len(prompt_ids) if echo else 0 :] == [shift + place for place in places]


def _id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_id(token)
    assert found is not None, token
    return found
