"""serve/tokenizer.py: exact ids and bytes, every end-token source, clear errors. Small tokenizers are built here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from serve.tokenizer import Tokenizer, TokenizerError, load_tokenizer, read_chat_template

CORPUS = [
    "the river runs past the copper window",
    "Hello world, 你好 世界",
    "emoji 🫠🥹 龜 and tabs\t\n",
    "naïve café 12345",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("two words", special=False)])
    return backend


def llama_backend(*, strip: bool = True) -> Backend:
    """Sentencepiece-like BPE with byte fallback, built without training: letters, a few words, 256 byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdehlorwé"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u2581", "hello"), ("\u2581", "\u2581")]
    tokens += ["".join(pair) for pair in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def folder(path: Path, backend: Backend, **files: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(folder(tmp_path_factory.mktemp("byte-level"), byte_level_backend()))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(folder(tmp_path_factory.mktemp("llama"), llama_backend()))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_survives_the_round_trip_and_equals_its_token_bytes(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    assert byte_level.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["byte_level", "llama"]))
def test_bytes_of_random_ids_are_what_the_decoder_decodes(
    byte_level: Tokenizer, llama: Tokenizer, data: st.DataObject, kind: str
) -> None:
    tokenizer = {"byte_level": byte_level, "llama": llama}[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    pieces = b"".join(tokenizer.token_bytes(token_id, first=n == 0) for n, token_id in enumerate(ids))
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    if kind == "byte_level" or b"\xef\xbf\xbd" not in decoded.encode():
        assert pieces.decode("utf-8", "replace") == decoded


def test_byte_fallback_and_word_markers_give_single_bytes_and_spaces(llama: Tokenizer) -> None:
    ids = llama.encode("hello 龜", add_special_tokens=False)
    assert [llama.token_bytes(i) for i in ids] == [b" hello", b" ", b"\xe9", b"\xbe", b"\x9c"]
    assert llama.token_bytes(ids[0], first=True) == b"hello"
    assert llama.token_text(ids[2]) == "bytes:\\xe9"
    assert llama.token_text(ids[0]) == " hello"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoder_drops_the_opening_marker_as_the_library_does(tmp_path: Path, scheme: Any) -> None:
    vocab = {"<unk>": 0, "\u2581a": 1, "\u2581\u2581": 2, "b": 3, "\u2581": 4}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = load_tokenizer(folder(tmp_path, backend))
    for ids in ([1, 2, 3], [2, 1], [4, 4, 3], [3, 1]):
        pieces = [tokenizer.token_bytes(token_id, first=n == 0) for n, token_id in enumerate(ids)]
        assert b"".join(pieces).decode() == tokenizer.decode(ids)


def test_a_decoder_that_joins_words_is_not_byte_exact(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = load_tokenizer(folder(tmp_path, backend))
    assert not tokenizer.byte_exact
    assert tokenizer.token_bytes(1) == b"play"


def test_ids_without_a_token_have_no_text_and_impossible_ids_are_refused(byte_level: Tokenizer) -> None:
    beyond = byte_level.vocab_size + 5
    assert byte_level.decode([beyond]) == ""
    assert byte_level.token_bytes(beyond) == b""
    assert byte_level.token_text(beyond) == ""
    for bad in (-1, 1 << 40):
        with pytest.raises(ValueError, match=r"from 0 to"):
            byte_level.decode([bad])


def test_lone_surrogates_are_refused_with_their_place(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"U\+D83E at character 3"):
        byte_level.encode("abc\ud83e", add_special_tokens=False)


def test_special_tokens_are_added_by_the_post_processor_only_when_asked(llama: Tokenizer) -> None:
    assert llama.encode("hello", add_special_tokens=True)[0] == 1
    assert 1 not in llama.encode("hello", add_special_tokens=False)


def test_a_stored_length_limit_does_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(folder(tmp_path, backend))
    text = "the river runs past the copper window"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


def test_facts_of_the_vocabulary(byte_level: Tokenizer) -> None:
    backend = byte_level_backend()
    assert byte_level.special_ids == {0, 1, 2}
    assert byte_level.vocab_size == backend.get_vocab_size()
    assert byte_level.max_token_bytes == max(len(byte_level.token_bytes(i)) for i in range(byte_level.vocab_size))
    assert byte_level.token_bytes(2) == b"<|im_end|>"
    assert byte_level.decode([2]) == ""
    assert byte_level.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_the_fingerprint_follows_the_file(tmp_path: Path, byte_level: Tokenizer, llama: Tokenizer) -> None:
    same = load_tokenizer(folder(tmp_path, llama_backend()))
    assert same.fingerprint == llama.fingerprint != byte_level.fingerprint
    assert len(same.fingerprint) == 16


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"generation_config": {"eos_token_id": [2, 0]}}, {0, 2}),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 2}}, {0, 2}),
        ({"config": {"eos_token_id": [0]}}, {0}),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, {2}),
        ({"tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}}}, {0}),
        ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, {2}),
        (
            {"special_tokens_map": {"eos_token": "<|im_end|>"}, "tokenizer_config": {"eos_token": "<|endoftext|>"}},
            {0, 2},
        ),
        ({"tokenizer_config": {"eos_token": "<not in the vocabulary>"}}, set()),
        # Only end-of-text is listed, but the template ends turns with a special token: that one must stop too.
        ({"generation_config": {"eos_token_id": 0}, "tokenizer_config": {"chat_template": "x<|im_end|>"}}, {0, 2}),
        ({"generation_config": {"eos_token_id": 0}, "tokenizer_config": {"chat_template": "x<|eot_id|>"}}, {0}),
    ],
)
def test_end_tokens_are_the_union_of_every_source(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    assert load_tokenizer(folder(tmp_path, byte_level_backend(), **files)).end_token_ids == expected


def test_a_turn_marker_in_a_template_file_counts_as_well(tmp_path: Path) -> None:
    folder(tmp_path, byte_level_backend())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}<|im_end|>")
    assert load_tokenizer(tmp_path).end_token_ids == {2}


