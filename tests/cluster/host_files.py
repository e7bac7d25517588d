"""The files of hosts, and those of an ssh client that reaches them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.cluster.machine import SYSTEM_PATH

# Set by the Makefile and tests/conftest.py.
OF_THE_TESTS = ("ALLHANDS_TEST_RUN", "OMP_WAIT_POLICY")

# The first process of a host; it ends as its sshd, which also reaps orphans. A folder with code
# under /tmp stays visible. /sys is mounted again, or /sys/class/net lists the driver's interfaces;
# that hides the cgroups, which slurmd wants to see.
INIT = r"""
set -e
hostname "$HOST_NAME"
for file in hosts passwd shadow; do mount --bind "$HOST_FOLDER/$file" "/etc/$file"; done
[ ! -f /root/.bashrc ] || mount --bind "$HOST_FOLDER/bashrc" /root/.bashrc
n=0; for path in $HOST_KEEP; do n=$((n+1)); mount --rbind "$path" "$HOST_FOLDER/keep$n"; done
mount -t tmpfs -o mode=1777 tmpfs /tmp
n=0
for path in $HOST_KEEP; do
  n=$((n+1)); mkdir -p "$path"; mount --rbind "$HOST_FOLDER/keep$n" "$path"
done
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs tmpfs /srv
mkdir -p "$HOST_DISK"
mount --bind "$HOST_FOLDER/disk" "$HOST_DISK"
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup "$HOST_FOLDER/cgroup"; fi
mount -t sysfs sysfs /sys
if [ -d /sys/fs/cgroup ]; then mount --rbind "$HOST_FOLDER/cgroup" /sys/fs/cgroup; fi
ip link set lo up
read -r eth0_is_there
ip addr add "$HOST_ADDRESS/24" dev eth0
ip link set eth0 up
exec /usr/sbin/sshd -D -e -f "$HOST_FOLDER/sshd_config" </dev/null
"""

SSHD = """ListenAddress {address}
Port 22
Port 2222
HostKey {folder}/host_key
AuthorizedKeysFile {root}/id.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin prohibit-password
KexAlgorithms curve25519-sha256
PidFile none
PrintMotd no
UseDNS no
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
SetEnv {environment}
"""


def variables_of_tests() -> dict[str, str]:
    """The variables of the tests that hold on the hosts too."""
    return {key: os.environ[key] for key in OF_THE_TESTS if key in os.environ}


def folders_of_code() -> list[str]:
    """Folders with code that lie under /tmp, which each host has its own of."""
    folders = {Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix)}
    return sorted(str(path) for path in folders if path.is_relative_to("/tmp"))


def make_keys(paths: Iterable[Path]) -> None:
    """Make a pair of ssh keys at each path.

    Raises:
        RuntimeError: ssh-keygen failed.
    """
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f"]
    made = [subprocess.Popen([*words, str(path)]) for path in paths]
    if any(process.wait() for process in made):
        raise RuntimeError("ssh-keygen failed")


def users(shell: str | None) -> str:
    """The text of /etc/passwd with this login shell for root; None is bash."""
    return re.sub(
        r"^(root:.*:)[^:]*$",
        rf"\g<1>{shell or '/bin/bash'}",
        Path("/etc/passwd").read_text(),
        flags=re.MULTILINE,
    )


def write_host(folder: Path, addresses: Mapping[str, str], path: str) -> None:
    """Make the folder of the host that is named after it, with its files.

    Args:
        addresses: of all hosts and of the driver, by name.
        path: PATH of what ssh starts on it.
    """
    name, address = folder.name, addresses[folder.name]
    places = [f"keep{place + 1}" for place in range(len(folders_of_code()))]
    for inner in ("disk", "cgroup", *places):
        (folder / inner).mkdir(parents=True)
    # Own name: Debian's trap. The ::ffff: lines are for c10d, which looks up the name of every
    # peer.
    others = [f"{a} {n}\n::ffff:{a} {n}\n" for n, a in addresses.items() if n != name]
    own = f"127.0.0.1 localhost\n127.0.1.1 {name}\n" + "".join(
        f"{v6}{address} {name}.lan\n" for v6 in ("", "::ffff:")
    )
    (folder / "hosts").write_text(own + "".join(others))
    (folder / "bashrc").touch()  # the driver's costs time at every connection
    (folder / "passwd").write_text(users(None))
    # Not a locked account, which sshd refuses.
    (folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    (folder / "shadow").chmod(0o600)
    kept = [f"{key}={value}" for key, value in variables_of_tests().items()]
    environment = " ".join(f'"{setting}"' for setting in (f"PATH={path}", *kept))
    text = SSHD.format(address=address, folder=folder, root=folder.parent, environment=environment)
    (folder / "sshd_config").write_text(text)


def write_client(root: Path, addresses: Mapping[str, str]) -> None:
    """Write the configuration of an ssh client that knows the hosts, and programs that read it.

    No BatchMode, timeouts or StrictHostKeyChecking: a launcher has to bring its own, as with a
    user's plain configuration.
    """
    each = "".join(
        f"Host {name}\n  HostName {address}\n  HostKeyAlias {name}\n"
        for name, address in addresses.items()
    )
    (root / "config").write_text(
        f"{each}Host *\n  User root\n  IdentityFile {root}/id\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {root}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
    )
    (root / "bin").mkdir()
    # OpenSSH does not look at $HOME: only -F makes it read this configuration.
    for tool in ("ssh", "scp", "sftp"):
        script = root / "bin" / tool
        command = shutil.which(tool, path=SYSTEM_PATH)
        script.write_text(f'#!/bin/sh\nexec {command} -F {root}/config "$@"\n')
        script.chmod(0o755)
