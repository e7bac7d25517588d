"""Worlds of MPI's launchers over real hosts: they form, and when one rank fails they end, with its
name."""

from __future__ import annotations

import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.launching import STEPS, Launch, shared_folder
from tests.cluster.mpi import Mpi
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("forked_python")

# test_a_link_goes_down, and tests/comm/test_mpi.py, have both launchers in `make test`.
either_mpi = pytest.mark.parametrize(
    "mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.rare)], indirect=True
)


def launched(mpi: Mpi, hosts: Hosts, folder: Path, how: str) -> Launch:
    """STEPS in two ranks, one a host, through `allhands launch --launcher mpi`."""
    (folder / "steps.py").write_text(STEPS)
    words = mpi.argv(2, [], hosts)[1:]
    skipped = {"-n": 2, "--host": 2, "-hosts": 2, "-ppn": 2}
    more: list[str] = []
    while words:
        count = skipped.get(words[0], 0)
        more += [] if count else words[:1]
        words = words[count or 1 :]
    (folder / "mpirun").write_text(f'#!/bin/sh\nexec {mpi.program} "$@"\n')
    (folder / "mpirun").chmod(0o755)
    environ = mpi.environ(hosts, choose_library=False)
    extra = {name: environ[name] for name in environ if environ[name] != hosts.environ().get(name)}
    extra.pop("OMPI_MCA_mca_base_env_list", None)  # the launcher exports what is needed itself
    extra["ALLHANDS_HEARTBEAT_TIMEOUT"] = "4"
    extra["PATH"] = f"{folder}:{hosts.environ()['PATH']}"
    options = ["--launcher", "mpi", "-n", "2", "-H", "hosts", f"--mpirun={shlex.join(more)}"]
    return Launch(hosts, folder, *options, "steps.py", how, extra=extra)


@either_mpi
@pytest.mark.parametrize(
    "how",
    # rare: launch/test_failures.py has them, and so has the link that goes down below.
    ["kill", *(pytest.param(how, marks=pytest.mark.rare) for how in ("raise", "exit", "stop"))],
)
def test_a_rank_fails(mpi: Mpi, hosts: Hosts, how: str) -> None:
    causes = {
        "raise": "rank 1 on d2 raised ValueError: no such class: 11",
        "exit": r"rank 1 \(d2, pid \d+\) failed first: left with exit code 3",
        "kill": "on node d2 exited on signal 9"
        if mpi.name == "openmpi"
        else r"RUNNING AT d2\n=   EXIT CODE: 9",
        "stop": r"rank 1 \(d2, pid \d+\) failed first: has given no sign of life for \d+ s: "
        r"stopped, hung",
    }
    with launched(mpi, hosts, shared_folder(hosts, "mpi"), how) as job:
        job.until("running")
        began = time.monotonic()
        code, said = job.end()
        assert time.monotonic() - began < patience(30)
    assert code not in (0, None), said
    assert re.search(causes[how], said), said
    assert "[0] running" in said
    assert hosts.left(5) == []


def test_a_link_goes_down(mpi: Mpi, hosts: Hosts) -> None:
    with launched(mpi, hosts, shared_folder(hosts, "mpi"), "no") as job:
        job.until("running")
        began = time.monotonic()
        hosts.cut("d2")
        code, said = job.end()
        assert time.monotonic() - began < patience(30)
    assert code not in (0, None)
    assert re.search(
        r"rank 1 \(d2, pid \d+\) failed first: has given no sign of life for \d+ s", said
    ), said
    deadline = time.monotonic() + patience(5)
    while [
        one for one in hosts.processes("d2") if "steps.py" in one
    ] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [one for one in hosts.processes("d2") if "steps.py" in one] == []
    assert [one for one in hosts.processes("d1") if "steps.py" in one] == []
    hosts.heal("d2")
    assert hosts.left(5) == []


@either_mpi
@pytest.mark.parametrize(
    "number",
    # rare: SIGTERM takes the way of Ctrl-C, SIGKILL that of a link that goes down.
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.rare),
        pytest.param(signal.SIGKILL, marks=pytest.mark.rare),
    ],
)
def test_the_launcher_is_ended(mpi: Mpi, hosts: Hosts, number: signal.Signals) -> None:
    with launched(mpi, hosts, shared_folder(hosts, "mpi"), "no") as job:
        job.until("running")
        job.process.send_signal(number)
        code, _ = job.end()
    assert code not in (0, None)
    assert hosts.left(5) == []
