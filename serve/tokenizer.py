"""Text to token ids and back for one model folder: ``tokenizer.json`` plus everything that says where a turn ends.

It uses the ``tokenizers`` library alone. It does not know chat messages, requests, sampling or tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from serve.json_file import JsonFileError, read_object, shown

# Markers that close a turn in the chat templates of known families. One counts as an end token when the model's own
# template writes it and the vocabulary holds it as a special token.
TURN_END_MARKERS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>", "<|eot|>")
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


# Longer texts are counted in pieces of so many characters before they are encoded as a whole: a text of 20 MB that
# cannot fit must cost neither gigabytes nor the time of every other thread.
PIECE_CHARACTERS = 1 << 20
# A cut may split a token; so many fewer tokens a piece are taken as certain.
CUT_SLACK = 8
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024


class TokenizerError(Exception):
    """A tokenizer file is missing or broken; the message names the file."""


class TooManyTokens(ValueError):
    """A text has more tokens than the caller can use; ``count`` is how many there are at least."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the text has at least {count} tokens")
        self.count = count


class Tokenizer:
    """The tokenizer of one model. Immutable after loading, so any number of threads may use it at once.

    vocab_size: highest token id + 1 (a model's embedding may have more rows; those ids have no text).
    special_ids: tokens that carry no text of their own and are skipped when decoding.
    end_token_ids: every token that ends an answer, the union of all sources (see ``load_tokenizer``).
    bos_token_id: the tokenizer's beginning token, else the one of generation_config.json or config.json, else None.
    special_tokens: name (``bos_token``, ...) -> text, as tokenizer_config.json and special_tokens_map.json name them.
    fingerprint: first 16 hex digits of the SHA-256 of tokenizer.json.
    max_token_bytes: most UTF-8 bytes any single token stands for.
    byte_exact: the text of a token sequence is the concatenation of its tokens' bytes; ``token_bytes`` is then exact.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        end_token_ids: frozenset[int],
        bos_token_id: int | None,
        special_tokens: dict[str, str],
        fingerprint: str,
    ) -> None:
        self._backend = backend
        self._decoder = _DecoderShape(backend)
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        specials = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(specials)
        self._special_texts = tuple(sorted((token.content for token in specials.values()), key=len, reverse=True))
        plain = [(token.content, i) for i, token in specials.items() if not (token.rstrip or token.lstrip)]
        self._separator: tuple[str, int] = min(plain, key=lambda pair: pair[1]) if plain else ("", -1)
        self.end_token_ids = end_token_ids
        self.bos_token_id = bos_token_id
        self.special_tokens = special_tokens
        self.fingerprint = fingerprint
        self.byte_exact = self._decoder.byte_exact
        self._bytes_of = {i: self._piece(token, i) for token, i in vocabulary.items()}
        self.max_token_bytes = max(map(len, self._bytes_of.values()), default=0)

    def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Token ids of ``text``; special-token text in it becomes that token, as in the model's own tokenizer.

        ``add_special_tokens`` lets the post-processor add what it adds (usually a beginning token or nothing).
        Raises ValueError for text that is not valid Unicode (a lone surrogate), and TooManyTokens, early, for a long
        text that has more than ``limit`` tokens (a short one is returned whole: the caller counts anyway).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
            ) from None
        if limit is not None and len(text) > PIECE_CHARACTERS:
            self._refuse_above(text, limit)
        return self._encode(text, add_special_tokens)

    def encode_apart(self, pieces: Sequence[str], limit: int | None = None) -> list[int]:
        """Ids of the text that ``pieces`` make up, where no token reaches over a seam; none is added.

        A special token's text that is cut by a seam is text like any other. Every piece but the first is encoded behind
        a special token, so that it is not taken for the beginning of a text.
        """
        ids = self.encode(pieces[0], add_special_tokens=False, limit=limit)
        for piece in filter(None, pieces[1:]):
            found = self.encode(self._separator[0] + piece, add_special_tokens=False, limit=limit)
            ids += found[1:] if found[:1] == [self._separator[1]] else self._encode(piece, False)
            if limit is not None and len(ids) > limit:
                raise TooManyTokens(len(ids))
        return ids

    def special_texts(self) -> tuple[str, ...]:
        """The texts that become control tokens when they are encoded, longest first."""
        return self._special_texts

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call without offsets: half the time and memory of the plain one, and other threads run meanwhile.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _refuse_above(self, text: str, limit: int) -> None:
        count = start = 0
        while start < len(text):
            end = start + PIECE_CHARACTERS
            end = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end)) if end < len(text) else end
            end = start + PIECE_CHARACTERS if end < 0 else end
            count += max(0, len(self._encode(text[start:end], False)) - CUT_SLACK)
            if count > limit:
                raise TooManyTokens(count)
            start = end

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Ids without a token give nothing; bytes that are not UTF-8 give U+FFFD.

        Raises ValueError for ids that are negative or beyond 32 bits.
        """
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise ValueError(f"token ids must be integers from 0 to {self.vocab_size - 1}") from None
        return text

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact vocabulary text, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Bytes one token adds to a text; part of a character is possible. Empty for ids without a token.

        ``first``: the token opens the text, where tokenizers that mark word starts drop the leading space.
        Specials give the bytes of their text. Exact where ``byte_exact``, else the token decoded alone.
        """
        data = self._bytes_of.get(token_id, b"")
        token = self._backend.id_to_token(token_id) if first else None
        return data if token is None else self._decoder.open_text(token, data)

    def token_text(self, token_id: int) -> str:
        """Readable form of one token for logprobs: its text, or ``bytes:\\xe4\\xbd`` for part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _piece(self, token: str, token_id: int) -> bytes:
        data = self._decoder.piece(token)
        return self.decode([token_id], skip_special_tokens=False).encode("utf-8") if data is None else data


