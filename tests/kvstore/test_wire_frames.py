"""Frames are read whole, however they arrive, and a promise of many bytes takes no memory."""

from __future__ import annotations

import random
import socket
import struct
import threading
import tracemalloc

import pytest

from allhands.kvstore.wire_frames import (
    HEADER_BYTES,
    MAGIC,
    FrameError,
    Kind,
    message,
    pack,
    read_bytes,
    read_message,
    unpack,
)


def test_a_payload_comes_in_any_pieces() -> None:
    data = random.Random(3).randbytes(9_000_001)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(data,))
        sender.start()
        assert read_bytes(ours, len(data), len(data)) == data
        sender.join()


def test_a_promise_of_many_bytes_takes_no_memory() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(100))
        theirs.close()
        tracemalloc.start()
        try:
            with pytest.raises(EOFError):
                read_bytes(ours, 64 << 30, 64 << 30)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_payload_above_the_limit_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        pytest.raises(FrameError, match="a payload of 11 bytes; at most 10 are allowed"),
    ):
        read_bytes(ours, 11, 10)


def test_headers_are_those_that_were_packed_and_nothing_else_is_one() -> None:
    frame = unpack(pack(Kind.PUSH, 3, 7, 9, 1 << 63, (1 << 64) - 1))
    assert (frame.kind, frame.flags, frame.chunk, frame.meta, frame.round) == (
        Kind.PUSH,
        3,
        7,
        9,
        1 << 63,
    )
    assert frame.nbytes == (1 << 64) - 1
    for wrong in (
        bytes(HEADER_BYTES),
        MAGIC + bytes(HEADER_BYTES - 2),
        MAGIC + b"\x0b" + bytes(HEADER_BYTES - 3),
    ):
        with pytest.raises(FrameError, match="no frame of this protocol"):
            unpack(wrong)
    with pytest.raises(struct.error):
        unpack(MAGIC)


def test_messages_are_json_objects() -> None:
    for body, told in (
        (b"[1]", "JSON, but no object"),
        (b'{"op":', "no JSON"),
        (b"\xff", "no JSON"),
    ):
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(FrameError, match=told):
            theirs.sendall(body)
            read_message(ours, len(body))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(message({"op": "bye"})[HEADER_BYTES:])
        assert read_message(ours, len(message({"op": "bye"})) - HEADER_BYTES) == {"op": "bye"}
