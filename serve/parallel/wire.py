"""Messages between ranks over a socket of their own: a kind, a few whole numbers, and arrays, copied as they lie.

A blocking read on a socket costs an idle rank nothing, has no timeout, and ends when the other side is gone. Numbers
only, so nothing that is read can run. This file does not know what the numbers mean.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Kind(IntEnum):
    """The work a message announces."""

    FORWARD = 1
    PROPOSE = 2
    DRAFT = 3
    VERIFY = 4
    LOGITS = 5
    FLUSH = 6


@dataclass(frozen=True)
class Message:
    """numbers: int64; arrays: flat, int32 or int64, writable and the receiver's own."""

    kind: Kind
    numbers: tuple[int, ...] = ()
    arrays: tuple[Tensor, ...] = ()


_HEAD = struct.Struct("<IBBB")  # bytes behind the head; kind; how many numbers; how many arrays
_ARRAY = struct.Struct("<BI")  # bytes of an element; elements
_DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<i8")}


def encode(kind: Kind, numbers: Sequence[int] = (), arrays: Sequence[Tensor] = ()) -> bytes:
    """A message of int32 or int64 tensors on the host."""
    heads = b"".join(_ARRAY.pack(array.element_size(), array.numel()) for array in arrays)
    body = b"".join(array.contiguous().numpy().tobytes() for array in arrays)
    packed = struct.pack(f"<{len(numbers)}q", *numbers) + heads + body
    return _HEAD.pack(len(packed), kind, len(numbers), len(arrays)) + packed


def receive(sock: socket.socket) -> Message | None:
    """The next message; None when the other side has closed."""
    head = _exactly(sock, _HEAD.size)
    if head is None:
        return None
    size, kind, count, arrays = _HEAD.unpack(head)
    body = _exactly(sock, size)
    if body is None:
        return None
    numbers = struct.unpack_from(f"<{count}q", body)
    at = 8 * count
    places = [_ARRAY.unpack_from(body, at + i * _ARRAY.size) for i in range(arrays)]
    at += arrays * _ARRAY.size
    found = []
    for width, length in places:
        found.append(torch.from_numpy(np.frombuffer(body, _DTYPES[width], length, at).copy()))
        at += width * length
    return Message(Kind(kind), numbers, tuple(found))


def _exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return data
