"""The socket between a site's warm process and the processes that Flower starts for each message;
nothing here imports torch.

A Unix socket that only its user can open, and a token in a file that only its user can read, which
both sides prove: a frame is the length of a header, the header (JSON) and the arrays' bytes one
after another, without pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from allhands import wire
from allhands.errors import AllhandsError, UserError
from allhands.federated.sites.supervision import write_secretly

_TOKEN_BYTES = 32
_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 1 << 26  # bytes; the arrays themselves are as large as they are
_LONGEST_PATH = 100  # bytes
_LOOK = 0.5  # seconds between two looks at whether to go on listening
_PATIENCE = 10.0  # seconds that a peer has to say who it is
_RECORDS: dict[str, Any] = {"config": ConfigRecord, "metric": MetricRecord, "array": ArrayRecord}


class SocketError(AllhandsError, RuntimeError):
    """The warm process could not be asked; the message says why."""


def write_token(path: Path) -> bytes:
    """A new token in a file that only its user can read."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    write_secretly(path, token)
    return token


def token_of(address: Path) -> Path:
    """The file of a socket's token."""
    return address.with_suffix(".token")


@contextlib.contextmanager
def _short(address: Path) -> Iterator[str]:
    """A path that the system takes for a socket: it allows 107 bytes, and folders lie deeper."""
    if len(os.fsencode(address)) <= _LONGEST_PATH:
        yield str(address)
        return
    if not Path("/proc/self/fd").is_dir():
        raise UserError(
            f"{address} is too long for the path of a socket ({_LONGEST_PATH} bytes); name a "
            "shorter --state"
        )
    folder = os.open(address.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)


class Listener:
    """The warm process's end.

    Args:
        address: the socket's path; what lies there of an earlier process is removed.
    """

    def __init__(self, address: Path) -> None:
        self.address, self.token = address, write_token(token_of(address))
        address.unlink(missing_ok=True)
        self._came: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        with _short(address) as path:
            listener = wire.listen_unix(path)
        self._acceptor = wire.Acceptor(
            "the site's warm process",
            [listener],
            self.token,
            lambda peer, said: self._came.put(peer),
        )
        self._acceptor.start()

    def serve(
        self,
        handle: Callable[[RecordDict], RecordDict],
        going: Callable[[float], bool] = lambda idle: True,
    ) -> None:
        """Answer one request after another, as long as `going` says so of the seconds that have
        passed without any."""
        last = time.monotonic()
        while going(time.monotonic() - last):
            try:
                peer = self._came.get(timeout=_LOOK)
            except queue.Empty:
                continue
            with peer:
                self._answer(peer, handle)
            last = time.monotonic()

    def _answer(self, peer: socket.socket, handle: Callable[[RecordDict], RecordDict]) -> None:
        peer.settimeout(_PATIENCE)
        try:
            content = _receive(peer)
        except (
            Exception
        ):  # whatever a peer says that cannot be read costs its own request, and no other
            return
        reply = handle(content)
        with contextlib.suppress(OSError):  # it is gone, and nobody waits for the answer
            peer.settimeout(None)
            _send(peer, *_parts(reply))

    def close(self) -> None:
        """Stop listening, and remove what lies in the folder."""
        self._acceptor.close()
        self.address.unlink(missing_ok=True)
        token_of(self.address).unlink(missing_ok=True)


def ask(address: Path, content: RecordDict, patience: float = 60.0) -> RecordDict:
    """The warm process's answer to a request. Waits for it as long as it takes.

    Args:
        address: the socket's path.
        content: the request.
        patience: seconds for which a process that does not listen is waited for: it may be
            starting.

    Raises:
        SocketError: nobody listens, it refused the token, or it ended before it had answered.
    """
    with socket.socket(socket.AF_UNIX) as peer:
        _connect(peer, address, patience)
        try:
            token = token_of(address).read_bytes()
        except OSError as error:
            raise SocketError(
                f"the token of the site's warm process cannot be read: {error.strerror}"
            ) from None
        try:
            wire.introduce(peer, token, {})
            _send(peer, *_parts(content))
            return _receive(peer)
        except wire.RefusedError:
            raise SocketError(
                "the site's warm process refused the request: the token is not this site's"
            ) from None
        except (OSError, EOFError, ValueError, struct.error) as error:
            raise SocketError(
                "the site's warm process ended in the middle of the request; the site starts it "
                "again, and the next round will find it"
            ) from error


def _connect(peer: socket.socket, address: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            with _short(address) as path:
                peer.connect(path)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                # Without the path: the server gets this text.
                raise SocketError(
                    f"the site's warm process does not listen ({error.strerror or error}); the "
                    "site's output says why it does not start"
                ) from None
        time.sleep(0.1)


# ---------------------------------------------------------------------- frames


def _parts(content: RecordDict) -> tuple[dict[str, Any], list[bytes]]:
    records: dict[str, Any] = {}
    chunks: list[bytes] = []
    for name, record in content.items():
        kind = next(kind for kind, made in _RECORDS.items() if isinstance(record, made))
        values: dict[str, Any] = dict(record)
        if isinstance(record, ArrayRecord):
            chunks += [array.data for array in record.values()]
            values = {
                key: [array.dtype, list(array.shape), array.stype, len(array.data)]
                for key, array in record.items()
            }
        records[name] = [kind, values]
    return {"records": records}, chunks


def _send(peer: socket.socket, header: dict[str, Any], chunks: list[bytes]) -> None:
    text = json.dumps(header).encode()
    peer.sendall(_LENGTH.pack(len(text)) + text)
    for chunk in chunks:
        peer.sendall(chunk)


def _receive(peer: socket.socket) -> RecordDict:
    (length,) = _LENGTH.unpack(_take(peer, _LENGTH.size))
    if length > _MOST_HEADER:
        raise ValueError("the header is too long")
    header = json.loads(_take(peer, length))
    content = RecordDict()
    for name, (kind, values) in header["records"].items():
        content[name] = _RECORDS[kind](_arrays(peer, values) if kind == "array" else values)
    return content


def _arrays(peer: socket.socket, values: dict[str, Any]) -> dict[str, Array]:
    return {
        key: Array(dtype, tuple(shape), stype, bytes(_take(peer, size)))
        for key, (dtype, shape, stype, size) in values.items()
    }


def _take(peer: socket.socket, count: int) -> bytearray:
    """So many bytes, or `EOFError` when the peer ends before."""
    room = bytearray(count)
    wire.read_into(peer, memoryview(room))
    return room
