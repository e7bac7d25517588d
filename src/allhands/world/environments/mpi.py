"""What the MPI environments share: one host needs no MPI to meet, several ask it to carry the address."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import TracebackType

from allhands.errors import WorldError
from allhands.world.layout import Environ, Layout, Meeting, given_meeting, read_int

_LAUNCHERS = ("pmi_proxy", "mpiexec", "mpirun", "orted", "prted", "prterun")


def mpi_meeting(environ: Environ, layout: Layout, job_key: str | None) -> Meeting:
    """Where the ranks of one mpirun meet: MASTER_ADDR and MASTER_PORT, else this host, else told by an MPI
    broadcast.

    `job_key` names the mpirun; None lets the launcher process that is our ancestor name it.

    Raises `WorldError` for several hosts without mpi4py and without MASTER_ADDR and MASTER_PORT.
    """
    given = given_meeting(environ)
    if given is not None:
        return given
    if layout.one_host:
        return Meeting(("127.0.0.1",), job_key=job_key or _launcher_key(layout))
    if importlib.util.find_spec("mpi4py") is not None:
        return Meeting(mpi_broadcast=True)
    share = "an unknown part" if layout.local_world_size is None else str(layout.local_world_size)
    raise WorldError(
        f"{layout.environment}: {layout.world_size} processes on several hosts ({share} of them here) need to learn where rank "
        "0 is. Install mpi4py on every host (pip install 'allhands[mpi]'), or set MASTER_ADDR to the host of rank 0 and "
        "MASTER_PORT to a free port there."
    )


def broadcast_meeting(meeting: Meeting | None) -> Meeting:
    """Rank 0 passes where it listens, the others None; every rank gets rank 0's value. Collective over MPI's world."""
    from mpi4py import MPI

    before = sys.excepthook

    def abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)

    # MPI_Finalize at the end of a process waits for every rank: an error in one of them would leave all hanging.
    sys.excepthook = abort
    told = MPI.COMM_WORLD.bcast((meeting.hosts, meeting.port) if meeting is not None else None, root=0)
    return Meeting(hosts=told[0], port=told[1])


def _launcher_key(layout: Layout) -> str:
    """A name for the mpirun on this host that is our ancestor: its process number and start time, unique
    until reboot.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except OSError:
            break
        fields = rest.split()
        if any(name in head.partition("(")[2] for name in _LAUNCHERS):
            return f"{layout.environment} {os.getuid()} {pid} {fields[19]}"
        pid = int(fields[1])
    raise WorldError(
        f"{layout.environment}: no process above this one is an MPI launcher ({', '.join(_LAUNCHERS)}), so that the ranks have "
        "no common name to meet under. Set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port."
    )


def local_numbers(environ: Environ) -> tuple[int | None, int | None]:
    """Hydra's local rank and local size, as MPICH and Intel MPI set them."""
    return read_int(environ, "MPI_LOCALRANKID"), read_int(environ, "MPI_LOCALNRANKS")
