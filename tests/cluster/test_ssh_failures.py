"""Everything that breaks: named with host, rank and cause, an exit code that is not 0, and nothing
left on any host."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import DISK, Hosts
from tests.cluster.launching import STEPS, WORKER_FAILURES, Launch, shared_folder
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("forked_python")


def prepared(hosts: Hosts) -> Path:
    folder = shared_folder(hosts, "failures")
    (folder / "steps.py").write_text(STEPS)
    return folder


# rare: all but a kill are told by the worker, and by the launcher on one host as on several
# (launch/test_failures.py).
@pytest.mark.parametrize(
    ("how", "cause", "code"),
    [
        failure if failure[0] == "kill" else pytest.param(*failure, marks=pytest.mark.rare)
        for failure in WORKER_FAILURES
    ],
)
def test_a_worker_fails(hosts: Hosts, how: str, cause: str, code: int) -> None:
    with Launch(hosts, prepared(hosts), "-n", "2", "-H", "hosts", "steps.py", how) as job:
        job.names_the_failure(cause, code)
    assert hosts.left(5) == []


def test_a_link_goes_down_in_the_middle_of_a_step_and_comes_back(hosts: Hosts) -> None:
    with Launch(
        hosts, prepared(hosts), "-n", "2", "-H", "hosts", "--host-timeout", "5", "steps.py", "no"
    ) as job:
        job.until("running")
        began = time.monotonic()
        hosts.cut("d2")
        code, said = job.end()
        assert time.monotonic() - began < patience(30)
    assert code == 128 + 9, said
    assert "rank 1 (d2, pid " in said
    assert (
        "no word from host d2 (its network or the machine is down, or it was suspended) for" in said
    )
    # Cut off, the host has ended everything by itself; only sshd, which nobody told, still holds
    # the dead connection.
    deadline = time.monotonic() + patience(5)
    while [
        one for one in hosts.processes("d2") if "sshd" not in one
    ] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [one for one in hosts.processes("d2") if "sshd" not in one] == []
    assert hosts.processes("d1") == []
    hosts.heal("d2")


def test_a_host_is_switched_off(hosts: Hosts) -> None:
    with Launch(
        hosts, prepared(hosts), "-n", "2", "-H", "hosts", "--host-timeout", "4", "steps.py", "no"
    ) as job:
        job.until("running")
        hosts.poweroff("d1")
        code, said = job.end()
    assert code == 128 + 9, said
    assert "rank 0 (d1, pid " in said
    assert "no word from host d1" in said
    assert hosts.left(5) == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.rare),
        # rare: hosts that lose the launcher are tested with a link that goes down.
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.rare),
    ],
)
def test_the_launcher_is_ended(hosts: Hosts, number: int, code: int) -> None:
    with Launch(hosts, prepared(hosts), "-n", "2", "-H", "hosts", "steps.py", "no") as job:
        job.until("running")
        job.process.send_signal(number)
        got, said = job.end()
    assert got == code
    if number != signal.SIGKILL:
        assert f"stopped by {signal.Signals(number).name}; no worker is left" in said
    assert hosts.left(5) == []


def refused(hosts: Hosts, folder: Path, *words: str) -> str:
    """What a job says that never starts a worker."""
    with Launch(hosts, folder, "-n", "2", "-H", "hosts", *words) as job:
        code, said = job.end(30)
    assert code not in (0, None)
    assert hosts.left(5) == []
    assert "Traceback" not in said, said
    return said


def test_a_host_cannot_be_reached(hosts: Hosts) -> None:
    folder = prepared(hosts)
    hosts.cut("d2")
    said = refused(hosts, folder, "steps.py", "no")
    assert "host d2: " in said
    assert "Is it switched on" in said
    hosts.heal("d2")
    (folder / "hosts").write_text("d1\nnowhere\n")
    said = refused(hosts, folder, "steps.py", "no")
    assert "host nowhere: its name cannot be resolved" in said


def test_a_host_key_is_unknown_or_has_changed(hosts: Hosts) -> None:
    folder = prepared(hosts)
    hosts.forget_host_key("d2")
    assert "host d2: its host key is not known here. Run `ssh d2` once" in refused(
        hosts, folder, "steps.py", "no"
    )
    hosts.restore_host_key("d2")
    hosts.change_host_key("d2")
    assert "host d2: its host key is not the one that is known for it" in refused(
        hosts, folder, "steps.py", "no"
    )


def test_a_host_has_another_python_or_none(hosts: Hosts) -> None:
    folder = prepared(hosts)
    said = refused(hosts, folder, "--python", "/opt/absent/python", "steps.py", "no")
    for host in hosts.names:
        assert f"host {host}: there is no Python at /opt/absent/python" in said
    # On d2 alone: one that lacks allhands, and one that has another version of it.
    python = folder / "python"
    own = f'exec {sys.executable} "$@"'
    python.write_text(
        f'#!/bin/sh\nif [ "$(hostname)" = d2 ]; then exec {sys.base_prefix}/bin/python3 -I -S '
        f'"$@"; fi\n{own}\n'
    )
    python.chmod(0o755)
    said = refused(hosts, folder, "--python", str(python), "steps.py", "no")
    assert "host d2: " in said
    assert "cannot import allhands" in said
    assert "host d1: " not in said
    found = folder / "elsewhere" / "allhands-9.9.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: allhands\nVersion: 9.9\n")
    python.write_text(
        f'#!/bin/sh\nif [ "$(hostname)" = d2 ]; then export PYTHONPATH={found.parent}; fi\n{own}\n'
    )
    said = refused(hosts, folder, "--python", str(python), "--no-preload", "steps.py", "no")
    assert "host d2: it has allhands 9.9, but d1 has allhands " in said


def test_a_host_has_no_rsync_or_a_full_disk(hosts: Hosts) -> None:
    folder = prepared(hosts)
    words = ["--sync-dst-dir", f"{DISK}/job", "steps.py", "no"]
    hosts.hide_program("d2", "rsync")
    # 127, or 12 when rsync noticed the broken connection first.
    assert re.search(
        rf"host d2: rsync to {DISK}/job failed \(exit code \d+\): rsync is not installed there",
        refused(hosts, folder, *words),
    )
    hosts.unhide("d2", "rsync")
    hosts.small_disk("d2", DISK, "1m")
    (folder / "large").write_bytes(os.urandom(3 << 20))
    said = refused(hosts, folder, *words)
    assert f"host d2: rsync to {DISK}/job failed (exit code 11): the disk is full" in said


def test_a_command_or_a_folder_does_not_exist(hosts: Hosts, tmp_path: Path) -> None:
    folder = prepared(hosts)
    said = refused(hosts, folder, "no-such-program", "x")
    assert "failed first: cannot run 'no-such-program': No such file or directory" in said
    said = refused(hosts, folder, "--no-preload", "absent.py")
    assert "raised FileNotFoundError: [Errno 2] No such file or directory" in said
    (tmp_path / "hosts").write_text("d1\nd2\n")
    said = refused(hosts, tmp_path, "steps.py", "no")
    assert (
        f"the folder {tmp_path} cannot be used there (No such file or directory); --sync-dst-dir "
        "DIR copies" in said
    )
