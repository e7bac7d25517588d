"""`allhands doctor` on real hosts: what is broken is named, what is not broken is still checked,
and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from allhands.planning.measured_profile import MeasuredProfile
from tests.cluster.hosts import DISK, Hosts
from tests.cluster.machine import call
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("forked_python")

# The folders that it makes for ssh's connections carry its process id: other tests make such
# folders at the same time.
DOCTOR = """
import os, tempfile
make = tempfile.mkdtemp
tempfile.mkdtemp = lambda prefix, dir: make(prefix=f"{prefix}{os.getpid()}-", dir=dir)
from allhands.cli.main import main
main()
"""


def start(hosts: Hosts, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-P", "-c", DOCTOR, "doctor", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv,
        cwd="/",
        env=hosts.environ(),
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def assert_nothing_left(hosts: Hosts, process: subprocess.Popen[str]) -> None:
    assert hosts.left(5) == []
    assert list(Path("/tmp").glob(f"allhands-ssh-{process.pid}-*")) == []
    for name in hosts.names:
        if hosts.is_up(name):
            assert (
                hosts.run(name, "sh", "-c", f"find / {DISK} -maxdepth 1 -name '.allhands-doctor*'")
                == ""
            )


def doctor(hosts: Hosts, *words: str) -> dict[str, Any]:
    """What it found. It must have ended within 30 s, with an exit code that fits, and must have
    left nothing."""
    began = time.monotonic()
    with start(hosts, "--json", *words) as process:
        try:
            out, err = process.communicate(timeout=patience(60))
        finally:
            process.kill()
    assert time.monotonic() - began < patience(30)
    assert out.startswith("{"), err
    told = json.loads(out)
    assert process.returncode == (1 if told["problems"] else 0), err
    assert told["ok"] == (told["problems"] == 0)
    assert_nothing_left(hosts, process)
    return dict(told)


def findings(told: dict[str, Any], status: str) -> dict[tuple[str, str], str]:
    """What was found and what to do, by host and check."""
    return {
        (one["host"], one["check"]): one["found"] + " -> " + one["advice"]
        for one in told["findings"]
        if one["status"] == status
    }


def test_healthy_hosts(hosts: Hosts) -> None:
    told = doctor(hosts, "-H", "d1,d2", "--dir", DISK)
    assert findings(told, "problem") == {}
    good = {(one["host"], one["check"]): one for one in told["findings"]}
    assert told["hosts"] == ["this machine", "d1", "d2"]
    for host in hosts.names:
        network = good[host, "network"]["values"]
        assert (network["chosen"], network["address"]) == ("eth0", hosts.address[host])
        assert abs(good[host, "clock"]["values"]["skew_ms"]) < 500
        assert "127.0.1.1" in good[host, "names"]["found"]
        assert "GLOO_SOCKET_IFNAME=eth0" in good[host, "names"]["advice"]
    assert "2 directions" in good["", "ports"]["found"]
    # The disks are private, which matters for a job that does not copy its files.
    assert good["", "sharing"]["values"]["groups"] == [["d1"], ["d2"]]
    assert "--sync-dst-dir DIR" in good["", "sharing"]["advice"]
    reduced = good["", "all-reduce"]["values"]
    assert (reduced["ranks"], reduced["hosts"], reduced["backend"], reduced["correct"]) == (
        2,
        2,
        "gloo",
        True,
    )
    assert [one["bytes"] for one in reduced["sizes"]] == [4096, 1 << 20, 32 << 20]
    slowest = min(good["", "link"]["values"]["gb_per_s"].values())
    # Two ranks: each sends the tensor once.
    assert reduced["expected_gb_per_s"] == pytest.approx(slowest, rel=0.01)
    assert 0 < reduced["sizes"][-1]["gb_per_s"] < 100


def test_collectives_are_measured_for_plans(hosts: Hosts, tmp_path: Path) -> None:
    profile = tmp_path / "links.json"
    profile.write_text('{"operations": {"some": 1.0}}')
    told = doctor(hosts, "-H", "d1,d2", "--dir", DISK, "--profile", str(profile))
    values = next(one["values"] for one in told["findings"] if one["check"] == "all-reduce")
    written = json.loads(profile.read_text())
    assert written["operations"] == {"some": 1.0}
    assert written["links"]["between"]["kinds"] == values["kinds"]
    links = MeasuredProfile(profile).links()
    assert links is not None
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
    assert set(links.between) == set(kinds)
    for kind in kinds:
        assert 0 < links.seconds(1e6, kind, 2, 2) < 10


def test_a_host_is_off_and_the_other_is_still_examined(hosts: Hosts) -> None:
    hosts.cut("d2")
    # Or ssh waits for its own timeout, and says so.
    call("ip", "neigh", "flush", "dev", hosts.bridge)
    told = doctor(hosts, "-H", "d1,d2", "--dir", DISK)
    assert set(findings(told, "problem")) == {("d2", "ssh")}
    assert re.search(
        "no way to it in the network|does not answer", findings(told, "problem")["d2", "ssh"]
    )
    assert ("d1", "folder") in findings(told, "ok")
    assert "not tried: d2 could not be examined" in findings(told, "warning")["", "all-reduce"]


def test_a_firewall_between_hosts_is_named_with_its_direction(hosts: Hosts) -> None:
    hosts.run(
        "d1",
        "iptables",
        "-A",
        "INPUT",
        "-s",
        hosts.address["d2"],
        "-p",
        "tcp",
        "--syn",
        "-j",
        "DROP",
    )
    try:
        told = doctor(hosts, "-H", "d1,d2", "--dir", DISK)
    finally:
        hosts.run("d1", "iptables", "-F")
    (problem,) = [one for one in told["findings"] if one["status"] == "problem"]
    assert (problem["values"]["from"], problem["values"]["to"]) == ("d2", "d1")
    assert (
        problem["found"]
        == f"d2 cannot connect to d1 on port {problem['values']['port']} (timed out)"
    )
    assert "firewall on d1" in problem["advice"]
    assert "d2 cannot connect to d1" in findings(told, "warning")["", "all-reduce"]


def test_no_rsync_a_talkative_shell_a_missing_folder_and_an_unknown_key(
    hosts: Hosts, tmp_path: Path
) -> None:
    hosts.hide_program("d2", "rsync")
    bashrc = hosts.folder / "d2" / "bashrc"
    bashrc.write_text("echo welcome to d2\n")
    hosts.run("d1", "mkdir", "-p", f"{DISK}/only-d1")
    try:
        told = doctor(hosts, "-H", "d1,d2", "--no-all-reduce", "--dir", f"{DISK}/only-d1")
        assert set(findings(told, "problem")) == {("d2", "shell"), ("d2", "folder")}
        assert "'welcome to d2'" in findings(told, "problem")["d2", "shell"]
        assert f"there is no {DISK}/only-d1" in findings(told, "problem")["d2", "folder"]
        assert "apt-get install rsync" in findings(told, "warning")["d2", "rsync"]
    finally:
        bashrc.write_text("")
    hosts.forget_host_key("d1")
    told = doctor(hosts, "-H", "d1,d2", "--no-all-reduce", "--sync-dst-dir", f"{DISK}/new")
    assert set(findings(told, "problem")) == {("d1", "ssh"), ("d2", "rsync")}
    assert (
        "its host key is not known here. Run `ssh d1` once"
        in findings(told, "problem")["d1", "ssh"]
    )
    assert f"{DISK}/new will be made in {DISK}" in findings(told, "ok")["d2", "folder"]


def test_a_doctor_that_is_stopped_leaves_nothing(hosts: Hosts) -> None:
    with start(hosts, "-H", "d1,d2", "--dir", DISK) as process:
        try:
            assert process.stderr is not None
            while "to one another" not in process.stderr.readline():
                assert process.poll() is None
            process.terminate()
            assert process.wait(patience(10)) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert_nothing_left(hosts, process)


def test_another_python_and_a_shared_folder(hosts: Hosts, tmp_path: Path) -> None:
    shared = hosts.folder / "shared"
    shared.mkdir()
    told = doctor(hosts, "-H", "d1,d2", "--no-all-reduce", "--dir", str(shared))
    assert "is the same on d1, d2, and on this machine" in findings(told, "ok")["", "sharing"]
    assert os.listdir(shared) == []
    told = doctor(hosts, "-H", "d1", "--python", "/no/such/python")
    assert "there is no Python at /no/such/python" in findings(told, "problem")["d1", "ssh"]
