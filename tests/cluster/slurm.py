"""A real Slurm on hosts from namespaces: munge, slurmctld beside the driver, one slurmd a host,
GPUs that are only device files.

    with Slurm(("d1", "d2"), label="try") as slurm:
        slurm.srun("-N2", "--ntasks-per-node=2", "hostname").stdout

Partition `batch` is the default; its jobs give way to those of `urgent`: they get SIGCONT and
SIGTERM (more than once),
after some seconds SIGKILL, and are requeued. From the shell: `python -m tests.cluster.slurm up`,
`down`.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster import hosts as from_namespaces
from tests.cluster.hosts import Hosts
from tests.cluster.machine import SYSTEM_PATH, call, until
from tests.patience import patience

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "scontrol",
    "sinfo",
    "squeue",
    "scancel",
)

CONF = """ClusterName=allhands
SlurmctldHost={controller}({driver_address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/spool/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/spool/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_continue
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
KillWait=2
Waittime=0
MessageTimeout=20
TreeWidth=64
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
GresTypes=gpu
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \\
  PreemptMode=REQUEUE GraceTime=5
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot have such a Slurm, in words for a skipped test; None when it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=SYSTEM_PATH)]
    if missing:
        return (
            f"programs are missing: {', '.join(missing)} (Debian: apt-get install munge "
            "slurmctld slurmd slurm-client)"
        )
    return from_namespaces.why_not()


