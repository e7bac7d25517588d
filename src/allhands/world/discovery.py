"""How processes that know only the name of their job learn the port on which rank 0 listens.

Nobody may pick a port and hope: a port that was probed and found free can be taken before it is
used. So rank 0 opens its store on a port that the kernel gives it, and then answers on a *discovery
server*: a listener on the first free port of a short sequence that every rank can compute from the
job's name. A rank asks along that sequence, and both prove that they know the job's name; so a
foreign service, or the discovery server of another job that drew the same ports, is passed over.

The name of a job is no secret. Where ALLHANDS_TOKEN is set, to the same random text in all
processes of the job, nobody without it is answered or believed.
"""

from __future__ import annotations

import hashlib
import random
import socket
import time
from collections.abc import Sequence
from typing import Any

from allhands import wire
from allhands.errors import WorldError

_CANDIDATES = 24
# Below the range from which Linux draws the ports of outgoing connections (32768 and up), so that a
# candidate is rarely taken.
_LOWEST, _HIGHEST = 15_000, 32_000
_ANSWER_S = 2.0  # how long a service may take to answer before it is taken for a foreign one
_LONGEST_LINE = 200


def candidate_ports(job_key: str) -> list[int]:
    """The ports on which the discovery server of this job may be, in the order in which they are
    tried; the same on every rank.
    """
    seed = hashlib.sha256(f"allhands discovery 1\nports\n{job_key}".encode()).hexdigest()
    return random.Random(seed).sample(range(_LOWEST, _HIGHEST), _CANDIDATES)


def accept(
    job_key: str, what: str, welcome: wire.Welcome, *, local: bool
) -> tuple[wire.Acceptor, int]:
    """Accept the processes of one job on its first free candidate port; the acceptor, started, and
    the port.

    Args:
        job_key: names the job.
        what: names the service in messages.
        welcome: as `wire.Acceptor` takes it.
        local: all of them are on this host.
    """
    ports = candidate_ports(job_key)
    for port in ports:
        try:
            listener = wire.listen(port=port, local=local)
        except OSError:
            continue
        acceptor = wire.Acceptor(what, [listener], wire.job_token(job_key), welcome)
        acceptor.start()
        return acceptor, port
    raise WorldError(
        f"rank 0 could listen on none of the ports {', '.join(map(str, ports))}: all are taken. "
        "Set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a port that is free there."
    )


class DiscoveryServer:
    """Answers the ranks of one job with `port` until `close()`, in a background thread.

    Raises `WorldError` when every candidate port is taken.
    """

    def __init__(self, job_key: str, port: int, *, local: bool) -> None:
        self._answer = wire.encode({"port": port})
        self._acceptor, self.port = accept(
            job_key, "the discovery server of rank 0", self._welcome, local=local
        )

    def _welcome(self, link: socket.socket, said: dict[str, Any]) -> None:
        with link:
            link.sendall(self._answer)

    def close(self) -> None:
        """Stop answering; safe to call twice."""
        self._acceptor.close()


def ask(job_key: str, hosts: Sequence[str], timeout: float) -> tuple[str, int]:
    """Ask the discovery server of this job, on one of `hosts`, where rank 0's store is: `(host,
    port)`. See `find`."""
    deadline = time.monotonic() + timeout
    while True:
        host, link = find(job_key, hosts, max(0.1, deadline - time.monotonic()), {})
        try:
            with link:
                return host, int(
                    wire.read_message(link, time.monotonic() + _ANSWER_S, _LONGEST_LINE)["port"]
                )
        except (OSError, EOFError, wire.MessageError):
            time.sleep(0.1)  # it was closed meanwhile


def find(
    job_key: str, hosts: Sequence[str], timeout: float, said: dict[str, Any]
) -> tuple[str, socket.socket]:
    """A connection to what `accept` has opened for this job on one of `hosts`, and which of them.

    The first host is asked in every round and one of the others in turn: Slurm's first host has
    rank 0 unless the user dealt out the tasks. `timeout` is in seconds. `said` is what this process
    says of itself. Raises `WorldError`, which says what was met at each candidate, when it is over.
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
                link, reason = _try(job_key, host, port, min(_ANSWER_S, left), said)
                if link is not None:
                    return host, link
                met[f"{host}:{port}"] = reason
                if reason.startswith("cannot reach"):
                    # the host itself is the trouble: its other ports would each cost the same wait
                    break
        turn += 1
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(pause * 1.5, 1.0)


def _try(
    job_key: str, host: str, port: int, timeout: float, said: dict[str, Any]
) -> tuple[socket.socket | None, str]:
    try:
        link = socket.create_connection((host, port), timeout=timeout)
    except ConnectionRefusedError:
        return None, "nothing listens"
    except OSError as error:
        return None, f"cannot reach {host} ({error})"
    try:
        wire.introduce(link, wire.job_token(job_key), said, timeout)
        wire.close_in_children(link)
    except (
        OSError,
        EOFError,
        wire.RefusedError,
    ) as error:  # a foreign service, or another job's discovery server
        link.close()
        return None, f"another service or another job ({error or type(error).__name__})"
    return link, "found"


def _nobody(
    hosts: Sequence[str], ports: Sequence[int], timeout: float, met: dict[str, str]
) -> WorldError:
    others = [f"{place}: {reason}" for place, reason in met.items() if reason != "nothing listens"]
    seen = "; ".join(others[:4]) if others else "nothing listens on any of them"
    where = hosts[0] if len(hosts) == 1 else f"{hosts[0]} (and {len(hosts) - 1} more hosts)"
    return WorldError(
        f"waited {timeout:.0f} s for rank 0 on {where}, ports {', '.join(map(str, ports[:3]))}… "
        f"({len(ports)} candidates): {seen}. Rank 0 did not start, does not call allhands.init(), "
        "or runs on a host that this one cannot reach; set MASTER_ADDR and MASTER_PORT to name the "
        "place yourself."
    )
