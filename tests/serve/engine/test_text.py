"""serve/engine/text.py: what is released when, and where an answer ends, against a naive reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from serve.engine.text import IncrementalDetokenizer, StopChecker, TextStream
from serve.protocol import SamplingParams
from serve.tokenizer import Tokenizer, load_tokenizer

END, START, TURN = 0, 1, 2  # the special tokens of the byte-level tokenizer
TEXTS = [
    "Repeat: 🫠🥹龜👩‍👩‍👧‍👦 end",
    "lemon river copper window",
    "  leading and  double spaces \n\n\ttabs ",
    "你好，世界 — naïve café",
    "\ufffd is a real character here",
    "",
]


def load(path: Path, backend: Backend) -> Tokenizer:
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One tokenizer of each kind: byte-level, sentencepiece-like with byte fallback, and one that joins words."""
    root = tmp_path_factory.mktemp("tokenizers")
    byte_level = Backend(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<|end|>", "<|start|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    byte_level.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"adehilnoprtvwé"]
    merges = [
        ("e", "r"),
        ("\u2581", "r"),
        ("\u2581r", "i"),
        ("\u2581ri", "v"),
        ("\u2581riv", "er"),
        ("\u2581", "\u2581"),
    ]
    vocab = {token: i for i, token in enumerate([*tokens, *("".join(pair) for pair in merges)])}
    llama = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    llama.decoder = decoders.Sequence(steps)
    llama.add_special_tokens(["<unk>", "<s>", "</s>"])

    words = Backend(
        models.WordPiece({"[UNK]": 0, "river": 1, "##s": 2, "run": 3, "##ning": 4, "\ufffd": 5}, unk_token="[UNK]")
    )
    words.decoder = decoders.WordPiece(cleanup=False)
    words.add_special_tokens(["[UNK]"])
    found = {"byte_level": byte_level, "llama": llama, "words": words}
    return {name: load(root / name, backend) for name, backend in found.items()}


def detokenize(tokenizer: Tokenizer, ids: Sequence[int], tail: Sequence[int] = ()) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, tail)
    return "".join(detokenizer.push(token_id) for token_id in ids)


