"""The fixture tells the truth: what other tests take for granted about hosts, Slurm and MPI."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import DISK, Hosts
from tests.cluster.machine import until
from tests.cluster.mpi import Mpi
from tests.cluster.slurm import Slurm


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """The process, which ends with the block."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_hosts_are_hosts(hosts: Hosts) -> None:
    result = hosts.ssh("d1", "hostname; ssh d2 hostname; which python; ls /sys/class/net")
    assert result.stdout.split() == ["d1", "d2", f"{sys.prefix}/bin/python", "eth0", "lo"]
    assert hosts.run("d1", "getent", "ahostsv4", "d1").split()[0] == "127.0.1.1"  # Debian's trap
    assert hosts.run("d1", "getent", "ahostsv4", "d2").split()[0] == hosts.address["d2"]
    assert hosts.run("d2", "getent", "ahostsv4", "driver").split()[0] == hosts.driver_address
    assert hosts.left() == []


def test_disks_are_private(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from the driver")
    subprocess.run(
        ["rsync", "-a", f"{tmp_path}/", f"d1:{DISK}/job/"], env=hosts.environ(), check=True
    )
    assert hosts.run("d1", "cat", f"{DISK}/job/file") == "from the driver"
    for place in (f"{DISK}/job", str(tmp_path)):
        assert "No such file" in hosts.run("d2", "ls", place, check=False)
    assert not Path(DISK, "job").exists()
    hosts.small_disk("d1", DISK, "1m")
    assert "No space left" in hosts.ssh("d1", f"head -c 2000000 /dev/zero >{DISK}/file").stderr
    hosts.restore_disk("d1", DISK)
    assert hosts.run("d1", "ls", DISK) == "job\n"
    hosts.clear_disk("d1")
    assert hosts.run("d1", "ls", "-A", DISK) == ""


def test_processes_that_are_left_are_seen(hosts: Hosts) -> None:
    with ended(
        hosts.popen(
            "d1", ["sh", "-c", "echo $$; exec sleep 1000"], stdout=subprocess.PIPE, text=True
        )
    ) as process:
        assert process.stdout
        pid = process.stdout.readline().strip()
        until(
            lambda: hosts.processes("d1") == [f"{pid} sleep 1000"],
            5,
            lambda: str(hosts.processes("d1")),
        )
        assert hosts.left(0) == [f"d1: {pid} sleep 1000"]
    assert hosts.left() == []
    assert hosts.ssh("d2", "nohup sleep 1000 >/dev/null 2>&1 &").returncode == 0
    assert [found.split(maxsplit=2)[2] for found in hosts.left(0.3)] == ["sleep 1000"]
    hosts.mend()
    assert hosts.left(0.3) == []


def test_a_network_is_cut_and_heals(hosts: Hosts) -> None:
    loop = hosts.popen(
        "d1",
        ["sh", "-c", "while :; do echo on; sleep 0.01; done"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with ended(loop) as process:
        hosts.cut("d1")
        assert _reaches(hosts, "d1") != 0
        assert _reaches(hosts, "d2") == 0
        assert process.stdout
        assert process.stdout.readline() == "on\n"  # it goes on alone
        hosts.heal("d1")
        assert _reaches(hosts, "d1") == 0


def _reaches(hosts: Hosts, host: str) -> int:
    argv = ["ssh", "-o", "ConnectTimeout=1", host, "true"]
    return subprocess.run(argv, env=hosts.environ(), capture_output=True).returncode


@pytest.mark.parametrize("silent", [False, True])
def test_a_host_goes_down_and_comes_back(hosts: Hosts, silent: bool) -> None:
    """A crash ends connections at once; after a power-off nobody hears anything."""
    hosts.run("d2", "sh", "-c", f"echo kept >{DISK}/file; echo lost >/dev/shm/file")
    with ended(
        subprocess.Popen(["ssh", "d2", "sleep 1000"], env=hosts.environ(), stderr=subprocess.PIPE)
    ) as client:
        until(
            lambda: any("sleep" in process for process in hosts.processes("d2")),
            5,
            lambda: "nothing runs on d2",
        )
        (hosts.poweroff if silent else hosts.kill)("d2")
        assert not hosts.is_up("d2")
        assert hosts.processes("d2") == []
        if silent:
            time.sleep(0.5)
            assert client.poll() is None
        else:
            assert client.wait(timeout=5) == 255
    hosts.boot("d2")
    assert hosts.ssh("d2", f"cat {DISK}/file; ls /dev/shm; hostname").stdout == "kept\nd2\n"
    hosts.clear_disk("d2")


def test_host_keys_are_checked(hosts: Hosts) -> None:
    hosts.forget_host_key("d2")
    assert "Host key verification failed" in hosts.ssh("d2", "true").stderr
    hosts.restore_host_key("d2")
    assert hosts.ssh("d2", "true").returncode == 0
    hosts.change_host_key("d2")
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in hosts.ssh("d2", "true").stderr
    assert "Host key verification failed" in hosts.ssh("d1", "ssh d2 true").stderr
    hosts.mend()
    assert hosts.ssh("d2", "true").returncode == 0


@pytest.mark.parametrize(
    ("shell", "line", "says"),
    [
        ("/bin/bash", "echo $BASH_VERSION[0]", "[0]"),
        ("/bin/dash", "echo $0 ${BASH_VERSION:-no}", "dash no"),
        ("/bin/tcsh", "set a = ( x y ); echo $a[2]", "y"),
        ("/usr/bin/fish", "set a x y; echo $a[2]", "y"),
    ],
)
def test_the_login_shell_is_any(hosts: Hosts, shell: str, line: str, says: str) -> None:
    if not os.access(shell, os.X_OK):
        pytest.skip(f"there is no {shell} (Debian: apt-get install tcsh fish)")
    hosts.set_shell("d1", shell)
    assert hosts.ssh("d1", line).stdout.strip().endswith(says)
    assert hosts.ssh("d1", "which python").stdout.strip() == f"{sys.prefix}/bin/python"
    assert hosts.ssh("d2", "echo $0").stdout.strip().endswith("bash")


def test_a_program_is_missing_on_one_host(hosts: Hosts) -> None:
    hosts.hide_program("d1", "rsync")
    hosts.hide_program("d1", "python")
    assert hosts.ssh("d1", "rsync --version").returncode == 127
    assert hosts.ssh("d1", "python --version").returncode == 127
    assert hosts.ssh("d2", "rsync --version && python --version").returncode == 0
    hosts.unhide("d1", "rsync")
    assert hosts.ssh("d1", "rsync --version").returncode == 0
    hosts.mend()
    assert hosts.ssh("d1", "python --version").returncode == 0


def test_several_at_once_and_nothing_left(hosts: Hosts) -> None:
    with Hosts(("d1",), label=f"second-{os.getpid()}") as second:
        assert second.number != hosts.number
        assert second.address["d1"] != hosts.address["d1"]
        assert second.ssh("d1", "hostname").stdout == "d1\n"
        with pytest.raises(RuntimeError, match="is up already"), Hosts(("d1",), label=second.label):
            pass
        subnet = second.address["d1"].rpartition(".")[0]
        with (
            pytest.raises(RuntimeError, match="no free subnet"),
            Hosts(("d1",), label="other", subnet=subnet),
        ):
            pass
    assert not second.folder.exists()
    assert f" {second.bridge}:" not in subprocess.check_output(["ip", "-o", "link"], text=True)
    assert hosts.ssh("d1", "hostname").stdout == "d1\n"


def test_a_killed_session_leaves_no_process_and_the_next_one_clears_up(hosts: Hosts) -> None:
    label = f"killed-{os.getpid()}"
    code = f"""from tests.cluster.hosts import Hosts
hosts = Hosts(label={label!r}).__enter__()
print(*hosts._init.values(), flush=True)
input()"""
    session = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with ended(session):
        assert session.stdout
        first = [int(pid) for pid in session.stdout.readline().split()]
        assert len(first) == 2
        session.send_signal(signal.SIGKILL)
    until(
        lambda: not any(Path(f"/proc/{pid}/ns/net").exists() for pid in first),
        5,
        lambda: f"{first} live on",
    )
    folder = hosts.folder.with_name(label)
    assert folder.exists()
    with Hosts(("d1",), label=f"next-{os.getpid()}"):
        assert not folder.exists()


def test_slurm_starts_tasks_on_both_nodes(slurm: Slurm) -> None:
    result = slurm.srun(
        "-N2",
        "--ntasks-per-node=2",
        "--gpus-per-task=1",
        "sh",
        "-c",
        "echo $(hostname) $CUDA_VISIBLE_DEVICES",
    )
    assert sorted(result.stdout.splitlines()) == ["d1 0", "d1 1", "d2 0", "d2 1"]
    assert slurm.srun("-N2", "sh", "-c", 'exit "$SLURM_PROCID"').returncode == 1
    assert slurm.left() == []


def test_slurm_jobs_are_seen_and_cancelled(slurm: Slurm) -> None:
    job = slurm.sbatch("-N2", "--wrap", "srun sleep 1000")
    until(
        lambda: sum("sleep 1000" in process for process in slurm.left(0)) >= 3,
        10,
        lambda: slurm.command("squeue"),
    )
    assert f"JobId={job} " in slurm.command("scontrol", "show", "job", str(job))
    assert (slurm.folder / f"slurm-{job}.out").exists()
    slurm.mend()
    assert slurm.left() == []
    assert slurm.command("squeue", "-h") == ""
    assert "PreemptMode=REQUEUE" in slurm.command("scontrol", "show", "partition", "batch")
    assert "PreemptMode=OFF" in slurm.command("scontrol", "show", "partition", "urgent")


def test_a_slurm_node_goes_down_and_comes_back(slurm: Slurm) -> None:
    slurm.hosts.poweroff("d2")
    slurm.boot("d2")
    assert slurm.srun("-N2", "hostname").stdout.split() in (["d1", "d2"], ["d2", "d1"])


HELLO = """import os, socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
library = MPI.Get_library_version()[:4]
said = f"{world.allreduce(world.rank)} {socket.gethostname()} {library} {os.environ['WORDS']}"
for line in world.gather(f"{world.rank} of {world.size}: {said}") or []:
    print(line)
"""


@pytest.mark.parametrize("far", [False, True])
def test_mpi_ranks_find_each_other(mpi: Mpi, hosts: Hosts, far: bool) -> None:
    where = hosts if far else None
    argv = mpi.argv(4, ["python", "-c", HELLO], where)
    environ = mpi.environ(where, WORDS="two words")
    result = subprocess.run(
        argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    names = ["d1", "d1", "d2", "d2"] if far else [socket.gethostname()] * 4
    library = {"openmpi": "Open", "mpich": "MPIC"}[mpi.name]
    expected = [f"{rank} of 4: 6 {name} {library} two words" for rank, name in enumerate(names)]
    assert result.stdout.splitlines() == expected, result.stderr
    assert hosts.left() == []
