"""Real hosts on one machine, from Linux namespaces: what a launcher meets on a cluster, without the
cluster.

Each host has its own network interface, name, process table, /tmp, /dev/shm, private disk, login
shell and sshd with a host key of its own. /run, the home folder and the Python environment are the
driver's, as on a cluster with a shared file system.

    with Hosts(("d1", "d2"), label="try") as hosts:
        hosts.ssh("d1", "hostname")
        hosts.poweroff("d2")

From the shell: `python -m tests.cluster.hosts up`, `status`, `down`. README.md says what is needed
and what each harm does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.host_files import users
from tests.cluster.machine import ROOT, call, claims, why_not
from tests.cluster.namespaces import DISK, Namespaces, sweep

__all__ = ["DISK", "Hosts", "why_not"]


class Hosts(Namespaces):
    """Hosts that exist while the context is open. Several may be open at once, in one process or in
    many.

    They die with the thread that opened them, however it ends.

    Args:
        names: The hosts' names.
        label: Names the folder under /run; unique among all that are open on this machine.
        subnet: The first three numbers of their addresses, such as "10.77.0". Default: one that is
            free.
        persist: Do not die with this process; for starting a cluster by hand.
    """

    def __init__(
        self,
        names: Sequence[str] = ("d1", "d2"),
        *,
        label: str,
        subnet: str | None = None,
        persist: bool = False,
    ) -> None:
        super().__init__(names, label=label, subnet=subnet, persist=persist)
        self._undo: dict[tuple[str, str], Callable[[], None]] = {}  # by host and harm
        self._hidden: dict[str, set[str]] = {name: set() for name in names}
        self._forgotten: set[str] = set()

    def _end(self, host: str) -> None:
        super()._end(host)
        self._hidden[host].clear()
        for key in [
            key for key in self._undo if key[0] == host and key[1] not in {"shell", "host key"}
        ]:
            del self._undo[key]  # what is mounted, and the wire, end with the host

    def cut(self, host: str) -> None:
        """Pull the plug of a host's network. It goes on alone."""
        call("ip", "link", "set", self._veth(host), "down")
        self._undo[host, "link"] = lambda: self.heal(host)

    def heal(self, host: str) -> None:
        """Undo cut."""
        call("ip", "link", "set", self._veth(host), "up")
        # Or an address that did not answer is not asked again for a while.
        call("ip", "neigh", "flush", "dev", self.bridge)
        for name in self._init:
            self.run(name, "ip", "neigh", "flush", "dev", "eth0")
        self._undo.pop((host, "link"), None)

    def kill(self, host: str) -> None:
        """Crash a host: all its processes end at once. The kernel still closes their connections,
        so that peers notice."""
        self._end(host)
        call("ip", "link", "del", self._veth(host), check=False)  # the kernel would take its time

    def poweroff(self, host: str) -> None:
        """Switch a host off: its peers hear nothing more, no end of a connection either."""
        self.cut(host)
        self.kill(host)

    def boot(self, host: str) -> None:
        """Start a host that is down. Its disk is as it was; /tmp and /dev/shm are empty."""
        self._start([host])
        self._save()

    def set_shell(self, host: str, shell: str | None) -> None:
        """Change root's login shell on this host, such as to /usr/bin/fish; None is bash again."""
        if shell is not None and not os.access(shell, os.X_OK):
            raise RuntimeError(f"there is no program {shell}")
        (self.folder / host / "passwd").write_text(users(shell))
        self._undo[host, "shell"] = lambda: self.set_shell(host, None)
        if shell is None:
            del self._undo[host, "shell"]

    def forget_host_key(self, host: str) -> None:
        """Make a host's key unknown to the driver and to the other hosts."""
        self._forgotten.add(host)
        self.write_known_hosts([name for name in self.names if name not in self._forgotten])
        self._undo[host, "host key"] = lambda: self.restore_host_key(host)

    def change_host_key(self, host: str) -> None:
        """Give a host another key than the others know, as an impostor's."""
        key, first, new = (
            self.folder / host / name for name in ("host_key", "first_key", "new_key")
        )
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", new)
        if not first.exists():
            key.rename(first)
        new.rename(key)
        new.with_suffix(".pub").rename(key.with_suffix(".pub"))
        self._reload(host)
        self._undo[host, "host key"] = lambda: self.restore_host_key(host)

    def restore_host_key(self, host: str) -> None:
        """Undo forget_host_key and change_host_key."""
        key, first = (self.folder / host / name for name in ("host_key", "first_key"))
        if first.exists():
            key.with_suffix(".pub").unlink()  # or sshd complains that it does not belong to the key
            first.rename(key)
            if self.is_up(host):
                self._reload(host)
        self._forgotten.discard(host)
        self.write_known_hosts([name for name in self.names if name not in self._forgotten])
        self._undo.pop((host, "host key"), None)

    def _reload(self, host: str) -> None:
        heard = self._listening(host)
        os.kill(self._init[host], signal.SIGHUP)  # sshd reads its files again
        self._until_up(host, lambda: self._listens_again(host, heard))

    def hide_program(self, host: str, program: str) -> None:
        """Make a program not exist on a host, wherever it lies in its PATH."""
        self._hide(host, self._hidden[host] | {program})

    def unhide(self, host: str, program: str) -> None:
        """Undo hide_program."""
        self._hide(host, self._hidden[host] - {program})

    def _hide(self, host: str, programs: set[str]) -> None:
        def folders(names: set[str]) -> dict[Path, list[str]]:
            found: dict[Path, list[str]] = {}
            for name in sorted(names):
                places = {
                    Path(part).resolve()
                    for part in self.path.split(":")
                    if (Path(part) / name).exists()
                }
                if not places:
                    raise RuntimeError(f"there is no program {name} in {self.path}")
                for place in places:
                    found.setdefault(place, []).append(name)
            return found

        lines = [f"umount -l '{place}'" for place in folders(self._hidden[host])]
        for number, (place, names) in enumerate(folders(programs).items()):
            # An overlay with a "whiteout", a character device 0/0, is the kernel's way to say that
            # a name is not there.
            top = f"{self.folder / host}/without{number}"
            lines += [
                f"mkdir -p '{top}'",
                f"mount -t tmpfs tmpfs '{top}'",
                *(f"mknod '{top}/{name}' c 0 0" for name in names),
            ]
            lines += [
                f"mount -t overlay overlay -o 'lowerdir={top}:{place}' '{place}'",
                f"umount -l '{top}'",
            ]
        self.run(host, "sh", "-ec", "\n".join(lines))
        self._hidden[host] = programs
        self._undo.pop((host, "programs"), None)
        if programs:
            self._undo[host, "programs"] = lambda: self._hide(host, set())

    def small_disk(self, host: str, path: str, size: str) -> None:
        """Put an empty file system of this size, such as "4m", over a folder of a host."""
        if (host, f"disk {path}") in self._undo:
            raise RuntimeError(f"{path} on {host} is a small disk already")
        self.run(
            host, "sh", "-ec", f"mkdir -p '{path}'; mount -t tmpfs -o size={size} tmpfs '{path}'"
        )
        self._undo[host, f"disk {path}"] = lambda: self.restore_disk(host, path)

    def restore_disk(self, host: str, path: str) -> None:
        """Undo small_disk."""
        self.run(host, "umount", "-l", path)
        del self._undo[host, f"disk {path}"]

    def clear_disk(self, host: str) -> None:
        """Empty a host's private disk."""
        disk = self.folder / host / "disk"
        for entry in disk.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def mend(self) -> None:
        """Undo all harm: hosts that are down come up again, processes that are left are killed.
        Disks keep what is on them."""
        for name in self.names:
            if not self.is_up(name):
                if name in self._init:
                    self.kill(name)  # it ended by itself
                self.boot(name)
        for undo in list(self._undo.values()):
            undo()
        for process in self.left(0):
            host, pid, *_ = process.replace(":", "").split()
            self.run(host, "kill", "-KILL", pid, check=False)


def down(label: str) -> int:
    """End what another process has started; the exit code."""
    if not (ROOT / label).is_dir():
        print(f"no cluster with the label {label!r} is up", file=sys.stderr)
        return 1
    Hosts.load(label).remove()
    return 0


def main() -> int:
    """The command line: start, list or end hosts by hand."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.hosts", description=main.__doc__)
    parser.add_argument("verb", choices=["up", "down", "status"])
    parser.add_argument("--label", default="by-hand", help="which of several")
    parser.add_argument("--names", default="d1,d2", help="the hosts' names, for up")
    given = parser.parse_args()
    if given.verb == "up":
        if reason := why_not():
            print(reason, file=sys.stderr)
            return 1
        hosts = Hosts(given.names.split(","), label=given.label, persist=True).__enter__()
        print(f"export PATH={hosts.folder}/bin:$PATH  # then: ssh {hosts.names[0]}")
    elif given.verb == "down":
        return down(given.label)
    else:
        with claims():
            sweep()
        for state in sorted(ROOT.glob("*/state.json")):
            hosts = Hosts.load(state.parent.name)
            for name in hosts.names:
                print(
                    f"{hosts.label} {name} {hosts.address[name]} "
                    f"{'up' if hosts.is_up(name) else 'down'}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
