"""What workers and servers say to one another: a fixed header, then bytes whose number the reader
knows or bounds beforehand.

A frame is a header of 28 bytes (little endian: magic, kind, flags, chunk, meta, round, bytes) and a
payload. Control messages are JSON with fixed fields (`op`, …) of known types; values are raw
numbers of the key's dtype. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import torch

from allhands.errors import AllhandsError
from allhands.wire.framing import MessageError, Readable, decode, read_into

MAGIC = b"hK"
_HEADER = struct.Struct("<2sBBIIQQ")
HEADER_BYTES = _HEADER.size
# A control message names every key once; 100,000 keys take about 10 MB.
LONGEST_MESSAGE = 32 << 20
LONGEST_ROWS = 256 << 20
LONGEST_STATE = 64 << 30
_FIRST, _BLOCK = 64 << 10, 4 << 20


class Kind(IntEnum):
    """What a frame is."""

    MESSAGE = 1  # JSON, either way
    INIT = 2  # first value of a chunk, to the server
    PUSH = 3  # a chunk's gradient or value, to the server
    PULL = 4  # asks for a chunk of version `round` or later
    VALUE = 5  # a chunk's value at version `round`, to the worker
    PUSH_ROWS = 6
    PULL_ROWS = 7
    ROWS = 8
    BEAT = 9  # the worker lives
    STATE = 10  # a safetensors file, either way


class Flag(IntFlag):
    """How the payload travels."""

    NONE = 0
    SHARED = 1  # no payload: it lies in memory that both map
    WANTED = 2  # a push whose new value is to be sent back
    COMPRESSED = 4
    OWN = 8  # with SHARED, in the memory of this worker and not in that of all


class FrameError(AllhandsError, RuntimeError):
    """The other side sent what is no frame of ours."""


@dataclass(slots=True)
class Frame:
    """A frame's header."""

    kind: Kind
    flags: int
    chunk: int
    meta: int
    round: int
    nbytes: int


def pack(
    kind: Kind, flags: int = 0, chunk: int = 0, meta: int = 0, round: int = 0, nbytes: int = 0
) -> bytes:
    return _HEADER.pack(MAGIC, kind, flags, chunk, meta, round, nbytes)


def unpack(data: bytes | bytearray | memoryview) -> Frame:
    """A header's fields.

    Raises:
        FrameError: it is none.
    """
    magic, kind, flags, chunk, meta, number, nbytes = _HEADER.unpack(data)
    if magic != MAGIC or not 1 <= kind <= Kind.STATE:
        raise FrameError("what came is no frame of this protocol")
    return Frame(Kind(kind), flags, chunk, meta, number, nbytes)


def message(fields: dict[str, Any]) -> bytes:
    """A control message with its header."""
    body = json.dumps(fields, separators=(",", ":")).encode()
    return pack(Kind.MESSAGE, nbytes=len(body)) + body


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_header(link: Readable, buffer: bytearray) -> Frame:
    """The next frame's header, read through `buffer` of HEADER_BYTES."""
    read_into(link, memoryview(buffer))
    return unpack(buffer)


def read_bytes(link: Readable, count: int, longest: int) -> bytearray:
    """A payload of `count` bytes."""
    if count > longest:
        raise FrameError(f"a payload of {count} bytes; at most {longest} are allowed")
    data = bytearray()
    while len(data) < count:  # room for what has come, not for what a header promises
        start = len(data)
        data.extend(bytes(min(max(_FIRST, start), _BLOCK, count - start)))
        read_into(link, memoryview(data)[start:])
    return data


def read_message(link: Readable, count: int) -> dict[str, Any]:
    """A control message's fields."""
    try:
        return decode(read_bytes(link, count, LONGEST_MESSAGE))
    except MessageError as error:
        raise FrameError(f"a control message is {error}") from error
