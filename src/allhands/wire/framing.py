"""Bytes and lines of JSON out of a connection, with bounds."""

from __future__ import annotations

import json
import socket
import time
from typing import Any, Protocol

from allhands.errors import AllhandsError


class Readable(Protocol):
    """What bytes are read from: a socket, or something around one."""

    def recv_into(self, view: memoryview, /) -> int:
        """Read some bytes, and return how many; 0 is the end."""
        ...


def read_into(link: Readable, view: memoryview) -> None:
    """Fill `view`.

    Raises:
        EOFError: the other side has closed the connection.
        OSError: it broke.
    """
    while view:
        count = link.recv_into(view)
        if count == 0:
            raise EOFError("it closed the connection")
        view = view[count:]


class MessageError(AllhandsError, ValueError):
    """What came is no line of this protocol."""


def encode(message: dict[str, Any]) -> bytes:
    """One message as a line of ASCII."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes | bytearray) -> dict[str, Any]:
    """The message of a line.

    Raises:
        MessageError: it is no JSON object.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter for a thousand brackets
        raise MessageError(f"no JSON ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise MessageError("JSON, but no object")
    return message


def read_message(link: socket.socket, deadline: float, longest: int) -> dict[str, Any]:
    """The message of the next line of a connection, and nothing of what follows it.

    Args:
        link: blocking.
        deadline: on the monotonic clock.
        longest: bytes that the line may have.

    Raises:
        MessageError: the line is too long or no JSON object.
        EOFError: the other side has closed the connection.
        OSError: it broke, or the deadline is over.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        link.settimeout(max(0.001, deadline - time.monotonic()))
        seen = link.recv(1 << 16, socket.MSG_PEEK)
        if not seen:
            raise EOFError("it closed the connection")
        line += link.recv(seen.find(b"\n") + 1 or len(seen))
        if len(line) > longest:
            raise MessageError(f"a line of more than {longest} bytes")
    link.settimeout(None)
    return decode(line)


class LineReader:
    """Turns the bytes of one connection into messages.

    Args:
        longest: bytes that a line may have. None: any number, for a pipe of our own.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes.

        Raises:
            MessageError: a line is too long or no JSON object.
        """
        end = data.rfind(b"\n")
        lines = []
        if end < 0:
            self._rest += data
        else:
            lines = (bytes(self._rest) + data[: end + 1]).splitlines()
            self._rest = bytearray(data[end + 1 :])
        if self._longest is not None and max(map(len, [self._rest, *lines])) > self._longest:
            raise MessageError(f"a line of more than {self._longest} bytes")
        return [decode(line) for line in lines if line]
