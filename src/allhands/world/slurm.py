"""What a script can ask of Slurm: who am I (`setup`), and start this job again (`requeue`).

`allhands.init()` needs none of this: a task of srun joins its world by itself (see
`environments.slurm`).
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from typing import Any

from allhands import wire
from allhands.errors import UserError, WorldError
from allhands.world import discovery, interface
from allhands.world.environments.slurm import Slurm
from allhands.world.layout import Environ, Layout, Meeting, read_int

# Set to 1 in a batch script, it lets a training that a signal ends put its job back into the queue.
REQUEUE_VARIABLE = "ALLHANDS_REQUEUE"

_SETUP_TIMEOUT_S = 600.0
_SCONTROL_TIMEOUT_S = 60.0
_PORTS_TRIED = 100

# What `setup` has told: rank 0's listener and its discovery server live as long as the process.
_told: tuple[int, int, int, str] | None = None
_kept: list[Any] = []


def setup(port: int | None = None) -> tuple[int, int, int, str]:
    """Who this task of srun is and where its ranks meet; call it once in every task, and on all of
    them.

    Rank 0 opens the listener before it tells anybody the port, so no other job can take it in
    between; a group that rank 0 makes with `host_addr` shares that listener. GLOO_SOCKET_IFNAME,
    unless it is set, becomes the interface that reaches the other nodes.

    Args:
        port: the first port that rank 0 tries; it takes the next one that is free. None lets the
            system choose.

    Returns:
        ``(rank, local_rank, world_size, host_addr)``: numbers that count from 0, and
            ``"tcp://HOST:PORT"`` for
        ``init_method`` of `allhands.init` or ``torch.distributed.init_process_group``. `local_rank`
        counts the tasks of one node; it is not always a GPU's number (with ``--gpus-per-task=1``
        every task's only GPU is number 0), so leave the choice of the device to `allhands.init`.

    Raises:
        UserError: this process is no task of srun, or `port` cannot be one.
        WorldError: rank 0 was not found, or none of the ports is free.
    """
    global _told
    if port is not None and (
        isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 2**16
    ):
        raise UserError(
            f"slurm.setup(port={port!r}): a port must be between 1 and 65535; leave it out to let "
            "the system choose."
        )
    if _told is None:
        _told = _set_up(os.environ, port)
    return _told


def _set_up(environ: Environ, port: int | None) -> tuple[int, int, int, str]:
    slurm = Slurm()
    if not slurm.detected(environ):
        raise UserError(_not_a_task(environ))
    layout = slurm.layout(environ)
    local_rank = layout.local_rank
    if local_rank is None:
        raise UserError(
            "SLURM_LOCALID is not set, but this process is a task that srun started; do not unset "
            "it."
        )
    meeting = slurm.meeting(environ, layout)
    if meeting.port is not None:
        host, found = meeting.hosts[0], meeting.port
    elif layout.rank == 0:
        host, found = _listen(environ, layout, meeting, port)
    else:
        host, found = discovery.ask(_key_of(meeting), meeting.hosts, _SETUP_TIMEOUT_S)
    _choose_interface(environ, layout, meeting, host)
    return layout.rank, local_rank, layout.world_size, f"tcp://{host}:{found}"


def _choose_interface(environ: Environ, layout: Layout, meeting: Meeting, host: str) -> None:
    """A group that torch makes alone would have gloo resolve this host's own name, often to a
    loopback address."""
    if environ.get(interface.VARIABLE):
        return
    own = environ.get("SLURMD_NODENAME", "").strip()
    if layout.one_host:
        others = ["127.0.0.1"]
    else:
        others = [name for name in (host, *meeting.hosts) if name != own]
    for other in others:
        address = interface.address_towards(other)
        if address is not None and (layout.one_host or not interface.is_loopback(address)):
            name = interface.interface_with(address)
            if name is not None:
                os.environ[interface.VARIABLE] = name
            return


def _key_of(meeting: Meeting) -> str:
    # A name of its own: `allhands.init` without arguments meets elsewhere.
    return f"{meeting.job_key} setup"


def _listen(
    environ: Environ, layout: Layout, meeting: Meeting, port: int | None
) -> tuple[str, int]:
    """Open rank 0's listener and say where it is; returns its host's name, as the others know it,
    and the port."""
    store = _open(port, layout.one_host is True)
    told_at = discovery.DiscoveryServer(_key_of(meeting), store.port, local=layout.one_host is True)
    _kept.extend([store, told_at])
    if layout.one_host:
        return meeting.hosts[0], store.port
    node = environ.get("SLURMD_NODENAME", "").strip() or socket.gethostname().partition(".")[0]
    return (node if node in meeting.hosts else meeting.hosts[0]), store.port


def _open(port: int | None, local: bool) -> Any:
    from datetime import timedelta

    from torch.distributed import TCPStore

    refused = ""
    for candidate in [0] if port is None else range(port, min(port + _PORTS_TRIED, 2**16)):
        try:
            listener = wire.listen(port=candidate, local=local)
            # multi_tenant: torch and allhands.init open the same port in this process again, and
            # then share the listener.
            return TCPStore(
                "127.0.0.1",
                listener.getsockname()[1],
                None,
                True,
                timedelta(seconds=_SETUP_TIMEOUT_S),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            refused = str(error).split("\n", maxsplit=1)[0]
    tried = "a port of the system's choice" if port is None else f"the ports {port} to {candidate}"
    raise WorldError(
        f"slurm.setup: rank 0 can listen on none of {tried} ({refused}); leave port= out."
    )


def _not_a_task(environ: Environ) -> str:
    if environ.get("SLURM_JOB_ID"):
        return (
            f"slurm.setup() runs in job {environ['SLURM_JOB_ID']}, but not in a task of srun (this "
            "is the shell of salloc, a "
            "script of sbatch, or srun --pty): write `srun python script.py` there."
        )
    return (
        "slurm.setup() is for tasks of srun, and there is no Slurm job around this process: start "
        "it with `srun -N 2 --ntasks-per-node=2 python script.py`, or call allhands.init(), which "
        "finds the other processes however they were started."
    )


# ---------------------------------------------------------------------- one task a node


def node_task(environ: Environ) -> Layout | None:
    """The layout of a step of several nodes with one task on each (``srun -N 2 python script.py``),
    which may start the workers of its node; None for anything else, such as a process that
    something below srun started.
    """
    slurm = Slurm()
    if not slurm.detected(environ) or {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    layout = slurm.layout(environ)
    one_a_node = layout.num_nodes == layout.world_size and layout.local_world_size in (1, None)
    return layout if layout.world_size > 1 and one_a_node else None


def meeting_of_nodes(environ: Environ, layout: Layout) -> Meeting:
    """The hosts of a step and the name under which its tasks meet; MASTER_ADDR and MASTER_PORT are
    for their workers."""
    own = {
        name: value for name, value in environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")
    }
    return Slurm().meeting(own, layout)


# ---------------------------------------------------------------------- jobs that run again


def job_of(environ: Environ) -> str | None:
    """The number of the Slurm job around this process; None outside of one."""
    return environ.get("SLURM_JOB_ID", "").strip() or None


def restarts_of(environ: Environ) -> int:
    """How many times Slurm has started the job around this process anew; 0 the first time, and
    outside of Slurm."""
    return (read_int(environ, "SLURM_RESTART_COUNT") or 0) if job_of(environ) is not None else 0


def wants_requeue(environ: Environ) -> bool:
    """Whether ALLHANDS_REQUEUE asks to put the job back into the queue."""
    text = environ.get(REQUEUE_VARIABLE, "").strip()
    if text in ("", "0"):
        return False
    if text != "1":
        raise UserError(
            f"{REQUEUE_VARIABLE}={text!r}: it must be 1 (requeue the job after a signal) or 0."
        )
    if job_of(environ) is None:
        raise UserError(
            f"{REQUEUE_VARIABLE}=1, but there is no Slurm job around this process (SLURM_JOB_ID is "
            f"not set): unset {REQUEUE_VARIABLE}, or submit the script with sbatch."
        )
    return True


def requeue() -> str:
    """Put the job around this process back into the queue, unless Slurm has done so or is
    cancelling it.

    Call it on one rank, after everything is saved: Slurm ends the whole job at once. A requeued job
    starts its batch script anew, under the same number and with SLURM_RESTART_COUNT one higher.

    Returns:
        What was done, in words.

    Raises:
        UserError: there is no job.
        WorldError: Slurm refused, or did not answer; the message has its words.
    """
    job = job_of(os.environ)
    if job is None:
        raise UserError(
            "slurm.requeue() needs a Slurm job around this process (SLURM_JOB_ID is not set): "
            "submit with sbatch."
        )
    shown = _scontrol("show", "job", job)
    # The first line holds the job's name, in which a user may write anything; these lines are
    # Slurm's own.
    state = re.search(r"^\s+JobState=(\S+) Reason=(\S+)", shown, re.MULTILINE)
    count = re.search(r"^\s+Requeue=\d+ Restarts=(\d+) BatchFlag=(\d)", shown, re.MULTILINE)
    if state is None or count is None:
        raise WorldError(
            f"slurm.requeue(): cannot read what `scontrol show job {job}` says: {shown[:300]!r}"
        )
    if count[2] == "0":
        raise WorldError(
            f"job {job} was started by srun or salloc; Slurm can requeue only jobs that sbatch has "
            "submitted."
        )
    if int(count[1]) > restarts_of(os.environ):
        return f"Slurm has requeued job {job} already"
    # A preempted job is RUNNING during its grace time, and FAILED, not requeued, when its script
    # ends by itself in it.
    if state[1] != "RUNNING" and state[2] != "TimeLimit":
        return f"job {job} is being cancelled ({state[1]}), so it was not requeued"
    _scontrol("requeue", job)
    return f"requeued job {job}"


def _scontrol(*words: str) -> str:
    command = ["scontrol", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise WorldError(
            f"`{' '.join(command)}`: there is no program scontrol on {socket.gethostname()}"
        ) from None
    except subprocess.TimeoutExpired:
        raise WorldError(
            f"`{' '.join(command)}` did not answer within {_SCONTROL_TIMEOUT_S:.0f} s"
        ) from None
    if done.returncode != 0:
        raise WorldError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
