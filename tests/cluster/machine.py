"""What the fixture asks of this machine: programs that run to their end, waits, and claims that
several sessions respect."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.patience import patience

ROOT = Path("/run/allhands-cluster")  # one folder a label
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = (
    "unshare",
    "nsenter",
    "setpriv",
    "ip",
    "ssh",
    "ssh-keygen",
    "sshd",
    "rsync",
    "mount",
    "iptables",
)
UNSHARE = (
    "unshare",
    "--net",
    "--uts",
    "--ipc",
    "--pid",
    "--mount",
    "--fork",
    "--kill-child=KILL",
    "--mount-proc",
)
# Variables of launchers, which no host inherits.
FOREIGN = re.compile(
    r"(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|MPI|HYDRA)_|"
    r"(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|SSH_AUTH_SOCK)$"
)


def call(
    *argv: str | Path,
    check: bool = True,
    stdin: str | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 60.0,
) -> str:
    """Run a program to its end; its combined output. With check, a failure is a RuntimeError with
    that output."""
    words = [str(word) for word in argv]
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    result = subprocess.run(
        words,
        input=stdin,
        env=env,
        cwd=cwd,
        stdout=pipe,
        stderr=out,
        text=True,
        timeout=patience(timeout),
    )
    if check and result.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {result.returncode}: {result.stdout}")
    return result.stdout


def until(
    true: Callable[[], Any], seconds: float, complaint: Callable[[], str], every: float = 0.003
) -> None:
    """Wait for something, at which it looks every so many seconds; a RuntimeError with the
    complaint when it does not come."""
    deadline = time.monotonic() + patience(seconds)
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{complaint()} (waited {seconds:g} s)")
        time.sleep(every)


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot have such hosts, in words for a skipped test; None when it can."""
    if not sys.platform.startswith("linux"):
        return "hosts from namespaces need Linux"
    if os.geteuid() != 0:
        return "hosts from namespaces need root"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=SYSTEM_PATH)]
    if missing:
        return (
            f"programs are missing: {', '.join(missing)} (Debian: apt-get install "
            "openssh-server rsync iproute2 iptables)"
        )
    try:
        call(*UNSHARE, "mount", "-t", "sysfs", "sysfs", "/sys")
        call(
            "unshare",
            "--net",
            "sh",
            "-c",
            "ip link add ah0 type bridge && ip link add ah1 type veth peer name ah2",
        )
    except RuntimeError as error:
        return f"this machine refuses namespaces: {error}"
    return None


def start_time(pid: int) -> str | None:
    """When a process started, in the kernel's ticks: with the pid, a name that is never used twice.
    None when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


@contextlib.contextmanager
def claims() -> Iterator[None]:
    """Hold the lock under which numbers, subnets and labels are taken and given back."""
    ROOT.mkdir(parents=True, exist_ok=True)
    with (ROOT / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
