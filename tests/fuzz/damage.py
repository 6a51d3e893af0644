"""Ways to damage the files of a folder: bytes, values of a JSON file, the header of a safetensors file.

Each strategy gives a function from the file's bytes to other bytes and a word for what it touched.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Damage:
    """``touched``: the top-level key or tensor that changed, None where bytes did."""

    name: str
    touched: str | None
    apply: Callable[[bytes], bytes]

    def __repr__(self) -> str:
        return self.name


# Values that a field of a configuration never means, or rarely: each has been the end of some server.
ODD_TEXTS = ["NaN", "Infinity", "-Infinity", "1e999", "-0.0", "1e-320", "9" * 39, "9" * 400, "-1" + "0" * 30]
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 7, 63, 64, 65, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 63, 0.0, 0.5, 1.0, -3.5),
    *(
        1e-9,
        1e30,
        "",
        "x",
        "llama",
        "../../etc/passwd",
        "1",
        "\u0000",
        "x" * 5000,
        [],
        [None],
        [[]],
        [0, 0],
        [-1],
        ["a"],
    ),
    *([1 << 40], list(range(300)), {}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": ["x"]}, {"type": {}}, [[1], {}]),
]


def value_text() -> st.SearchStrategy[str]:
    """JSON text of an odd value, sometimes one that no JSON writer would write."""
    return st.sampled_from([json.dumps(value) for value in ODD_VALUES] + ODD_TEXTS)


def byte_damage() -> st.SearchStrategy[Damage]:
    """Cut, flipped, inserted, doubled or replaced bytes anywhere."""
    place = st.floats(0, 1, exclude_max=True)
    junk = st.sampled_from(
        [b"", b"\x00", b"\xff", b"{", b"[" * 100_000, b'{"a":' * 20_000, b"\xed\xa0\x80", b"\xef\xbb\xbf"]
    )

    def cut(at: float) -> Damage:
        return Damage(f"cut at {at:.3f}", None, lambda data: data[: int(at * len(data))])

    def insert(at: float, what: bytes) -> Damage:
        def apply(data: bytes) -> bytes:
            where = int(at * len(data))
            return data[:where] + what + data[where:]

        return Damage(f"{what[:8]!r} x {len(what)} at {at:.3f}", None, apply)

    def flip(at: float, bits: int) -> Damage:
        def apply(data: bytes) -> bytes:
            if not data:
                return data
            where = int(at * len(data))
            return data[:where] + bytes([data[where] ^ bits]) + data[where + 1 :]

        return Damage(f"bits {bits:02x} at {at:.3f}", None, apply)

    return st.one_of(
        st.builds(cut, place),
        st.builds(insert, place, junk),
        st.builds(flip, place, st.integers(1, 255)),
        st.binary(max_size=40).map(lambda data: Damage(f"only {data!r}", None, lambda _: data)),
    )


def json_damage(names: list[str]) -> st.SearchStrategy[Damage]:
    """One value of a JSON object replaced, dropped, doubled or added; ``names`` are keys worth adding."""

    def change(pick: int, how: str, text: str, extra: str) -> Damage:
        def apply(data: bytes) -> bytes:
            return _rewrite(json.loads(data), pick, how, text, extra)[0]

        return Damage(f"{how} #{pick} {text[:40]} {extra}", None, apply)

    return st.builds(
        change,
        st.integers(0, 200),
        st.sampled_from(["replace", "replace", "replace", "drop", "double", "add", "add"]),
        value_text(),
        st.sampled_from(names),
    )


def _rewrite(tree: dict[str, Any], pick: int, how: str, text: str, extra: str) -> tuple[bytes, str]:
    """JSON text with one change; a marker stands where raw text goes."""
    marker = "\u2603here\u2603"
    paths: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(items)[:60]:
            paths.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(tree)
    doubled = ""
    if how == "add" or not paths:
        tree[extra] = marker
        key: Any = extra
    else:
        holder, key = paths[pick % len(paths)]
        if how == "drop":
            del holder[key]
        elif how == "double" and isinstance(holder, dict):
            doubled = f"{json.dumps(key)}: {json.dumps(holder[key])}, "
            holder[key] = marker
        else:
            holder[key] = marker
    whole = json.dumps(tree).replace(json.dumps(marker), text)
    if doubled and json.dumps(key) in whole:
        whole = whole.replace(json.dumps(key), doubled + json.dumps(key), 1)
    return whole.encode(), str(key)


def tensor_damage() -> st.SearchStrategy[Damage]:
    """The header of a safetensors file: its length, or the dtype, shape, offsets or name of one tensor."""
    lengths = st.sampled_from([0, 1, 7, 1 << 20, 1 << 27, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
    dtypes = st.sampled_from(
        ["F32", "F16", "BF16", "F64", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "X", "", 5]
    )
    shapes = st.sampled_from(
        [[], [0], [-1], [1], [64], [64, 64], [1 << 62, 4], [1 << 31, 1 << 33], [64, 64, 1], "x", [1.5]]
    )
    offsets = st.sampled_from(
        [[0, 0], [0, 4], [4, 0], [-4, 4], [0, 1 << 62], [1 << 62, 1 << 63], [0], [0, 4, 8], "x", None]
    )

    def length(value: int) -> Damage:
        return Damage(f"header length {value}", None, lambda data: struct.pack("<Q", value) + data[8:])

    def entry(pick: int, field: str, value: Any) -> Damage:
        def apply(data: bytes) -> bytes:
            (size,) = struct.unpack_from("<Q", data)
            header = json.loads(data[8 : 8 + size])
            names = [name for name in header if name != "__metadata__"]
            name = names[pick % len(names)]
            if field == "name":
                header[value] = header.pop(name)
            elif field == "drop":
                del header[name]
            elif field == "swap":
                other = names[(pick + 1) % len(names)]
                header[name], header[other] = header[other], header[name]
            elif field == "alias":
                header[name] = {**header[name], "data_offsets": header[names[(pick + 1) % len(names)]]["data_offsets"]}
            else:
                header[name] = {**header[name], field: value}
            text = json.dumps(header).encode()
            return struct.pack("<Q", len(text)) + text + data[8 + size :]

        return Damage(f"tensor #{pick} {field} {value!r}", None, apply)

    def numbers(pick: int, value: bytes) -> Damage:
        def apply(data: bytes) -> bytes:
            (size,) = struct.unpack_from("<Q", data)
            where = 8 + size + (pick * 4) % max(4, len(data) - 8 - size - 4)
            return data[:where] + value + data[where + 4 :]

        return Damage(f"number #{pick} = {value!r}", None, apply)

    return st.one_of(
        st.builds(length, lengths),
        st.builds(entry, st.integers(0, 50), st.just("dtype"), dtypes),
        st.builds(entry, st.integers(0, 50), st.just("shape"), shapes),
        st.builds(entry, st.integers(0, 50), st.just("data_offsets"), offsets),
        st.builds(
            entry, st.integers(0, 50), st.just("name"), st.sampled_from(["", "x", "__metadata__", "../x", "\u0000"])
        ),
        st.builds(entry, st.integers(0, 50), st.sampled_from(["drop", "swap", "alias"]), st.none()),
        st.builds(
            numbers, st.integers(0, 1 << 20), st.sampled_from([b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff" * 4])
        ),
    )
