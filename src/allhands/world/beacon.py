"""How processes that know only the name of their job learn the port on which rank 0 listens.

Nobody may pick a port and hope: a port that was probed and found free can be taken before it is used. So rank
0 opens its store on a port that the kernel gives it, and then answers on a *beacon*: a listener on the first
free port of a short sequence that every rank can compute from the job's name. A rank asks along that
sequence, presenting a digest of the job's name; only the beacon of that very job gives the right answer, and
a foreign service, or the beacon of another job that drew the same ports, is passed over. Nothing else
travels, and an answer is one short line of text.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
import time
from collections.abc import Sequence

from allhands.errors import WorldError

_CANDIDATES = 24
# Below the range from which Linux draws the ports of outgoing connections (32768 and up), so that a candidate
# is rarely taken.
_LOWEST, _HIGHEST = 15_000, 32_000
_ANSWER_S = 2.0  # how long a service may take to answer before it is taken for a foreign one
_LONGEST_LINE = 200


def candidate_ports(job_key: str) -> list[int]:
    """The ports on which the beacon of this job may be, in the order in which they are tried; the same on
    every rank.
    """
    return random.Random(_digest(job_key, "ports")).sample(range(_LOWEST, _HIGHEST), _CANDIDATES)


class Beacon:
    """Answers the ranks of one job with `port` until `close()`, in a background thread.

    Raises `WorldError` when every candidate port is taken.
    """

    def __init__(self, job_key: str, port: int, *, local: bool) -> None:
        self._question = _digest(job_key, "question")
        self._answer = f"{_digest(job_key, f'answer {port}')} {port}\n".encode()
        self._listener = _listen(candidate_ports(job_key), local)
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="allhands-beacon", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or a caller that was gone before we answered
                if self._closed:
                    return
                time.sleep(0.05)
                continue
            # One thread a caller: a caller that says nothing (a port scanner) must not keep the ranks
            # waiting.
            threading.Thread(target=self._reply, args=(connection,), name="allhands-beacon-reply", daemon=True).start()

    def _reply(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_ANSWER_S)
            if _read_line(connection) == self._question:
                connection.sendall(self._answer)

    def close(self) -> None:
        """Stop answering; safe to call twice."""
        self._closed = True
        # A blocked accept() is not woken by close() on Linux, only by shutdown().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def ask(job_key: str, hosts: Sequence[str], timeout: float) -> tuple[str, int]:
    """Where rank 0's store is: `(host, port)`, asked of the beacon of this job on one of `hosts`.

    The first host is asked in every round and one of the others in turn: Slurm's first host has rank 0 unless
    the user dealt out the tasks. `timeout` is in seconds. Raises `WorldError`, which says what was met at
    each candidate, when it is over.
    """
    ports = candidate_ports(job_key)
    deadline = time.monotonic() + timeout
    met: dict[str, str] = {}
    pause, turn = 0.02, 0
    while True:
        round_hosts = [hosts[0]]
        if len(hosts) > 1:
            round_hosts.append(hosts[1 + turn % (len(hosts) - 1)])
        for host in round_hosts:
            for port in ports:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _nobody(hosts, ports, timeout, met)
                found, reason = _ask_one(job_key, host, port, min(_ANSWER_S, left))
                if found is not None:
                    return host, found
                met[f"{host}:{port}"] = reason
                if reason.startswith("cannot reach"):
                    break  # the host itself is the trouble: its other ports would each cost the same wait
        turn += 1
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(pause * 1.5, 1.0)


def _ask_one(job_key: str, host: str, port: int, timeout: float) -> tuple[int | None, str]:
    try:
        connection = socket.create_connection((host, port), timeout=timeout)
    except ConnectionRefusedError:
        return None, "nothing listens"
    except OSError as error:
        return None, f"cannot reach {host} ({error})"
    try:
        with connection:
            connection.sendall(_digest(job_key, "question").encode() + b"\n")
            digest, _, told = _read_line(connection).partition(" ")
    except OSError as error:  # a foreign service that hangs up or says nothing
        return None, f"another service ({error or type(error).__name__})"
    if told.isdecimal() and digest == _digest(job_key, f"answer {told}"):
        return int(told), "found"
    return None, "another service or another job"


def _nobody(hosts: Sequence[str], ports: Sequence[int], timeout: float, met: dict[str, str]) -> WorldError:
    others = [f"{place}: {reason}" for place, reason in met.items() if reason != "nothing listens"]
    seen = "; ".join(others[:4]) if others else "nothing listens on any of them"
    where = hosts[0] if len(hosts) == 1 else f"{hosts[0]} (and {len(hosts) - 1} more hosts)"
    return WorldError(
        f"waited {timeout:.0f} s for rank 0 on {where}, ports {', '.join(map(str, ports[:3]))}… ({len(ports)} candidates): "
        f"{seen}. Rank 0 did not start, does not call allhands.init(), or runs on a host that this one cannot reach; set "
        "MASTER_ADDR and MASTER_PORT to name the place yourself."
    )


def _listen(ports: Sequence[int], local: bool) -> socket.socket:
    for port in ports:
        listener = _open(port, local)
        if listener is not None:
            return listener
    raise WorldError(
        f"rank 0 could listen on none of the ports {', '.join(map(str, ports))}: all are taken. Set MASTER_ADDR and MASTER_PORT "
        "to the host of rank 0 and a port that is free there."
    )


def _open(port: int, local: bool) -> socket.socket | None:
    """A listener on `port`, or None where it is taken. One host: loopback only, so that nobody outside can
    ask.
    """
    # With IPv6 one socket serves both families; a kernel without it refuses to make or bind one.
    families = [socket.AF_INET] if local else [socket.AF_INET6, socket.AF_INET]
    for family in families:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            # REUSEADDR skips the minute after a closed connection; two listeners it never allows on Linux.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("127.0.0.1" if local else "", port))
            listener.listen(128)
            return listener
        except OSError:
            listener.close()
    return None


def _digest(job_key: str, purpose: str) -> str:
    return hashlib.sha256(f"allhands beacon 1\n{purpose}\n{job_key}".encode()).hexdigest()


def _read_line(connection: socket.socket) -> str:
    """One line without its end, at most `_LONGEST_LINE` bytes of it, and for `_ANSWER_S` in all however it
    dribbles in.
    """
    deadline = time.monotonic() + _ANSWER_S
    data = b""
    while not data.endswith(b"\n") and len(data) < _LONGEST_LINE and time.monotonic() < deadline:
        piece = connection.recv(_LONGEST_LINE - len(data))
        if not piece:
            break
        data += piece
    return data.decode("ascii", "replace").strip()
