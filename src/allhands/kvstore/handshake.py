"""How a connection begins: each side proves that it knows the job's token, which never travels; TLS where it is asked for.

The server sends a random challenge, the client answers with its own and an HMAC over both and over what it says of itself, and
the server with an HMAC over both the other way round. Nothing that the client sends is kept or looked into before that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import ssl
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.errors import AllhandsError, UserError
from allhands.kvstore.frames import read_into

TOKEN = "ALLHANDS_KVSTORE_TOKEN"
TLS = ("ALLHANDS_KVSTORE_TLS_CERT", "ALLHANDS_KVSTORE_TLS_KEY", "ALLHANDS_KVSTORE_TLS_CA")
_GREETING = b"allhands-kvstore 1\n"
_NONCE = 32
_PROOF = 32
_LONGEST = 4096
_LENGTH = struct.Struct("<I")
# Seconds within which a connection must have proven itself.
PATIENCE = 10.0


class RefusedError(AllhandsError, RuntimeError):
    """The other side is not of this job, or does not want this connection."""


def key(number: int) -> str:
    """Under which key of the job's store server `number` makes itself known."""
    return f"allhands/server/{number}"


def token_from(environ: Mapping[str, str]) -> bytes:
    """The job's token.

    Raises:
        UserError: there is none.
    """
    token = environ.get(TOKEN, "")
    if len(token) < 16:
        raise UserError(
            f"{TOKEN} is not set: parameter servers talk only to workers of their own job. `allhands launch -s 1 …` sets it; "
            "with another launcher, set it to the same long random text for all workers and servers"
        )
    return token.encode()


def _proof(token: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, side + b"".join(hashlib.sha256(part).digest() for part in parts), hashlib.sha256).digest()


def greet(link: socket.socket, token: bytes) -> dict[str, Any]:
    """The server's side; what the client says of itself.

    Raises:
        RefusedError: it does not know the token, or speaks something else.
        OSError, EOFError: it is gone, or too slow.
    """
    link.settimeout(PATIENCE)
    challenge = secrets.token_bytes(_NONCE)
    link.sendall(_GREETING + challenge)
    head = bytearray(len(_GREETING) + _NONCE + _PROOF + _LENGTH.size)
    read_into(link, memoryview(head))
    if not head.startswith(_GREETING):
        raise RefusedError("the connection does not speak this protocol")
    rest = bytes(head[len(_GREETING) :])
    nonce, proof, length = rest[:_NONCE], rest[_NONCE : _NONCE + _PROOF], _LENGTH.unpack(rest[_NONCE + _PROOF :])[0]
    if length > _LONGEST:
        raise RefusedError("the connection does not speak this protocol")
    said = bytearray(length)
    read_into(link, memoryview(said))
    if not hmac.compare_digest(proof, _proof(token, b"worker", challenge, nonce, bytes(said))):
        raise RefusedError("the connection does not know this job's token")
    link.sendall(_proof(token, b"server", nonce, challenge))
    link.settimeout(None)
    fields = json.loads(said)
    if not isinstance(fields, dict):
        raise RefusedError("the connection does not speak this protocol")
    return fields


def introduce(link: socket.socket, token: bytes, said: dict[str, Any]) -> None:
    """The client's side.

    Raises:
        RefusedError: the server speaks something else, or either does not know the token.
        OSError, EOFError: it is gone, or too slow.
    """
    link.settimeout(PATIENCE)
    head = bytearray(len(_GREETING) + _NONCE)
    read_into(link, memoryview(head))
    if not head.startswith(_GREETING):
        raise RefusedError("it is no parameter server of this version of allhands")
    challenge, nonce = bytes(head[len(_GREETING) :]), secrets.token_bytes(_NONCE)
    body = json.dumps(said, separators=(",", ":")).encode()
    link.sendall(_GREETING + nonce + _proof(token, b"worker", challenge, nonce, body) + _LENGTH.pack(len(body)) + body)
    answer = bytearray(_PROOF)
    try:
        read_into(link, memoryview(answer))
    except EOFError:
        raise RefusedError("it closed the connection: it has another token") from None
    if not hmac.compare_digest(bytes(answer), _proof(token, b"server", nonce, challenge)):
        raise RefusedError("it has another token")
    link.settimeout(None)


def tls_contexts(environ: Mapping[str, str]) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Contexts for servers and for clients, from the three variables; None when none of them is set.

    Both sides show the certificate and check the other's against the authority; names are not checked, because the token
    already says that both belong to this job.

    Raises:
        UserError: one of them is missing, or no such file.
    """
    paths = {name: environ.get(name, "") for name in TLS}
    if not any(paths.values()):
        return None
    for name, path in paths.items():
        if not path or not Path(path).is_file():
            told = f"{path}, which is no file" if path else "not set"
            raise UserError(
                f"{name} is {told}; TLS needs {', '.join(TLS)}: a certificate, its key, and the authority that signed it"
            )
    contexts = []
    for purpose in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(purpose)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(paths[TLS[0]], paths[TLS[1]])
            context.load_verify_locations(paths[TLS[2]])
        except (ssl.SSLError, OSError) as error:
            raise UserError(f"{', '.join(f'{name}={path}' for name, path in paths.items())}: {error}") from error
        contexts.append(context)
    return contexts[0], contexts[1]


def tuned(link: socket.socket) -> socket.socket:
    """A connection for large frames and small answers."""
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    os.set_inheritable(link.fileno(), False)
    return link