class Slurm:
    """A Slurm that exists while the context is open, on hosts of its own.

    Args:
        names: The nodes' names.
        label: As of `Hosts`.
        cpus: CPUs that each node claims to have.
        gpus: GPUs that each node claims to have. They are twins of /dev/null, and no program can
            compute on them.
        persist: As of `Hosts`.

    Attributes:
        hosts: The nodes as hosts: to harm them, and to see what runs on them.
        conf: The configuration file.
        folder: A folder that driver and nodes see.
    """

    def __init__(
        self,
        names: Sequence[str] = ("d1", "d2"),
        *,
        label: str,
        cpus: int = 4,
        gpus: int = 2,
        persist: bool = False,
    ) -> None:
        self.hosts = Hosts(names, label=label, persist=persist)
        self.cpus, self.gpus = cpus, gpus
        self.folder = self.hosts.folder
        self.conf = self.folder / "slurm.conf"
        self._slurmd: dict[str, subprocess.Popen[Any]] = {}

    def __enter__(self) -> Slurm:
        self.hosts.__enter__()
        try:
            self._write_files()
            munge = self.folder / "munge"
            words = {
                "key-file": "key",
                "socket": "socket",
                "pid-file": "pid",
                "log-file": "log",
                "seed-file": "seed",
            }
            files = [f"--{word}={munge / name}" for word, name in words.items()]
            self._helper("munged", "--foreground", "--force", "--num-threads=4", *files)
            until((munge / "socket").exists, 10, self._logs)
            self._helper("slurmctld", "-D", "-c", "-f", str(self.conf))
            for name in self.hosts.names:
                self._start_slurmd(name)
            self._until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.remove()
        for process in self._slurmd.values():
            process.wait()

    def _write_files(self) -> None:
        folder = self.folder
        for name in (
            "controller",
            "spool",
            "munge",
            "dev",
            *(f"spool/{name}" for name in self.hosts.names),
        ):
            (folder / name).mkdir(mode=0o755)
        for number in range(self.gpus):
            # Slurm insists on device files.
            os.mknod(folder / "dev" / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (folder / "gres.conf").write_text(
            "".join(f"Name=gpu File={folder}/dev/gpu{number}\n" for number in range(self.gpus))
        )
        (folder / "cgroup.conf").write_text("ConstrainCores=no\n")
        (folder / "munge/key").write_bytes(os.urandom(128))
        (folder / "munge/key").chmod(0o600)
        resources = f"CPUs={self.cpus} RealMemory=300000" + (
            f" Gres=gpu:{self.gpus}" if self.gpus else ""
        )
        nodes = [
            f"NodeName={name} NodeAddr={address} NodeHostname={name} {resources} State=UNKNOWN"
            for name, address in self.hosts.address.items()
        ]
        self.conf.write_text(
            CONF.format(
                controller=socket.gethostname().partition(".")[0],
                driver_address=self.hosts.driver_address,
                port=17000 + self.hosts.number,  # each cluster's own
                folder=folder,
                nodes="\n".join(nodes),
            )
        )

    def _helper(self, *argv: str) -> None:
        with (self.folder / f"{argv[0]}.log").open("ab") as log:
            self.hosts.helper(*argv, stdout=log, stderr=log, env=self.environ(PATH=SYSTEM_PATH))

    def _start_slurmd(self, host: str) -> None:
        environ = {"PATH": SYSTEM_PATH, "SLURM_CONF": str(self.conf)}
        with (self.folder / "spool" / f"{host}.log").open("ab") as log:
            argv = ["slurmd", "-D", "-N", host, "-f", str(self.conf)]
            options = {
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": log,
                "start_new_session": True,
            }
            process = self.hosts.popen(host, argv, env=environ, **options)
        self._slurmd[host] = process
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(children.read_text, 10, self._logs)
        self.hosts.daemons[host] = {int(children.read_text())}  # not a process that a test has left

    def _until_idle(self) -> None:
        def idle() -> bool:
            said = self.command("sinfo", "-h", "-N", "-o", "%N %T", check=False).splitlines()
            return {f"{name} idle" for name in self.hosts.names} <= set(said)

        until(idle, 30, lambda: f"Slurm's nodes are not idle: {self._logs()}")

    def _logs(self) -> str:
        return "".join(
            f"\n{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in self.folder.glob("**/*.log")
        )

    # Use

    def environ(self, **extra: str) -> dict[str, str]:
        """The environment of a process for which srun and the others mean this Slurm."""
        return self.hosts.environ(SLURM_CONF=str(self.conf), **extra)

    def srun(self, *args: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run srun to its end, whatever its exit code."""
        argv = ["srun", *args]
        return subprocess.run(
            argv,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience(timeout),
        )

    def sbatch(self, *args: str) -> int:
        """Submit a job from the folder, where its output goes; its number."""
        return int(
            call("sbatch", "--parsable", *args, env=self.environ(), cwd=self.folder).partition(";")[
                0
            ]
        )

    def command(self, *argv: str, check: bool = True) -> str:
        """The combined output of scontrol, squeue or any other program. With check, a failure is a
        RuntimeError."""
        return call(*argv, check=check, env=self.environ())

    def start_now(self, job: int) -> None:
        """Start a job that was requeued, which would wait for two minutes."""
        self.command("scontrol", "update", f"jobid={job}", "StartTime=now")

    def left(self, seconds: float = 5.0) -> list[str]:
        """As of `Hosts`; a job that runs has processes, slurmstepd among them."""
        return self.hosts.left(seconds)

    def boot(self, host: str) -> None:
        """Start a node that is down."""
        self.hosts.boot(host)
        self._slurmd[host].wait()
        self._start_slurmd(host)

    def mend(self) -> None:
        """Cancel all jobs and undo all harm."""
        jobs = self.command("squeue", "-h", "-o", "%A").split()
        if jobs:
            self.command("scancel", *jobs, check=False)  # one may have ended meanwhile
        self.hosts.mend()
        for name in self.hosts.names:
            if self._slurmd[name].poll() is not None:
                self._start_slurmd(name)
        if jobs:
            until(
                lambda: not self.command("squeue", "-h", "-o", "%A"),
                30,
                lambda: f"jobs do not end: {self._logs()}",
            )
        said = self.command("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        harmed = {line.split()[0] for line in said if line.split()[1].startswith(("down", "drain"))}
        for name in harmed:
            self.command("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        self._until_idle()


def main() -> int:
    """The command line: start or end a Slurm by hand."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.slurm", description=main.__doc__)
    parser.add_argument("verb", choices=["up", "down"])
    parser.add_argument("--label", default="slurm-by-hand", help="which of several")
    parser.add_argument("--names", default="d1,d2", help="the nodes' names, for up")
    given = parser.parse_args()
    if given.verb == "down":
        return from_namespaces.down(given.label)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    slurm = Slurm(given.names.split(","), label=given.label, persist=True).__enter__()
    print(
        f"export SLURM_CONF={slurm.conf} PATH={slurm.folder}/bin:$PATH  # then: srun -N "
        f"{len(slurm.hosts.names)} hostname"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
