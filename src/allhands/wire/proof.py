"""How a connection begins: each side proves that it knows the job's token, which never travels.

The listener sends a random challenge. The peer answers with its own challenge and an HMAC over both
and over what it says of itself. The listener answers with an HMAC over both the other way round, or
with zeros when it has another token. What the peer says is not looked into before its proof is
right.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Generator
from typing import Any

from allhands.errors import AllhandsError
from allhands.wire.framing import read_into
from allhands.wire.users import of_another_user

# The variable that has the job's secret: the same random text in all of its processes.
TOKEN = "ALLHANDS_TOKEN"
GREETING = b"allhands wire 1\n"
_NONCE = 32
_PROOF = 32
_LONGEST = 1 << 14
_LENGTH = struct.Struct("<I")
_HEAD = len(GREETING) + _NONCE + _PROOF + _LENGTH.size
_REFUSAL = bytes(_PROOF)
# Seconds in which a connection must have proven itself.
PATIENCE = 10.0


class RefusedError(AllhandsError, RuntimeError):
    """The other side is not of this job, or does not want this connection."""


def new_token() -> str:
    """A secret for a job: the one that is set, else a new one."""
    return os.environ.get(TOKEN) or secrets.token_hex(32)


def job_token(name: str) -> bytes:
    """The token of a listener whose `name` all processes of the job know, and maybe others: it has
    the job's secret in it, where there is one."""
    return f"{name}\n{os.environ.get(TOKEN, '')}".encode()


def proof_of(token: bytes, side: bytes, *parts: bytes) -> bytes:
    """The HMAC that proves the token.

    `side` is b"peer" or b"listener", so that neither can repeat what the other said.
    """
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hmac.new(token, side + digests, hashlib.sha256).digest()


def listener_side(token: bytes) -> Generator[tuple[bytes, int], bytes, dict[str, Any]]:
    """The listener's side of the proof, apart from any connection.

    Yields bytes to send and how many bytes to read next, gets those bytes, and returns what the
    peer says of itself.
    """
    challenge = secrets.token_bytes(_NONCE)
    head = yield GREETING + challenge, _HEAD
    rest = head[len(GREETING) :]
    nonce, proof = rest[:_NONCE], rest[_NONCE : _NONCE + _PROOF]
    (length,) = _LENGTH.unpack(rest[_NONCE + _PROOF :])
    if not head.startswith(GREETING) or length > _LONGEST:
        raise RefusedError("it does not speak this protocol")
    body = yield b"", length
    if not hmac.compare_digest(proof, proof_of(token, b"peer", challenge, nonce, body)):
        yield _REFUSAL, 0
        raise RefusedError("it does not know this job's token")
    yield proof_of(token, b"listener", nonce, challenge), 0
    said = json.loads(body)
    if not isinstance(said, dict):
        raise RefusedError("it does not speak this protocol")
    return said


def introduction(token: bytes, challenge: bytes, nonce: bytes, body: bytes) -> bytes:
    """What a peer answers to a challenge."""
    proof = proof_of(token, b"peer", challenge, nonce, body)
    return GREETING + nonce + proof + _LENGTH.pack(len(body)) + body


def introduce(
    link: socket.socket, token: bytes, said: dict[str, Any], patience: float | None = None
) -> None:
    """The peer's side; afterwards the connection waits for ever.

    Args:
        link: as it was opened.
        token: the job's.
        said: what this process says of itself, at most 16 KiB of JSON.
        patience: seconds in which the other side must answer each time; None is `PATIENCE`.

    Raises:
        RefusedError: the listener speaks something else, or either does not know the token.
        OSError, EOFError: it is gone, or too slow.
    """
    link.settimeout(PATIENCE if patience is None else patience)
    head = bytearray(len(GREETING) + _NONCE)
    read_into(link, memoryview(head))
    if not head.startswith(GREETING):
        raise RefusedError("it is no listener of this version of allhands")
    challenge, nonce = bytes(head[len(GREETING) :]), secrets.token_bytes(_NONCE)
    link.sendall(introduction(token, challenge, nonce, json.dumps(said).encode()))
    answer = bytearray(_PROOF)
    read_into(link, memoryview(answer))
    if not hmac.compare_digest(bytes(answer), proof_of(token, b"listener", nonce, challenge)):
        raise RefusedError("it has another token")
    if of_another_user(link):
        raise RefusedError("it is a process of another user of this host")
    link.settimeout(None)
