"""Jobs over ssh hosts: the tutorial's command, what arrives unchanged, what is copied, and which
shells may be in between."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tests.cluster.hosts import DISK, Hosts
from tests.cluster.launching import Launch, shared_folder

pytestmark = pytest.mark.usefixtures("forked_python")

PROBE = """
import json, os, sys, time
import torch, torch.distributed as dist
import allhands

world = allhands.init()
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
names += ["GLOO_SOCKET_IFNAME", "ALLHANDS_NUM_SERVERS"]
print(json.dumps({
    "rank": world.rank, "size": world.world_size, "sum": total.item(),
    "argv": sys.argv[1:], "cwd": os.getcwd(),
    "files": sorted(os.listdir()), **{name: os.environ[name] for name in names},
}))
"""

# Without torch, so that it starts at once.
LIGHT = """
import json, os, sys, time
values = {n: v for n, v in os.environ.items() if n.startswith("TEST_")}
print(json.dumps({"argv": sys.argv[1:], "values": values}), flush=True)
time.sleep(float(os.environ.get("TEST_SLEEP", 0)))
"""

ODD = [
    "a b",
    "it's",
    '"quoted"',
    "$HOME",
    "`id`",
    "back\\slash",
    "!!",
    "*",
    "~",
    "é🏖",
    "",
    "a;b|c>d",
    "-n",
    "new\nline",
    "%s #x",
]


def test_the_tutorials_command(hosts: Hosts) -> None:
    """Two workers and two servers on two hosts, with the folder copied; as one string."""
    folder = shared_folder(hosts, "cifar10_dist")
    (folder / "train.py").write_text(PROBE)
    for name in (".git", "logs", "data"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    target = f"{DISK}/cifar10_dist"
    words = ["-n", "2", "-s", "2", "-H", "hosts", "--sync-dst-dir", target, "--launcher", "ssh"]
    with Launch(hosts, folder, *words, f"python {target}/train.py 'a b'") as job:
        code, said = job.end()
    assert code == 0, said
    first, second = job.told()
    assert (first["place"], second["place"]) == ("d1 0", "d2 1")
    assert [one["sum"] for one in (first, second)] == [3.0, 3.0]
    assert [one["argv"] for one in (first, second)] == [["a b"]] * 2
    assert first["cwd"] == second["cwd"] == target
    assert "data" in first["files"]
    assert not {".git", "logs"} & {*first["files"], *second["files"]}
    assert first["ALLHANDS_NUM_SERVERS"] == "2"
    for number, host in enumerate(hosts.names):
        assert f"{host} ({hosts.address[host]}, eth0) rank {number}, server {number}" in said
    # Its own name is 127.0.1.1 on each host, and yet gloo takes the interface that reaches the
    # other one.
    assert {one["GLOO_SOCKET_IFNAME"] for one in (first, second)} == {"eth0"}
    for host in hosts.names:
        assert f"allhands: rsync {folder}/ -> {host}:{target}" in said
        assert f"{host} ({hosts.address[host]}, eth0)" in said
    assert hosts.left(5) == []


# rare: the command above is one string, and words of their own are in the test below.
@pytest.mark.rare
def test_the_tutorials_command_as_words(hosts: Hosts) -> None:
    folder = shared_folder(hosts, "cifar10_dist")
    target = f"{DISK}/cifar10_dist"
    (folder / "train.py").write_text(PROBE.replace("sys.argv[1:]", "sys.argv[1:2]"))
    words = ["-n", "3", "-H", "hosts", "--sync-dst-dir", target, "--launcher", "ssh"]
    with Launch(hosts, folder, *words, "python", f"{target}/train.py", "a b") as job:
        code, said = job.end()
    assert code == 0, said
    told = job.told()
    assert [one["place"] for one in told] == ["d1 0", "d1 1", "d2 2"]
    assert [(one["argv"], one["sum"], one["LOCAL_RANK"], one["GROUP_RANK"]) for one in told] == [
        (["a b"], 6.0, "0", "0"),
        (["a b"], 6.0, "1", "0"),
        (["a b"], 6.0, "0", "1"),
    ]
    assert hosts.left(5) == []


def test_arguments_and_variables_arrive_unchanged_through_any_shell(hosts: Hosts) -> None:
    folder = shared_folder(hosts, "shells")
    (folder / "light.py").write_text(LIGHT)
    secret = "s3cr3t 'a' \"b\" $c \\ !d `e`"
    words = [
        "-n",
        "2",
        "-H",
        "hosts",
        "--no-preload",
        "--env",
        "TEST_SECRET",
        "--env",
        "TEST_ODD=x=1 'y'",
        "light.py",
        *ODD,
    ]
    tried = 0
    for shell in ("/bin/bash", "/bin/dash", "/usr/bin/fish", "/usr/bin/tcsh"):
        if not Path(shell).exists():
            continue
        for host in hosts.names:
            hosts.set_shell(host, shell)
        with Launch(hosts, folder, *words, extra={"TEST_SECRET": secret}) as job:
            code, said = job.end()
        assert code == 0, (shell, said)
        told = job.told()
        assert [one["place"] for one in told] == ["d1 0", "d2 1"], (shell, said)
        assert [one["argv"] for one in told] == [ODD, ODD], shell
        assert [one["values"] for one in told] == [
            {"TEST_SECRET": secret, "TEST_ODD": "x=1 'y'"}
        ] * 2, shell
        tried += 1
    assert tried >= 2


def test_secrets_are_in_no_command_line_and_one_connection_a_host_is_made(hosts: Hosts) -> None:
    folder = shared_folder(hosts, "secrets")
    (folder / "light.py").write_text(LIGHT)
    words = [
        "-n",
        "4",
        "-H",
        "hosts",
        "--no-preload",
        "--sync-dst-dir",
        f"{DISK}/secrets",
        "--env",
        "TEST_SECRET",
        "--env",
        "TEST_SLEEP",
    ]
    with Launch(
        hosts, folder, *words, "light.py", extra={"TEST_SECRET": "hunter2", "TEST_SLEEP": "60"}
    ) as job:
        job.until('"argv"', times=4)
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found.append(entry.read_bytes())
        # This process tree holds the hosts' processes as well.
        assert sum(b"light.py" in line for line in found) >= 1
        assert not any(b"hunter2" in line for line in found)
        for host in hosts.names:
            sessions = [line for line in hosts.processes(host) if "sshd: root@" in line]
            assert len(sessions) == 1, sessions
    assert hosts.left(5) == []


def test_what_a_login_prints_is_no_trouble(hosts: Hosts) -> None:
    folder = shared_folder(hosts, "noise")
    (folder / "light.py").write_text(LIGHT)
    shell = folder / "noisy-shell"
    shell.write_text('#!/bin/sh\necho "Welcome to d2"\necho "a {json} line"\nexec /bin/bash "$@"\n')
    shell.chmod(0o755)
    hosts.set_shell("d2", str(shell))
    (folder / "slots").write_text(f"root@d1:22 slots=1\n{hosts.address['d2']} slots=2\n")
    with Launch(hosts, folder, "-n", "3", "-H", "slots", "--no-preload", "light.py", "x") as job:
        code, said = job.end()
    assert code == 0, said
    assert {one["place"] for one in job.told()} == {
        "d1 0",
        f"{hosts.address['d2']} 1",
        f"{hosts.address['d2']} 2",
    }
    assert "Welcome" not in job.out.read_text()


def test_without_n_each_host_gets_its_slots(hosts: Hosts) -> None:
    folder = shared_folder(hosts, "slots")
    (folder / "light.py").write_text(LIGHT)
    (folder / "slots").write_text("d1 slots=2\nd2 slots=1\n")
    with Launch(
        hosts, folder, "-H", "slots", "--no-preload", "--log-dir", "out", "-s", "1", "light.py"
    ) as job:
        code, said = job.end()
    assert code == 0, said
    assert [one["place"] for one in job.told()] == ["d1 0", "d1 1", "d2 2"]
    assert json.loads((folder / "out" / "rank-2.log").read_text())["argv"] == []
