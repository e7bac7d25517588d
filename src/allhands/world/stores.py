"""Opening the store at which the processes meet: rank 0's listener, a launcher's, or a shared
file."""

from __future__ import annotations

import contextlib
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from allhands import wire
from allhands.errors import UserError, WorldError
from allhands.world import discovery
from allhands.world.environments.mpi import broadcast_meeting
from allhands.world.interface import address_towards, outward_addresses
from allhands.world.layout import Layout, Meeting

if TYPE_CHECKING:
    from torch.distributed import Store


_LOOPBACK = ("127.0.0.1", "localhost")


class OpenStore:
    """A store that all ranks reach, the words that say where it is, and rank 0's discovery server
    while others may still ask it."""

    def __init__(
        self,
        store: Store,
        place: str,
        own_address: str = "",
        server: discovery.DiscoveryServer | None = None,
    ) -> None:
        self.store, self.place, self.own_address = store, place, own_address
        self._discovery = server

    def everyone_came(self) -> None:
        """Stop answering on the discovery server."""
        if self._discovery is not None:
            self._discovery.close()


def parse_method(method: str) -> tuple[Meeting, int | None, int | None]:
    """`tcp://host:port[?rank=r&world_size=n]` or `file:///path`, as a meeting and the rank and
    world size it names.

    Raises `UserError` for anything else.
    """
    parts = urlsplit(method)
    numbers: dict[str, int] = {}
    for name, values in parse_qs(parts.query).items():
        if name not in {"rank", "world_size"} or not values[-1].isdecimal():
            raise UserError(
                f"init_method={method!r}: {name}={values[-1]} is none of rank=NUMBER and "
                "world_size=NUMBER."
            )
        numbers[name] = int(values[-1])
    if parts.scheme == "tcp":
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or not port:
            raise UserError(
                f"init_method={method!r} must be tcp://HOST:PORT with a port from 1 to 65535, e.g. "
                "tcp://10.0.0.1:23456."
            )
        meeting = Meeting((host,), port)
    elif parts.scheme == "file" and not parts.netloc and parts.path not in {"", "/"}:
        meeting = Meeting(path=parts.path)
    else:
        raise UserError(
            f"init_method={method!r} must be 'env://', 'tcp://HOST:PORT' or "
            "'file:///ABSOLUTE/PATH' (three slashes)."
        )
    return meeting, numbers.get("rank"), numbers.get("world_size")


def open_store(meeting: Meeting, layout: Layout, timeout: float) -> OpenStore:
    """The store of this world; rank 0 listens before anybody is told where. `timeout` is in
    seconds.

    Raises `WorldError` when rank 0 cannot listen, or was not found in time.
    """
    deadline = time.monotonic() + timeout
    if meeting.path is not None:
        return _open_file(meeting, layout)
    if meeting.port is not None:
        return _open_given(meeting.hosts[0], meeting.port, meeting, layout, timeout)
    if layout.rank == 0:
        return _open_as_rank_0(meeting, layout, timeout)
    if meeting.mpi_broadcast:
        told = broadcast_meeting(None)
        assert told.port is not None
        host, port = _first_that_answers(told.hosts, told.port, deadline), told.port
    else:
        assert meeting.job_key is not None
        host, port = discovery.ask(meeting.job_key, meeting.hosts, timeout)
    return _open_given(host, port, meeting, layout, max(deadline - time.monotonic(), 1.0))


def _open_file(meeting: Meeting, layout: Layout) -> OpenStore:
    from torch.distributed import FileStore

    assert meeting.path is not None
    folder = Path(meeting.path).parent
    if not folder.is_dir():
        raise UserError(
            f"init_method=file://{meeting.path}: the folder {folder} does not exist; create it on "
            "a disk that all hosts share."
        )
    try:
        return OpenStore(FileStore(meeting.path, layout.world_size), str(meeting))
    except RuntimeError as error:
        raise WorldError(f"rank {layout.rank} cannot open {meeting}: {error}") from None


def _open_given(
    host: str, port: int, meeting: Meeting, layout: Layout, timeout: float
) -> OpenStore:
    from torch.distributed import PrefixStore, TCPStore

    listens = layout.rank == 0 and not meeting.agent_store
    descriptor = None
    if listens and host in _LOOPBACK:
        # Torch listens on all addresses. A taken port may be our own, which torch shares.
        with contextlib.suppress(OSError):
            descriptor = wire.listen("127.0.0.1", port).detach()
    try:
        # multi_tenant, as torch's own env:// does: a library in rank 0 that opens MASTER_PORT again
        # shares the listener.
        store: Store = TCPStore(
            host,
            port,
            None,
            listens,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=listens,
            master_listen_fd=descriptor,
        )
    except (RuntimeError, ValueError) as error:
        raise _no_store(
            host, port, listens=listens, layout=layout, timeout=timeout, error=error
        ) from None
    if meeting.agent_store:
        # The launcher's store outlives its workers: a restarted attempt must not read what the last
        # one wrote.
        store = PrefixStore(f"attempt{meeting.attempt}", store)
    return OpenStore(store, f"{host}:{port}", address_towards(host) or "")


def _open_as_rank_0(meeting: Meeting, layout: Layout, timeout: float) -> OpenStore:
    from torch.distributed import TCPStore

    listener = wire.listen(local=layout.one_host is True)
    store = TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        None,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    if meeting.mpi_broadcast:
        hosts = (*_reachable_addresses(), socket.gethostname())
        broadcast_meeting(Meeting(hosts, store.port))
        return OpenStore(store, f"{hosts[0]}:{store.port}", "")
    assert meeting.job_key is not None
    server = discovery.DiscoveryServer(meeting.job_key, store.port, local=layout.one_host is True)
    place = (
        f"{socket.gethostname()}:{store.port} (told by the discovery server on port {server.port})"
    )
    return OpenStore(store, place, address_towards(meeting.hosts[-1]) or "", server)


def _reachable_addresses() -> list[str]:
    """Addresses of this host under which others may reach it: that of the default route, then those
    of its interfaces."""
    # An address kept for documentation: any route there is the default one.
    default = address_towards("192.0.2.1")
    return list(dict.fromkeys([*([default] if default else []), *outward_addresses()]))


def _first_that_answers(hosts: tuple[str, ...], port: int, deadline: float) -> str:
    while True:
        for host in hosts:
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2.0):
                return host
        if time.monotonic() > deadline:
            raise WorldError(
                f"rank 0 listens on port {port} of {' or '.join(hosts)}, but this host reaches "
                "none of them; open the port, or "
                "set MASTER_ADDR and MASTER_PORT to an address of rank 0 that every host reaches."
            )
        time.sleep(0.2)


def _no_store(
    host: str, port: int, *, listens: bool, layout: Layout, timeout: float, error: Exception
) -> WorldError:
    reason = str(error).split("\n", maxsplit=1)[0]
    if not listens:
        who = "the launcher" if layout.rank == 0 else "rank 0"
        return WorldError(
            f"rank {layout.rank} waited {timeout:.0f} s for {who} at {host}:{port} and nobody "
            f"answered. Is rank 0 started, and can this host reach {host}? ({reason})"
        )
    if "EADDRINUSE" in reason or "in use" in reason:
        return WorldError(
            f"rank 0 cannot listen on port {port}: it is taken on this host. Choose another port "
            "(MASTER_PORT or init_method='tcp://HOST:PORT')."
        )
    return WorldError(
        f"rank 0 opened port {port}, but {host} does not lead to it: MASTER_ADDR (or the host in "
        f"init_method) must be an address of the host that rank 0 runs on. ({reason})"
    )
