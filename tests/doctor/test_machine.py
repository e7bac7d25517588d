"""What is said of one host's ssh, libraries and system, and of equal versions."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.doctor import machine
from allhands.doctor.finding import Finding
from tests.doctor.facts import GIB, facts

MIB = 1 << 20


@pytest.mark.parametrize(
    ("finding", "status", "found", "advice"),
    [
        (machine.login("d1", 0.3), "ok", "logged in and started Python in 0.30 s", ""),
        (machine.login("d1", 6.0), "warning", "in 6.00 s", "UseDNS no"),
        (
            machine.unreachable("d1", "it refuses the login"),
            "problem",
            "it refuses the login",
            "nothing else could be checked",
        ),
        (machine.shell("d1", b""), "ok", "prints nothing", ""),
        (
            machine.shell("d1", b"\nwelcome\nto d1\n"),
            "problem",
            "'welcome'",
            "rsync and scp break on it",
        ),
        (machine.shell("d1", b"\n"), "problem", r"'\n'", ".bashrc"),
        (machine.rsync("d1", "3.2.7", needed=True), "ok", "rsync 3.2.7", ""),
        (
            machine.rsync("d1", None, needed=True),
            "problem",
            "there is no rsync",
            "apt-get install rsync",
        ),
        (
            machine.rsync("d1", None, needed=False),
            "warning",
            "there is no rsync",
            "for --sync-dst-dir only",
        ),
        (
            machine.python("d1", facts()),
            "ok",
            "/opt/venv/bin/python: Python 3.11.7, torch 2.13.0",
            "",
        ),
        (
            machine.python("d1", facts(versions__torch=None)),
            "problem",
            "torch cannot be imported",
            "pip install torch",
        ),
        (
            machine.python("d1", facts(versions__allhands=None, versions__numpy=None)),
            "problem",
            "allhands and numpy",
            "--python",
        ),
        (machine.clock("d1", -0.002, 0.001), "ok", "2.0 ms behind this machine's (+- 0.5 ms)", ""),
        (
            machine.clock("d1", 1.5, 0.001),
            "warning",
            "1500.0 ms ahead of",
            "timedatectl set-ntp true",
        ),
        (machine.clock("d1", 1.2, 0.6), "ok", "1200.0 ms ahead", ""),  # it may be 0.9 s
        (
            machine.memory("d1", {"total": 64 * GIB, "free": 60 * GIB}),
            "ok",
            "60.0 GiB of 64.0 GiB free",
            "",
        ),
        (
            machine.memory("d1", {"total": 64 * GIB, "free": 900 * MIB}),
            "warning",
            "900 MiB of",
            "SIGKILL",
        ),
        (
            machine.memory("d1", {"total": 64 * GIB, "free": 100 * MIB}),
            "problem",
            "100 MiB of",
            "ps aux",
        ),
        (machine.memory("d1", {"total": None, "free": None}), "ok", "does not tell", ""),
        (
            machine.shm("d1", {"total": 8 * GIB, "free": 2 * GIB}),
            "ok",
            "/dev/shm: 2.0 GiB of 8.0 GiB free",
            "",
        ),
        (
            machine.shm("d1", {"total": 64 * MIB, "free": 64 * MIB}),
            "warning",
            "64.0 MiB of 64.0 MiB",
            "--shm-size=8g",
        ),
        (
            machine.shm("d1", {"total": 64 * MIB, "free": MIB}),
            "problem",
            "1.0 MiB of 64.0 MiB",
            "--shm-size=8g",
        ),
        (
            machine.shm("d1", {"total": None, "free": None}),
            "problem",
            "there is no /dev/shm",
            "mount",
        ),
        (
            machine.limits("d1", facts()),
            "ok",
            "open files: 1024 (can be raised to 1048576); locked memory: 8.0 MiB",
            "",
        ),
        (
            machine.limits("d1", facts(open_files=[512, None])),
            "warning",
            "512 (can be raised to no limit)",
            "ulimit -n 65536",
        ),
        (
            machine.limits("d1", facts(open_files=[64, 64])),
            "problem",
            "open files: 64",
            "Too many open files",
        ),
        (
            machine.limits("d1", facts(infiniband=["mlx5_0"])),
            "warning",
            "8.0 MiB",
            "mlx5_0 can be used by nccl only",
        ),
        (
            machine.limits("d1", facts(infiniband=["mlx5_0"], memlock=None)),
            "ok",
            "locked memory: no limit",
            "",
        ),
        (machine.cores("d1", facts()), "ok", "8 cores; OMP_NUM_THREADS is not set", ""),
        (machine.cores("d1", facts(variables__OMP_NUM_THREADS="4")), "ok", "OMP_NUM_THREADS=4", ""),
        (
            machine.cores("d1", facts(variables__OMP_NUM_THREADS="4,2")),
            "ok",
            "OMP_NUM_THREADS=4,2",
            "",
        ),
        (
            machine.cores("d1", facts(variables__OMP_NUM_THREADS="16")),
            "warning",
            "OMP_NUM_THREADS=16",
            "at most 8 divided by",
        ),
        (
            machine.cores("d1", facts(variables__OMP_NUM_THREADS="all")),
            "problem",
            "OMP_NUM_THREADS=all",
            "at least 1",
        ),
        (
            machine.cores("d1", facts(core_quota=2.0)),
            "warning",
            "of whose time this container gets 2",
            "at most 2",
        ),
    ],
)
def test_one_host(finding: Finding, status: str, found: str, advice: str) -> None:
    assert finding.host == "d1"
    assert finding.status == status
    assert found in finding.found
    assert advice in finding.advice
    assert bool(finding.advice) == (status != "ok")


def found(**of_d2: Any) -> list[Finding]:
    return machine.versions({"d1": facts(), "d2": facts(**of_d2), "d3": facts()})


def test_equal_versions() -> None:
    (one,) = found(versions__Python="3.11.9")  # patch releases are alike, as for a launch
    assert (one.host, one.status) == ("", "ok")
    assert (
        one.found
        == "equal on d1, d2, d3: Python 3.11.7, torch 2.13.0, allhands 0.1.0, numpy 2.4.6, CUDA "
        "12.8"
    )


@pytest.mark.parametrize(
    ("name", "version", "status", "advice"),
    [
        ("Python", "3.12.1", "problem", "--python PATH"),
        ("torch", "2.12.0", "problem", "pip install torch==2.13.0"),
        ("allhands", "0.2.0", "problem", "pip install allhands==0.1.0"),
        ("CUDA", "13.0", "problem", "the same build of torch"),
        ("CUDA", None, "problem", "the same build of torch"),
        ("numpy", "1.26.4", "warning", "other random numbers"),
    ],
)
def test_versions_that_differ(name: str, version: str | None, status: str, advice: str) -> None:
    (one,) = found(**{f"versions__{name}": version})
    assert (one.host, one.check, one.status) == ("d2", "versions", status)
    assert (
        one.found == f"d2 has {name} {version or 'none'}, d1 has {name} {facts()['versions'][name]}"
    )
    assert advice in one.advice


def test_what_is_absent_is_told_once() -> None:
    assert [one.status for one in found(versions__torch=None)] == ["ok"]  # `python` has told it


def test_the_launcher_speaks_with_equal_allhands_only() -> None:
    assert machine.launcher(facts(), {"d1": facts(), "d2": facts(versions__torch="2.12.0")}) == []
    (one,) = machine.launcher(facts(), {"d1": facts(), "d2": facts(versions__allhands="0.0.9")})
    assert (one.host, one.status) == ("d2", "problem")
    assert "this machine, which launches, has 0.1.0" in one.found