class TestDetokenizer:
    @pytest.mark.parametrize("kind", ["byte_level", "llama"])
    @pytest.mark.parametrize("text", TEXTS)
    def test_pieces_join_to_the_text_and_none_shows_half_a_character(
        self, tokenizers: dict[str, Tokenizer], kind: str, text: str
    ) -> None:
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push(token_id) for token_id in ids]
        assert "".join(pieces) == tokenizer.decode(ids) == text
        assert "".join(pieces).count("\ufffd") == text.count("\ufffd")

    @pytest.mark.parametrize("text", TEXTS[:4])
    def test_every_cut_gives_a_beginning_of_the_text_without_replacement_characters(
        self, tokenizers: dict[str, Tokenizer], text: str
    ) -> None:
        tokenizer = tokenizers["byte_level"]
        ids = tokenizer.encode(text, add_special_tokens=False)
        for cut in range(len(ids) + 1):
            got = detokenize(tokenizer, ids[:cut])
            assert text.startswith(got)
            assert tokenizer.decode(ids[:cut]).rstrip("\ufffd") == got

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_random_byte_level_ids_equal_the_library_but_for_a_cut_character(
        self, tokenizers: dict[str, Tokenizer], data: st.DataObject
    ) -> None:
        tokenizer = tokenizers["byte_level"]
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
        assert tokenizer.decode(ids) in (detokenize(tokenizer, ids), detokenize(tokenizer, ids) + "\ufffd")

    @pytest.mark.parametrize(
        "data", [b"\xed\xa0", b"a\xed\xbf", b"\xed\xa0\x80", b"\xed\xa0b", b"\xe0\x80", b"\xf4\x90"]
    )
    def test_bytes_that_can_never_become_a_character_do_not_wait_for_one(
        self, tokenizers: dict[str, Tokenizer], data: bytes
    ) -> None:
        tokenizer = tokenizers["byte_level"]
        of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        ids = [of_byte[bytes([byte])] for byte in data]
        assert detokenize(tokenizer, ids) == tokenizer.decode(ids) == data.decode(errors="replace")

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data(), kind=st.sampled_from(["llama", "words"]))
    def test_random_ids_of_other_decoders_equal_the_library(
        self, tokenizers: dict[str, Tokenizer], data: st.DataObject, kind: str
    ) -> None:
        tokenizer = tokenizers[kind]
        whole_characters = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_text(i)) < 9]
        runs = [tokenizer.encode(text, add_special_tokens=False) for text in ("🫠", "龜é", "river")]
        piece = st.one_of(st.sampled_from(runs), st.sampled_from(whole_characters).map(lambda i: [i]))
        ids = [i for part in data.draw(st.lists(piece, max_size=20)) for i in part]
        whole = tokenizer.decode(ids)
        # The library gives up on a whole run of byte tokens that holds one bad byte; the stream keeps its good part.
        assert "\ufffd" in whole or detokenize(tokenizer, ids) == whole

    def test_a_bad_byte_among_byte_tokens_spoils_only_itself(self, tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = tokenizers["llama"]
        bad = tokenizer.token_id("<0xFF>")
        assert bad is not None
        face = tokenizer.encode("🫠", add_special_tokens=False)
        assert detokenize(tokenizer, [*face, bad, *face[1:]]) == "🫠\ufffd🫠"

    def test_a_prompt_that_ends_within_a_character_is_continued(self, tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = tokenizers["byte_level"]
        ids = [tokenizer.encode(chr(0x10FFFF), add_special_tokens=False)[n] for n in range(4)]
        assert detokenize(tokenizer, ids[2:], tail=ids[:2]) == chr(0x10FFFF)

    def test_after_a_prompt_the_space_of_a_word_start_stays(self, tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = tokenizers["llama"]
        river = tokenizer.encode("river", add_special_tokens=False)
        assert detokenize(tokenizer, river) == "river"
        assert detokenize(tokenizer, river, tail=river) == " river"
        assert detokenize(tokenizer, river, tail=[1]) == "river"  # a special token is no text before it
        assert detokenize(tokenizers["words"], [1, 2], tail=[3]) == " rivers"

    def test_ids_without_a_token_leave_the_text_unopened(self, tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = tokenizers["llama"]
        ids = [tokenizer.vocab_size + 1, *tokenizer.encode("river", add_special_tokens=False)]
        assert detokenize(tokenizer, ids) == tokenizer.decode(ids) == "river"

    def test_replacement_characters_that_are_text_are_not_held_for_ever(self, tokenizers: dict[str, Tokenizer]) -> None:
        detokenizer = IncrementalDetokenizer(tokenizers["words"])
        pieces = [detokenizer.push(5) for _ in range(40)]
        assert tokenizers["words"].decode([5] * 40).startswith("".join(pieces))
        assert "".join(pieces).count("\ufffd") == 40

    def test_special_tokens_show_only_when_asked(self, tokenizers: dict[str, Tokenizer]) -> None:
        shown = IncrementalDetokenizer(tokenizers["byte_level"], skip_special_tokens=False)
        assert shown.push(TURN) == "<|turn|>"
        assert detokenize(tokenizers["byte_level"], [TURN]) == ""


def naive_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Read the text character by character; cut at the first place where it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


stop_lists = st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=4)


class TestStopChecker:
    @given(pieces=st.lists(st.text("ab ", max_size=4), max_size=12), stops=stop_lists)
    def test_pieces_give_what_the_whole_text_gives_and_nothing_of_the_stop(
        self, pieces: list[str], stops: list[str]
    ) -> None:
        expected, expected_stop = naive_stop("".join(pieces), stops)
        checker, released, matched = StopChecker(stops), "", None
        for piece in pieces:
            text, matched = checker.push(piece)
            released += text
            assert expected.startswith(released)
            if matched is not None:
                break
        assert (released + checker.flush(), matched) == (expected, expected_stop)

    @given(pieces=st.lists(st.text("ab ", max_size=4), max_size=12), stops=stop_lists)
    def test_no_more_is_held_back_than_could_begin_a_stop(self, pieces: list[str], stops: list[str]) -> None:
        checker, released, seen = StopChecker(stops), "", ""
        for piece in pieces:
            text, matched = checker.push(piece)
            if matched is not None:
                return
            released, seen = released + text, seen + piece
            held = seen[len(released) :]
            longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
            assert len(held) == longest

    def test_the_stop_complete_first_wins_and_then_the_longest(self) -> None:
        assert StopChecker(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
        assert StopChecker(["bc", "abc"]).push("xabc") == StopChecker(["abc", "bc"]).push("xabc") == ("x", "abc")

    def test_held_text_comes_out_at_the_end_once(self) -> None:
        checker = StopChecker(["copper window qqq"])
        assert checker.push("lemon river copper window") == ("lemon river ", None)
        assert (checker.flush(), checker.flush()) == ("copper window", "")

    def test_a_stop_completed_while_not_armed_is_text(self) -> None:
        checker = StopChecker(["aa"])
        assert checker.push("xaa", armed=False) == ("xa", None)
        assert checker.push("b") == ("ab", None)
        assert checker.push("aa") == ("", "aa")

    def test_the_end_of_a_stop_that_did_not_count_may_begin_one_that_does(self) -> None:
        checker = StopChecker(["aba"])
        assert checker.push("aba", armed=False) == ("ab", None)
        assert checker.push("ba") == ("", "aba")

    def test_a_stop_begun_before_and_completed_while_armed_counts(self) -> None:
        checker = StopChecker(["river copper"])
        assert checker.push("lemon river", armed=False) == ("lemon ", None)
        assert checker.push(" copper window") == ("", "river copper")


def run(
    tokenizer: Tokenizer, ids: Sequence[int], limit: int = 1000, **params: object
) -> tuple[list[str], str | None, object, int]:
    """(released pieces, finish reason, stop reason, completion tokens) of one answer."""
    sampling = SamplingParams(max_tokens=limit, **params)  # type: ignore[arg-type]
    stream = TextStream(tokenizer, sampling, limit, frozenset({END, TURN}))
    pieces = []
    for token_id in ids:
        released = stream.push(token_id)
        pieces.append(released.text)
        if released.finish_reason is not None:
            return pieces, released.finish_reason, released.stop_reason, stream.completion_tokens
    return pieces, None, None, stream.completion_tokens


class TestTextStream:
    @pytest.fixture
    def tokenizer(self, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
        return tokenizers["byte_level"]

    @pytest.fixture
    def line(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode("lemon river copper window", add_special_tokens=False)

    @pytest.mark.parametrize("end", [END, TURN])
    def test_any_end_token_ends_the_answer_without_showing(
        self, tokenizer: Tokenizer, line: list[int], end: int
    ) -> None:
        pieces, finish, reason, count = run(tokenizer, [*line, end, *line])
        assert ("".join(pieces), finish, reason, count) == ("lemon river copper window", "stop", None, len(line) + 1)

    def test_ignoring_end_tokens_goes_on_and_shows_none(self, tokenizer: Tokenizer, line: list[int]) -> None:
        ids = [*line, TURN, *line]
        pieces, finish, _, count = run(tokenizer, ids, limit=len(ids), ignore_eos=True)
        assert ("".join(pieces), finish, count) == ("lemon river copper window" * 2, "length", len(ids))

    def test_an_ignored_end_token_that_is_a_word_does_not_show_either(
        self, tokenizer: Tokenizer, line: list[int]
    ) -> None:
        stream = TextStream(tokenizer, SamplingParams(max_tokens=9, ignore_eos=True), 9, frozenset({line[0]}))
        assert stream.push(line[0]).text == ""

    def test_a_stop_token_id_is_the_reason_and_does_not_show(self, tokenizer: Tokenizer, line: list[int]) -> None:
        pieces, finish, reason, count = run(tokenizer, line, stop_token_ids=(line[2],))
        assert ("".join(pieces), finish, reason, count) == (tokenizer.decode(line[:2]), "stop", line[2], 3)
        assert run(tokenizer, [TURN], stop_token_ids=(TURN,))[1:] == ("stop", None, 1)
        assert run(tokenizer, [TURN], stop_token_ids=(TURN,), ignore_eos=True)[1:] == ("stop", TURN, 1)

    def test_a_stop_string_over_several_tokens_never_leaks(self, tokenizer: Tokenizer, line: list[int]) -> None:
        pieces, finish, reason, _ = run(tokenizer, line, stop=("river copper",))
        assert ("".join(pieces), finish, reason) == ("lemon ", "stop", "river copper")

    def test_text_held_for_a_stop_that_does_not_come_is_released(self, tokenizer: Tokenizer, line: list[int]) -> None:
        for ids, limit, finish in (([*line, TURN], 1000, "stop"), (line, len(line), "length")):
            pieces, got, reason, _ = run(tokenizer, ids, limit, stop=("copper window qqq",))
            assert ("".join(pieces), got, reason) == ("lemon river copper window", finish, None)

    def test_a_stop_within_the_cap_wins_over_the_length(self, tokenizer: Tokenizer, line: list[int]) -> None:
        *_, needed = run(tokenizer, line, stop=("copper",))
        for limit in range(1, needed + 5):
            pieces, finish, _, count = run(tokenizer, line, limit, stop=("copper",))
            assert finish == ("stop" if limit >= needed else "length")
            assert count == min(limit, needed)
            if finish == "stop":
                assert "".join(pieces) == "lemon river "
            else:
                assert "".join(pieces) == tokenizer.decode(line[:limit])

    def test_an_end_token_at_the_cap_is_a_stop(self, tokenizer: Tokenizer, line: list[int]) -> None:
        assert run(tokenizer, [*line, END], len(line) + 1)[1:] == ("stop", None, len(line) + 1)

    def test_a_character_cut_by_the_cap_or_an_end_token_is_dropped(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a" + chr(0x10FFFF), add_special_tokens=False)
        assert len(ids) == 5
        for cut in range(1, 5):
            assert "".join(run(tokenizer, ids, cut)[0]) == "a"
            assert "".join(run(tokenizer, [*ids[:cut], END])[0]) == "a"
        assert "".join(run(tokenizer, ids, 5)[0]) == "a" + chr(0x10FFFF)

    def test_endings_count_only_after_min_tokens(self, tokenizer: Tokenizer, line: list[int]) -> None:
        text = tokenizer.decode(line)
        *_, needed = run(tokenizer, line, stop=("river",))
        assert run(tokenizer, line, stop=("river",), min_tokens=needed - 1)[2] == "river"
        pieces, finish, *_ = run(tokenizer, line, len(line), stop=("river",), min_tokens=needed)
        assert ("".join(pieces), finish) == (text, "length")
        assert run(tokenizer, [*line, TURN, TURN], min_tokens=len(line) + 1)[1:] == ("stop", None, len(line) + 2)
        assert run(tokenizer, [*line, line[0]], min_tokens=len(line), stop_token_ids=(line[0],))[3] == len(line) + 1

    def test_tokens_after_the_end_are_a_mistake_of_the_caller(self, tokenizer: Tokenizer) -> None:
        stream = TextStream(tokenizer, SamplingParams(max_tokens=5), 5, frozenset({END}))
        stream.push(END)
        with pytest.raises(RuntimeError, match="finished"):
            stream.push(END)

    def test_closing_early_releases_what_was_held(self, tokenizer: Tokenizer, line: list[int]) -> None:
        stream = TextStream(tokenizer, SamplingParams(max_tokens=99, stop=("river!",)), 99, frozenset())
        shown = "".join(stream.push(token_id).text for token_id in line[: len(line) // 2])
        assert shown + stream.close() == tokenizer.decode(line[: len(line) // 2])

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_tokens_and_stops_equal_the_naive_answer(
        self, tokenizers: dict[str, Tokenizer], data: st.DataObject
    ) -> None:
        tokenizer = tokenizers["byte_level"]
        word = tokenizer.encode("copper river ", add_special_tokens=False)
        token = st.one_of(st.sampled_from(word), st.integers(0, tokenizer.vocab_size - 1))
        ids = data.draw(st.lists(token, min_size=1, max_size=40))
        text = tokenizer.decode(ids)
        slices = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(lambda p: text[p[0] : sum(p)])
        stops = data.draw(
            st.lists(st.one_of(slices, st.text("copriv ", min_size=1)), max_size=4).map(lambda s: [x for x in s if x])
        )
        limit = data.draw(st.integers(1, len(ids)))
        minimum = data.draw(st.integers(0, 3))

        expected = naive_answer(tokenizer, ids, stops, limit, minimum)
        pieces, finish, reason, count = run(tokenizer, ids, limit, stop=tuple(stops), min_tokens=minimum)
        assert ("".join(pieces), finish, reason, count) == expected
        so_far = ""
        for piece in pieces:  # a streamed answer only ever grows towards the whole one
            so_far += piece
            assert expected[0].startswith(so_far)


def naive_answer(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], limit: int, minimum: int
) -> tuple[str, str, object, int]:
    """The rules, by decoding everything from the start after each token."""
    before = ""
    for count, token_id in enumerate(ids, start=1):
        if token_id in (END, TURN) and count > minimum:
            return before, "stop", None, count
        shown = [i for i in ids[:count] if i not in (END, TURN)]
        data = b"".join(tokenizer.token_bytes(i) for i in shown if i not in tokenizer.special_ids)
        text = data.decode("utf-8", "replace")
        if any(_begins_a_character(data[-n:]) for n in (1, 2, 3)):
            text = text.removesuffix("\ufffd")
        if count > minimum:
            for end in range(len(before) + 1, len(text) + 1):
                found = [stop for stop in stops if text[:end].endswith(stop)]
                if found:
                    longest = max(found, key=len)
                    return text[: end - len(longest)], "stop", longest, count
        if count == limit:
            return text, "length", None, count
        before = text
    raise AssertionError("the limit is within the ids")


def _begins_a_character(data: bytes) -> bool:
    """Whether these last bytes are a proper beginning of some UTF-8 character."""
    return any((data + tail).decode("utf-8", "ignore") for tail in _TAILS) and not data.decode("utf-8", "ignore")


_TAILS = [bytes([second]) + b"\x80" * n for second in (0x80, 0x90, 0xA0) for n in range(3)]