def test_the_named_end_token_is_special_even_if_the_tokenizer_forgot(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"<": 0, "e": 1, ">": 2, "<e>": 3}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = load_tokenizer(folder(tmp_path, backend, tokenizer_config={"eos_token": "<e>"}))
    assert tokenizer.end_token_ids == tokenizer.special_ids == {3}
    assert tokenizer.vocab_size == 4
    assert tokenizer.decode([1, 3]) == "e"
    assert tokenizer.encode("<e>", add_special_tokens=False) == [3]


def test_tokens_listed_beside_the_tokenizer_are_those_of_transformers(tmp_path: Path) -> None:
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    known = backend.token_to_id("<tool_call>")
    listed = {
        str(size + 1): {"content": "<plain>", "special": False},
        str(size): {"content": "<|eot_id|>", "special": True},
        str(known): {"content": "<tool_call>", "special": True},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "<|eot_id|>",
        "added_tokens_decoder": listed,
    }
    tokenizer = load_tokenizer(folder(tmp_path, backend, tokenizer_config=config))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    text = "a<|eot_id|> b<tool_call>c<plain>d"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference(text)["input_ids"]
    assert {known, size, size + 1} <= set(ids)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "a bc<plain>d"
    assert {known, size} <= tokenizer.special_ids
    assert tokenizer.end_token_ids == {size}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"config": {"bos_token_id": 0}}, 0),
        ({"tokenizer_config": {"bos_token": "<|im_start|>"}, "config": {"bos_token_id": 0}}, 1),
        ({"tokenizer_config": {"bos_token": None}, "generation_config": {"bos_token_id": 0}}, 0),
    ],
)
def test_beginning_token(tmp_path: Path, files: dict[str, Any], expected: int | None) -> None:
    assert load_tokenizer(folder(tmp_path, byte_level_backend(), **files)).bos_token_id == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "Unknown"}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("config.json", b"[1]"),
        ("config.json", b'{"eos_token_id": "2"}'),
        ("generation_config.json", b'{"eos_token_id": [1, true]}'),
        ("generation_config.json", b"not json"),
        ("tokenizer_config.json", b'{"eos_token": 7}'),
        ("tokenizer_config.json", b'{"chat_template": 7}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"0": "a"}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"4000": {"content": "<far>"}}}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]}'),
    ],
)
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder(tmp_path, byte_level_backend())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)


def test_template_sources_in_order(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "C"}))
    assert read_chat_template(tmp_path) == "C"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(tmp_path) == "D"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "S"}))
    assert read_chat_template(tmp_path) == "S"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert read_chat_template(tmp_path) == "J"