class _DecoderShape:
    """What the ``decoder`` entry of tokenizer.json does to single tokens, where that is simple enough to say.

    Byte-level: every character of a token stands for one byte. Metaspace: U+2581 is a space, ``<0xAB>`` may be a byte,
    and the opening token loses its marker (Metaspace) or one space (Strip). Anything else is not byte-exact.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        spec: dict[str, Any] = (
            {"type": "none"} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        )
        steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._metaspace = not self._byte_level and all(_is_metaspace_step(step) for step in steps)
        if "Strip" in kinds and ("Fuse" not in kinds or kinds.index("Fuse") > kinds.index("Strip")):
            self._metaspace = False
        self.byte_exact = self._byte_level or self._metaspace
        self._byte_fallback = "ByteFallback" in kinds
        self._drop_marker = any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in steps)
        self._drop_space = any(step["type"] == "Strip" and step["start"] == 1 for step in steps)
        self._byte_of = _byte_level_alphabet()

    def piece(self, token: str) -> bytes | None:
        if self._byte_level:
            try:
                return bytes([self._byte_of[character] for character in token])
            except KeyError:  # an added token, kept as written
                return token.encode("utf-8")
        if not self._metaspace:
            return None
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(_METASPACE, " ").encode("utf-8")

    def open_text(self, token: str, data: bytes) -> bytes:
        if self._metaspace and self._drop_marker:
            return data if len(data) == 1 and _METASPACE not in token else token.replace(_METASPACE, "").encode("utf-8")
        return data.removeprefix(b" ") if self._metaspace and self._drop_space else data


def _is_metaspace_step(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Replace":
        return bool(step["pattern"] == {"String": _METASPACE} and step["content"] == " ")
    if kind == "Strip":
        return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
    if kind == "Metaspace":
        return bool(step["replacement"] == _METASPACE)
    return kind in ("ByteFallback", "Fuse")


def _byte_level_alphabet() -> dict[str, int]:
    """Printable character -> byte, the byte-level BPE alphabet of GPT-2: bytes that do not print move above U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model folder; raises TokenizerError naming the file that is missing or broken.

    End tokens are the union of ``eos_token_id`` in generation_config.json and config.json (a number or a list),
    ``eos_token`` in tokenizer_config.json and special_tokens_map.json, and the turn-end marker that the chat template
    writes: a copy whose generation config lists only the end-of-text token must still stop at the end of its turn.
    """
    path = model_dir / "tokenizer.json"
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= MAX_TOKENIZER_BYTES):
            raise TokenizerError(f"{path} is not a file of at most {MAX_TOKENIZER_BYTES} bytes")
        raw = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        backend = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics on some broken files, and a panic is no Exception
        raise TokenizerError(f"{path} is not a usable tokenizer: {str(error)[:300]}") from error
    backend.no_truncation()  # a stored training-time limit must not cut prompts
    backend.no_padding()

    named = [_special_tokens(model_dir / file) for file in ("special_tokens_map.json", "tokenizer_config.json")]
    listed = _add_listed(backend, model_dir / "tokenizer_config.json")
    _mark_special(backend, [*named[0].values(), *named[1].values(), *listed])
    names = named[0] | named[1]
    models = [(name, read_json(model_dir / name)) for name in ("generation_config.json", "config.json")]
    ends = {i for name, config in models for i in _ids(model_dir / name, "eos_token_id", config.get("eos_token_id"))}
    markers = [one["eos_token"] for one in named if "eos_token" in one]
    template = read_chat_template(model_dir) or ""
    specials = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    markers += [marker for marker in TURN_END_MARKERS if marker in template and marker in specials]
    ends.update(i for i in map(backend.token_to_id, markers) if i is not None)

    begins = [backend.token_to_id(names["bos_token"])] if "bos_token" in names else []
    begins += [i for name, config in models for i in _ids(model_dir / name, "bos_token_id", config.get("bos_token_id"))]
    return Tokenizer(
        backend,
        end_token_ids=frozenset(ends),
        bos_token_id=next((i for i in begins if i is not None), None),
        special_tokens=names,
        fingerprint=hashlib.sha256(raw).hexdigest()[:16],
    )


def read_chat_template(model_dir: Path) -> str | None:
    """The model's chat template text, or None. ``chat_template.jinja`` first, then tokenizer_config.json, then
    ``chat_template.json``; of several named templates the one called "default" (or the only one) is meant."""
    path = model_dir / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"cannot read {path}: {error}") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json(model_dir / name).get("chat_template")
        if isinstance(value, list):
            value = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
        if isinstance(value, dict):
            if "default" not in value and len(value) != 1:
                raise TokenizerError(f'{model_dir / name}: none of the templates {sorted(value)} is called "default"')
            value = value.get("default") or next(iter(value.values()))
        if value is not None and not isinstance(value, str):
            raise TokenizerError(f"{model_dir / name}: chat_template must be text, got {type(value).__name__}")
        if value:
            return value
    return None


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object; empty when the file does not exist. Raises TokenizerError when it is broken."""
    try:
        return read_object(path) or {}
    except JsonFileError as error:
        raise TokenizerError(str(error)) from None


