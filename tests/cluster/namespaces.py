"""How hosts are made from Linux namespaces, and how one runs something on them. What tests use is
hosts.py."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from tests.cluster import host_files
from tests.cluster.machine import (
    FOREIGN,
    ROOT,
    SYSTEM_PATH,
    UNSHARE,
    call,
    claims,
    start_time,
    until,
)
from tests.patience import patience

DISK = "/srv/allhands"  # the private disk, at the same path on every host


def sweep() -> None:
    """Clear what crashed sessions left. The caller holds the lock; clusters whose owner lives, or
    that have none, stay."""
    for folder in ROOT.iterdir():
        state = folder / "state.json"
        if folder.is_dir() and not state.exists():
            shutil.rmtree(folder)
        elif folder.is_dir():
            owner = json.loads(state.read_text())["owner"]
            if owner and start_time(owner[0]) != owner[1]:
                Namespaces.load(folder.name).clear()


class Namespaces:
    """Hosts that exist while the context is open; see hosts.py.

    Args:
        names: The hosts' names.
        label: Names the folder under /run; unique among all that are open on this machine.
        subnet: The first three numbers of their addresses, such as "10.77.0". Default: one that is
            free.
        persist: Do not die with this process; for starting a cluster by hand.

    Attributes:
        names: The hosts' names.
        address: Each host's address.
        folder: Holds keys, logs and disks; seen by the driver and by all hosts.
        driver_address: This process's address on the hosts' network.
        number: A small number that no other open cluster on this machine has.
        bridge: The driver's interface to the hosts.
    """

    def __init__(
        self,
        names: Sequence[str] = ("d1", "d2"),
        *,
        label: str,
        subnet: str | None = None,
        persist: bool = False,
    ) -> None:
        self.names, self.label, self.persist = list(names), label, persist
        self.folder = ROOT / label
        self.daemons: dict[str, set[int]] = {
            name: set() for name in names
        }  # pids of the fixture's own daemons, such as slurmd
        self._init: dict[str, int] = {}  # the first process of each host that is up
        self._born: dict[str, str] = {}  # and when that began
        self._unshare: dict[str, subprocess.Popen[bytes]] = {}
        self._helpers: list[subprocess.Popen[Any]] = []
        self._subnet = subnet
        # Of a command on a host. `forked_python` changes where Python is.
        self.path = f"{self.folder}/bin:{Path(sys.executable).parent}:{SYSTEM_PATH}"

    def _number_is(self, number: int, subnet: str) -> None:
        self.number, self.bridge, self._subnet = number, f"ah{number}", subnet
        self.driver_address = f"{subnet}.1"
        self.address = {name: f"{subnet}.{11 + place}" for place, name in enumerate(self.names)}

    # Life

    def __enter__(self) -> Self:
        try:
            self._claim()
            self._write_files()
            self._start(self.names)
            self._save()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _claim(self) -> None:
        """Take the label, a number and a subnet; the bridge's existence is the claim to the last
        two."""
        with claims():
            sweep()
            if self.folder.exists():
                raise RuntimeError(
                    f"a cluster with the label {self.label!r} is up already ({self.folder})"
                )
            questions = ("-o", "-4", "addr"), ("-4", "route"), ("-o", "link")
            taken = "".join(call("ip", *words) for words in questions)
            for number in range(250):
                subnet = self._subnet or f"10.213.{number}"
                if f" {subnet}." not in taken and f" ah{number}:" not in taken:
                    break
            else:
                raise RuntimeError(
                    f"no free subnet: {self._subnet or '10.213.0 to 10.213.249'} is taken:\n{taken}"
                )
            self._number_is(number, subnet)
            self.folder.mkdir(mode=0o755)
            self._save()
            batch = (
                f"link add {self.bridge} type bridge\naddr add {subnet}.1/24 dev "
                f"{self.bridge}\nlink set {self.bridge} up\n"
            )
            call("ip", "-batch", "-", stdin=batch)

    def _save(self) -> None:
        owner = None if self.persist else (os.getpid(), start_time(os.getpid()))
        said = {
            "names": self.names,
            "number": self.number,
            "subnet": self._subnet,
            "owner": owner,
            "init": self._init,
            "born": self._born,
        }
        (self.folder / "state.json").write_text(json.dumps(said))

    @classmethod
    def load(cls, label: str) -> Self:
        """The cluster with this label, that another process has started."""
        said = json.loads((ROOT / label / "state.json").read_text())
        hosts = cls(said["names"], label=label, persist=True)
        hosts._number_is(said["number"], said["subnet"])
        hosts._init, hosts._born = said["init"], said["born"]
        return hosts

    def _write_files(self) -> None:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it
        addresses = {**self.address, "driver": self.driver_address}
        for name in self.names:
            host_files.write_host(self.folder / name, addresses, self.path)
        keys = [self.folder / name / "host_key" for name in self.names]
        host_files.make_keys([self.folder / "id", *keys])
        keys_of = {name: (self.folder / name / "host_key.pub").read_text() for name in self.names}
        self._known = {name: f"{name},{self.address[name]} {key}" for name, key in keys_of.items()}
        self.write_known_hosts(self.names)
        host_files.write_client(self.folder, self.address)

    def write_known_hosts(self, names: Sequence[str]) -> None:
        """Let the driver and the hosts know the keys of these hosts only."""
        (self.folder / "known_hosts").write_text("".join(self._known[name] for name in names))

    def _start(self, names: Sequence[str]) -> None:
        """Start hosts that are down: namespaces, then the wires into them, then their sshd."""
        heard = {name: self._listening(name) for name in names}
        for name in names:
            self._unshare[name] = self._namespaces(name)
        wires = ""
        for name in names:
            children = Path(
                f"/proc/{self._unshare[name].pid}/task/{self._unshare[name].pid}/children"
            )
            self._until_up(name, children.read_text)
            self._init[name] = int(children.read_text())
            self._born[name] = start_time(self._init[name]) or ""
            # The hardware address stays the same after a reboot, or others' tables would be wrong
            # for seconds.
            mac = "02:61:68" + "".join(
                f":{int(part):02x}" for part in self.address[name].split(".")[1:]
            )
            wires += (
                f"link add {self._veth(name)} type veth peer name eth0 address {mac} netns "
                f"{self._init[name]}\n"
            )
            wires += f"link set {self._veth(name)} master {self.bridge} up\n"
        call("ip", "-batch", "-", stdin=wires)
        for name in names:
            pipe = self._unshare[name].stdin
            assert pipe is not None
            pipe.write(b"go\n")
            pipe.close()
        for name in names:
            self._until_up(name, functools.partial(self._listens_again, name, heard[name]))

    def _namespaces(self, name: str) -> subprocess.Popen[bytes]:
        environment = {
            **host_files.variables_of_tests(),
            "PATH": SYSTEM_PATH,
            "HOST_NAME": name,
            "HOST_FOLDER": str(self.folder / name),
            "HOST_ADDRESS": self.address[name],
            "HOST_DISK": DISK,
            "HOST_KEEP": " ".join(host_files.folders_of_code()),
        }
        leash = [] if self.persist else ["setpriv", "--pdeathsig", "KILL"]
        with (self.folder / name / "log").open("ab") as log:
            return subprocess.Popen(
                [*leash, *UNSHARE, "sh", "-c", host_files.INIT],
                env=environment,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the test, which then takes the hosts down
            )

    def _listening(self, name: str) -> int:
        """How often the host's sshd has begun to listen."""
        log = self.folder / name / "log"
        return log.read_text().count("port 2222.\n") if log.exists() else 0

    def _listens_again(self, name: str, heard: int) -> bool:
        return self._listening(name) > heard

    def _until_up(self, name: str, true: Callable[[], Any]) -> None:
        def complaint() -> str:
            return f"the host {name} did not start: {(self.folder / name / 'log').read_text()}"

        process = self._unshare[name]
        until(lambda: process.poll() is not None or true(), 10, complaint)
        if process.poll() is not None:
            raise RuntimeError(complaint())

    def _veth(self, host: str) -> str:
        return f"{self.bridge}-{self.names.index(host)}"

    def remove(self) -> None:
        """End the hosts and take away all that belongs to them."""
        with claims():
            self.clear()

    def clear(self) -> None:
        """The same for a caller that holds the lock."""
        for name in list(self._init):
            self._end(name)
        for process in (
            *self._unshare.values(),
            *self._helpers,
        ):  # the first are of a start that failed half-way
            process.kill()
            process.wait()
        # Another process has started them.
        if (listed := self.folder / "helpers").exists() and not self._helpers:
            for pid, born in (line.split() for line in listed.read_text().splitlines()):
                if start_time(int(pid)) == born:
                    os.kill(int(pid), signal.SIGKILL)
        if hasattr(self, "number"):
            for link in (*(self._veth(name) for name in self.names), self.bridge):
                call("ip", "link", "del", link, check=False)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, host: str) -> None:
        """Kill a host's first process, and with it all others; back when they are gone."""
        pid = self._init.pop(host)
        # Otherwise it has ended, and the number may be another's.
        if start_time(pid) == self._born.pop(host):
            os.kill(pid, signal.SIGKILL)
        if process := self._unshare.pop(host, None):
            process.wait()
        until(
            lambda: not os.path.exists(f"/proc/{pid}/ns/net"),
            10,
            lambda: f"the host {host} does not end",
        )
        self.daemons[host].clear()

    def helper(self, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a daemon of the cluster beside the driver, not on a host. It ends with the
        cluster."""
        leash = [] if self.persist else ["setpriv", "--pdeathsig", "KILL"]
        process = subprocess.Popen(
            [*leash, *argv], stdin=subprocess.DEVNULL, start_new_session=True, **options
        )
        self._helpers.append(process)
        with (self.folder / "helpers").open("a") as listed:
            listed.write(f"{process.pid} {start_time(process.pid)}\n")
        return process

    # Use

    def environ(self, **extra: str) -> dict[str, str]:
        """The environment of a driver process in which plain `ssh d1`, rsync and scp work, and
        `python` is this Python."""
        own = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        return {
            **own,
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:"
            f"{os.environ.get('PATH', SYSTEM_PATH)}",
            **extra,
        }

    def enter(self, host: str, *argv: str) -> list[str]:
        """The command that runs another one on a host without ssh, as root, in the folder /."""
        return [
            "nsenter",
            "-t",
            str(self._init[host]),
            "-n",
            "-u",
            "-i",
            "-p",
            "-m",
            "--wd=/",
            *argv,
        ]

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host without ssh. It is killed when the returned process ends, and
        when the host does."""
        options.setdefault("env", self.environ(PATH=self.path))
        return subprocess.Popen(
            self.enter(host, "setpriv", "--pdeathsig", "KILL", *argv), **options
        )

    def run(self, host: str, *argv: str, check: bool = True) -> str:
        """Run a program on a host without ssh; its combined output. With check, a failure is a
        RuntimeError."""
        return call(*self.enter(host, "env", f"PATH={self.path}", *argv), check=check)

    def ssh(self, host: str, command: str) -> subprocess.CompletedProcess[str]:
        """Run a shell's line on a host, by ssh, without a question."""
        argv = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host, command]
        return subprocess.run(
            argv, env=self.environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    def hosts_file(self) -> Path:
        """A file with one host's name a line."""
        file = self.folder / "hosts.txt"
        file.write_text("".join(f"{name}\n" for name in self.names))
        return file

    def is_up(self, host: str) -> bool:
        """Whether the host runs."""
        return host in self._init and os.path.exists(f"/proc/{self._init[host]}/ns/net")

    def processes(self, host: str) -> list[str]:
        """What runs on a host: "pid command line", with the host's own pid. Without the first
        process, which is the sshd that listens, daemons of the fixture, and the dead that nobody
        has asked after. An open ssh connection counts; a host that is down runs nothing."""
        if not self.is_up(host):
            return []
        skip = {self._init[host], *self.daemons[host]}
        namespace = os.readlink(f"/proc/{self._init[host]}/ns/pid")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if int(folder.name) in skip or os.readlink(folder / "ns/pid") != namespace:
                    continue
                said = dict(
                    line.split(":\t", 1)
                    for line in (folder / "status").read_text().splitlines()
                    if ":\t" in line
                )
                command = (
                    (folder / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
            except OSError:
                continue  # it has ended meanwhile
            if said["State"][0] not in "ZX":
                found.append(f"{said['NSpid'].split()[-1]} {command or said['Name']}")
        return found

    def left(self, seconds: float = 5.0) -> list[str]:
        """What still runs on any host after so many seconds, as "host: pid command line"; back at
        once when nothing does."""
        deadline = time.monotonic() + patience(seconds)
        while found := [
            f"{name}: {process}" for name in self.names for process in self.processes(name)
        ]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return found
