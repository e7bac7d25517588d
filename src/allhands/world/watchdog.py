"""Ends a rank that cannot end itself, because it is stopped or hangs, once the world has been given
up.

MPICH's mpiexec asks such a rank to end and then waits for it for ever. So a small process beside
each rank but the first keeps a connection of its own to rank 0's failure detector, and kills the
rank some seconds after that has told all ranks to end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

from allhands import wire
from allhands.world.layout import Environ

# Seconds that a rank has to end by itself first.
_GRACE_S = 4.0

_PROGRAM = """
import os, select, socket, sys, time
link, rank = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
data = b""
while os.getppid() == rank:
    if not select.select([link], [], [], 1.0)[0]:
        continue
    piece = link.recv(4096)
    data = (data + piece)[-4096:]
    if b'"end"' in data:
        deadline = time.monotonic() + float(sys.argv[3])
        while os.getppid() == rank and time.monotonic() < deadline:
            time.sleep(0.1)
        if os.getppid() == rank:
            os.kill(rank, 9)
    if not piece or b'"bye"' in data or b'"end"' in data:
        break
"""


def needed(environ: Environ) -> bool:
    """Whether this process was started by a launcher that waits for a stopped rank: MPICH's, and
    not within srun."""
    return (
        bool(environ.get("PMI_RANK"))
        and not environ.get("OMPI_COMM_WORLD_RANK")
        and not environ.get("SLURM_STEP_ID")
    )


def start(connect: Callable[[], socket.socket], token: bytes) -> None:
    """Start the watchdog of this process, which ends with it.

    Args:
        connect: opens a connection to rank 0's failure detector.
        token: the world's.

    Raises:
        OSError, EOFError, RefusedError: rank 0 cannot be reached.
    """
    with wire.join(connect, token, {"watchdog": True}, 20.0) as link:
        subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-E",
                "-c",
                _PROGRAM,
                str(link.fileno()),
                str(os.getpid()),
                str(_GRACE_S),
            ],
            pass_fds=[link.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