def _special_tokens(path: Path) -> dict[str, str]:
    config, names = read_json(path), {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise TokenizerError(f"{path}: {name} must be text, got {shown(value)}")
        if value:
            names[name] = value
    return names


def _add_listed(backend: tokenizers.Tokenizer, path: Path) -> list[str]:
    """Adds what ``added_tokens_decoder`` (id -> token) lists and tokenizer.json lacks; -> the texts it calls special.

    Tools that edit a tokenizer write some tokens only there. TokenizerError where the listed id is not the next one."""
    listed = read_json(path).get("added_tokens_decoder") or {}
    field = f"{path}: added_tokens_decoder"
    if not isinstance(listed, dict) or not all(key.isdecimal() and len(key) < 10 for key in listed):
        raise TokenizerError(f"{field} must be an object of token ids, got {shown(listed)}")
    special = []
    for key, token in sorted(listed.items(), key=lambda item: int(item[0])):
        text = token.get("content") if isinstance(token, dict) else None
        if not isinstance(text, str) or not text:
            raise TokenizerError(f"{field}[{key}] must be a token with its content, got {shown(token)}")
        flags = {name: token.get(name) is True for name in ("special", "lstrip", "rstrip", "single_word", "normalized")}
        if flags["special"]:
            special.append(text)
        if backend.token_to_id(text) is None:
            backend.add_tokens([tokenizers.AddedToken(text, **flags)])
            if backend.token_to_id(text) != int(key):
                raise TokenizerError(
                    f"{field}[{key}] is {shown(text)}, which tokenizer.json lacks, and not the next id"
                )
    return special


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Named special tokens are special even where tokenizer.json forgot to say so; the vocabulary never grows."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = sorted({text for text in texts if text not in special and backend.token_to_id(text) is not None})
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _ids(path: Path, field: str, value: Any) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise TokenizerError(f"{path}: {field} must be token ids (integers >= 0), got {shown(value)}")
    return list(values)
