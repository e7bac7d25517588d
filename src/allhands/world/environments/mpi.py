"""What the MPI environments share: one host needs no MPI to meet, several ask it to carry the
address."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path

from allhands import wire
from allhands.errors import WorldError
from allhands.world.layout import Environ, Layout, Meeting, given_meeting, read_int
from allhands.world.mpilib import end_job_on_error, load_mpi, mpi4py_installed

_LAUNCHERS = ("pmi_proxy", "mpiexec", "mpirun", "orted", "prted", "prterun")


def mpi_meeting(environ: Environ, layout: Layout, job_key: str | None) -> Meeting:
    """Where the ranks of one mpirun meet: MASTER_ADDR and MASTER_PORT, else this host, else told by
    an MPI broadcast.

    `job_key` names the mpirun; None lets the launcher process that is our ancestor name it.

    Raises `WorldError` for several hosts without mpi4py and without MASTER_ADDR and MASTER_PORT.
    """
    given = given_meeting(environ)
    if given is not None:
        return given
    if layout.one_host:
        return Meeting(("127.0.0.1",), job_key=job_key or _launcher_key(layout))
    if mpi4py_installed():
        return Meeting(mpi_broadcast=True)
    share = "an unknown part" if layout.local_world_size is None else str(layout.local_world_size)
    raise WorldError(
        f"{layout.environment}: {layout.world_size} processes on several hosts ({share} of them "
        "here) need to learn where rank 0 is. Install mpi4py on every host (pip install "
        "'allhands[mpi]'), or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port "
        "there."
    )


def broadcast_meeting(meeting: Meeting | None) -> Meeting:
    """Rank 0 passes where it listens, the others None; every rank gets rank 0's value. Collective
    over MPI's world.

    The ranks also get rank 0's ALLHANDS_TOKEN, a new one where it has none: they prove it to one
    another on their sockets, and MPI's own connections carry it."""
    MPI = load_mpi()
    world = MPI.COMM_WORLD
    # MPI_Finalize at the end of a process waits for every rank: an error in one of them would leave
    # all hanging.
    end_job_on_error(world.Get_rank(), MPI.Get_processor_name(), os.environ)
    told = bytearray(
        json.dumps([meeting.hosts, meeting.port, wire.new_token()]).encode()
        if meeting is not None
        else b""
    )
    length = array("q", [len(told)])
    world.Bcast([length, 1, MPI.INT64_T], 0)
    told = told or bytearray(length[0])
    world.Bcast([told, length[0], MPI.BYTE], 0)
    # MPI sends only while it is called: what rank 0 has returned from may not be sent yet, and it
    # goes on without MPI.
    world.Barrier()
    hosts, port, os.environ[wire.TOKEN] = json.loads(told)
    return Meeting(hosts=tuple(hosts), port=port)


def _launcher_key(layout: Layout) -> str:
    """A name for the mpirun on this host that is our ancestor: its process number and start time,
    unique until reboot.
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
        f"{layout.environment}: no process above this one is an MPI launcher "
        f"({', '.join(_LAUNCHERS)}), so that the ranks have "
        "no common name to meet under. Set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port."
    )


def local_numbers(environ: Environ) -> tuple[int | None, int | None]:
    """Hydra's local rank and local size, as MPICH and Intel MPI set them."""
    return read_int(environ, "MPI_LOCALRANKID"), read_int(environ, "MPI_LOCALNRANKS")
