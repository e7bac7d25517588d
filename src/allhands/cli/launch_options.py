"""The options of `allhands launch`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from allhands.launch.recovery import CONTINUE, RESTART, STOP


class OnWorkerFailure(enum.StrEnum):
    """What follows the failure of a worker."""

    stop = STOP
    go_on = CONTINUE
    restart = RESTART


class Launcher(enum.StrEnum):
    """What starts the workers."""

    local = "local"
    ssh = "ssh"
    slurm = "slurm"
    mpi = "mpi"


Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT [ARGS]",
        help="A Python script, or any program, with its arguments, options included.",
        show_default=False,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "--num-workers",
        "-n",
        help="How many workers in all. Default: one for each GPU, or for each core without GPUs.",
    ),
]
Servers = Annotated[
    int,
    typer.Option(
        "--servers",
        "--num-servers",
        "-s",
        help="How many parameter servers beside them, one a host in turn.",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        "--hostfile",
        "-H",
        help="A file with one host a line, or a list: d1,d2. See docs/ssh.md.",
    ),
]
StartedBy = Annotated[
    Launcher | None,
    typer.Option(help="What starts the workers. Default: ssh with --hosts, else local."),
]
Module = Annotated[
    bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as for python -m.")
]
LogDir = Annotated[
    Path | None, typer.Option(help="Also write each worker's output to a file in this folder.")
]
Prefix = Annotated[
    bool, typer.Option(help="Start each line of output with the rank that wrote it.")
]
Grace = Annotated[
    float, typer.Option(help="Seconds to save and end for workers that are asked to stop.")
]
HeartbeatTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds without a sign of life after which a worker has failed; 0 waits for ever."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads for each worker. Default: OMP_NUM_THREADS, or the cores shared out "
        "evenly."
    ),
]
Preload = Annotated[bool, typer.Option(help="Import torch once for all workers, not once in each.")]
MaxRestarts = Annotated[
    int,
    typer.Option(
        help="How many times to start all workers again after a failure; they resume from "
        "their checkpoint."
    ),
]
ServerRestarts = Annotated[
    int,
    typer.Option(
        help="How many times to start a parameter server again that died, while the workers run on."
    ),
]
AfterFailure = Annotated[
    OnWorkerFailure,
    typer.Option(
        help="With --servers: the others go on without a worker that fails, or it alone is started "
        "again, up to --max-restarts times."
    ),
]
Elastic = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="When a worker is lost, the others go on in their processes, with the same result; "
        "one that is started in its place (--max-restarts) joins them.",
    ),
]
Spares = Annotated[
    int,
    typer.Option(
        help="With --elastic: start so many further workers, which wait to take the place of one "
        "that is lost."
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        "--min-workers",
        "--min",
        help="Restart without hosts that do not come back, as long as so many workers are left. "
        "With --elastic, fewer save and end.",
    ),
]
MaxWorkers = Annotated[
    int | None,
    typer.Option(
        "--max-workers",
        "--max",
        help="With --elastic: let further hosts join the job while it runs (`allhands join`), "
        "up to so many workers.",
    ),
]
RejoinTimeout = Annotated[float, typer.Option(help="Seconds for a lost host to come back.")]
HostTimeout = Annotated[
    float, typer.Option(help="Seconds without a word after which another host is lost.")
]
SyncDstDir = Annotated[
    str | None,
    typer.Option(help="Copy the working folder to this folder of every host first, and run there."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="A pattern that is not copied (as for rsync); may be repeated."),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME or NAME=VALUE: a variable for all workers; NAME alone takes its value here. "
        "May be repeated."
    ),
]
EnvWorker = Annotated[
    list[str] | None,
    typer.Option(help="As --env, for workers alone; NAME:VALUE too. May be repeated."),
]
EnvServer = Annotated[
    list[str] | None,
    typer.Option(help="As --env, for parameter servers alone; NAME:VALUE too. May be repeated."),
]
Sbatch = Annotated[
    str | None,
    typer.Option(
        help='Options for sbatch, where --launcher slurm submits a job: "--nodes=2 --time=30".'
    ),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Where a job is submitted: show its output until it ends.")
]
Mpirun = Annotated[
    str | None,
    typer.Option(help='More options for the MPI launcher, with --launcher mpi: "--bind-to none".'),
]
Python = Annotated[
    str | None, typer.Option(help="The Python on the other hosts. Default: the path of this one.")
]
Horovod = Annotated[
    bool,
    typer.Option(
        "--horovod",
        help="`import horovod` means allhands.horovod, and options are horovodrun's. See "
        "docs/horovod.md.",
    ),
]
