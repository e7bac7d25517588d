"""Four hospitals in four network namespaces, each with its own patients' file only, and a server
that has none."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import DISK, Hosts, why_not
from tests.patience import patience

pytestmark = [pytest.mark.timeout(420), pytest.mark.usefixtures("forked_python")]
EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals"
NAMES = ("cleveland", "hungarian", "switzerland", "va")


@pytest.fixture(scope="module")
def hospitals() -> Iterator[Hosts]:
    """A host a hospital."""
    if reason := why_not():
        pytest.skip(reason)
    pytest.importorskip("flwr")
    with Hosts(NAMES, label=f"hospitals-{os.getpid()}") as hosts:
        yield hosts


@pytest.fixture
def data() -> Path:
    """The folder of heart_disease_sites.npz."""
    folder = Path(
        os.environ.get("ALLHANDS_DATA") or Path(__file__).parents[2].parent / "shared" / "data"
    )
    if not (folder / "heart_disease_sites.npz").is_file():
        pytest.skip("heart_disease_sites.npz is not in ALLHANDS_DATA")
    return folder


@pytest.mark.timeout(800)  # two minutes alone, and twice as long beside three other files
def test_the_hospitals_example_in_four_network_namespaces(
    hospitals: Hosts, data: Path, tmp_path: Path
) -> None:
    program = str(Path(sys.executable).parent / "allhands")
    environ = hospitals.environ(ALLHANDS_DATA=str(data), OMP_NUM_THREADS="1")
    port = _free_port()

    def here(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr + _said(hospitals)
        return done.stdout

    here(sys.executable, str(EXAMPLE / "split.py"), "data")
    named = [word for name in NAMES for word in ("--site", name)]
    here(
        program,
        "federated",
        "certificates",
        "--out",
        "keys",
        "--host",
        hospitals.driver_address,
        *named,
    )
    for name in ("run.yml", "hospital.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    sites = [_start_site(hospitals, name, program, tmp_path, port) for name in NAMES]
    # The server's own machine has no patients while it trains.
    (tmp_path / "data").rename(tmp_path / "apart")
    started = time.monotonic()
    said = here(
        program,
        "federated",
        "server",
        "-C",
        "run.yml",
        "--host",
        "0.0.0.0",
        "--port",
        str(port),
        "--sites",
        "keys/sites.txt",
        "--certificate",
        "keys/server.crt",
        "--key",
        "keys/server.key",
        "--authority",
        "keys/authority.crt",
    )
    print(f"{time.monotonic() - started:.0f} s\n{said}")
    for name in NAMES:
        _stop_site(hospitals, name)
    assert [site.wait(patience(30)) for site in sites] == [143] * len(NAMES), _said(hospitals)

    events = [
        json.loads(line)
        for line in (tmp_path / "logs" / "hospitals" / "events.jsonl").read_text().splitlines()
    ]
    samples = {event["site"]: event["samples"] for event in events if event["kind"] == "greeted"}
    assert samples == {"cleveland": 227, "hungarian": 220, "switzerland": 92, "va": 150}
    assert [event["reason"] for event in events if event["kind"] == "end"] == ["finished"]
    assert not [
        event
        for event in events
        if event["kind"] in ("bad", "failed", "late", "refused", "stranger")
    ]

    table = here(sys.executable, str(EXAMPLE / "compare.py"), "apart", "logs/hospitals")
    print(table)
    rows = {
        row[0]: row[1:]
        for row in re.findall(
            r"^(\w+) +(\d+) +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)%$", table, re.M
        )
    }
    assert set(rows) == {*NAMES, "all"}
    _, alone, elsewhere, together, one_place = map(float, rows["all"])
    # Together is better than a model from elsewhere, and as good as all patients in one place, to
    # the noise of 231 patients.
    assert together > elsewhere + 3
    assert together > one_place - 3
    assert together > 75
    assert alone > 75


def _start_site(
    hosts: Hosts, name: str, program: str, folder: Path, port: int
) -> subprocess.Popen[str]:
    """Bring a hospital its own files, onto its own disk, and start it there."""
    disk = hosts.folder / name / "disk"
    shutil.copytree(folder / "data" / name, disk / "patients")
    for path in ("run.yml", "hospital.py", f"keys/sites/{name}.key", "keys/authority.crt"):
        shutil.copy(folder / path, disk)  # keeps the key's mode
    assert hosts.run(name, "find", DISK, "-name", "*.npz").split() == [
        f"{DISK}/patients/patients.npz"
    ]
    command = [
        program,
        "federated",
        "site",
        "-C",
        "run.yml",
        "--server",
        f"{hosts.driver_address}:{port}",
        "--data",
        "patients",
        "--name",
        name,
        "--key",
        f"{name}.key",
        "--authority",
        "authority.crt",
    ]
    with (hosts.folder / name / "site.log").open("w") as log:
        return hosts.popen(
            name,
            ["env", "-C", DISK, "OMP_NUM_THREADS=1", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )


def _stop_site(hosts: Hosts, name: str) -> None:
    """As its operator does, on its host."""
    (pid,) = (
        line.split()[0] for line in hosts.processes(name) if "allhands federated site" in line
    )
    hosts.run(name, "kill", "-TERM", pid)


def _said(hosts: Hosts) -> str:
    return "".join(
        f"\n--- {name}\n{path.read_text()}"
        for name in NAMES
        if (path := hosts.folder / name / "site.log").exists()
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])
