"""The program that looks at one host: it answers questions, one JSON object a line, over its
standard streams.

It is sent as text, with the modules that it uses, and never written to a disk there. So a host
without allhands can be examined too. All of them need the standard library only. It ends with its
standard input, and then takes away whatever it made: its listener and its mark in the job's folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
from functools import partial
from typing import Any

from allhands.doctor.host_facts import (
    core_quota,
    file_system,
    locked_memory,
    memory,
    open_files,
    rsync_version,
    run,
    space,
    versions,
)
from allhands.doctor.probe_network import (
    CONNECT_S,
    RESOLVE_S,
    flood,
    interfaces,
    knock,
    open_listener,
    resolve,
    threads,
)
from allhands.wire import Acceptor
from allhands.world.cores import cores
from allhands.world.interface import reachable_addresses

# It cannot outlive a connection whose end nobody tells it, as after a power cut.
LIFE_S = 180
NVIDIA_SMI = {
    "gpus": "--query-gpu=index,uuid,name,driver_version,memory.total,memory.free,compute_mode,"
    "mig.mode.current "
    "--format=csv,noheader,nounits",
    "apps": "--query-compute-apps=gpu_uuid,pid,process_name,used_memory "
    "--format=csv,noheader,nounits",
    "topology": "topo -m",
    "peers": "topo -p2p r",
    "overview": "",
}


class HostProbe:
    """Answers the questions of one examination; each `on_…` method is one of them."""

    def __init__(self) -> None:
        self.listener: Acceptor | None = None
        self.marks: list[str] = []

    def close(self) -> None:
        """Take away what was made here."""
        if self.listener is not None:
            self.listener.close()
        for path in self.marks:
            with contextlib.suppress(OSError):
                os.unlink(path)

    # ------------------------------------------------------------------ this host

    def on_facts(self) -> dict[str, Any]:
        """What does not depend on other hosts."""
        smi = threads(
            {
                name: partial(run, ["nvidia-smi", *words.split()])
                for name, words in NVIDIA_SMI.items()
            },
            20,
        )
        return {
            "hostname": socket.gethostname(),
            "executable": sys.executable,
            "versions": versions(),
            "rsync": rsync_version(),
            "own_name": resolve(socket.gethostname()),
            "interfaces": interfaces(),
            "ssh_address": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2],
            "variables": {
                name: os.environ[name]
                for name in (
                    "GLOO_SOCKET_IFNAME",
                    "NCCL_SOCKET_IFNAME",
                    "OMP_NUM_THREADS",
                    "CUDA_VISIBLE_DEVICES",
                )
                if name in os.environ
            },
            "nvidia_smi": smi if smi["gpus"] is not None else None,
            "infiniband": sorted(os.listdir("/sys/class/infiniband"))
            if os.path.isdir("/sys/class/infiniband")
            else [],
            "shm": space("/dev/shm"),
            "open_files": open_files(),
            "memlock": locked_memory(),
            "cores": cores(),
            "core_quota": core_quota(),
            "memory": memory(),
        }

    def on_clock(self) -> float:
        """Seconds of this host's clock."""
        return time.time()

    def on_resolve(self, names: list[str]) -> dict[str, Any]:
        """The addresses of each name here."""
        return {name: resolve(name) for name in names}

    # ------------------------------------------------------------------ the network

    def on_listen(self, token: str) -> dict[str, Any]:
        """Open a listener on a port that the kernel picks; where the others find it."""
        self.listener, port = open_listener(token)
        return {"port": port, "addresses": reachable_addresses()}

    def on_connect(self, token: str, targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Connect to each target under each of its names; the first one in their order that answers
        is what a job would use.

        `targets` have `names` (addresses among them) and `port`.
        """
        jobs = {
            f"{index} {name}": partial(knock, name, target["port"], token)
            for index, target in enumerate(targets)
            for name in target["names"]
        }
        late = {"error": f"no answer within {RESOLVE_S + CONNECT_S:.0f} s"}
        told = threads(jobs, RESOLVE_S + CONNECT_S, late)
        answers = []
        for index, target in enumerate(targets):
            tried = [{"name": name, **told[f"{index} {name}"]} for name in target["names"]]
            good = next((one for one in tried if not one.get("error")), None)
            answers.append({"reached": good, "tried": tried})
        return answers

    def on_flood(self, address: str, port: int, token: str, seconds: float) -> dict[str, Any]:
        """See `flood`."""
        return flood(address, port, token, seconds)

    # ------------------------------------------------------------------ the job's folder

    def on_folder(self, path: str, will_be_made: bool, mark: str) -> dict[str, Any]:
        """Look at a folder and leave a mark in it; `will_be_made`: where it is missing, at the
        folder that it will be made in."""
        path = os.path.abspath(os.path.expanduser(path))
        found: dict[str, Any] = {"path": path, "exists": os.path.lexists(path), "error": None}
        while will_be_made and not os.path.lexists(path):
            path = os.path.dirname(path)
        found.update(used=path, is_folder=os.path.isdir(path))
        if found["is_folder"]:
            found.update(space(path), type=file_system(path))
            file = os.path.join(path, mark)
            try:
                with open(
                    os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
                ) as handle:
                    self.marks.append(file)
                    handle.write(bytes(4096))
                    handle.flush()
                    os.fsync(handle.fileno())
            except OSError as error:
                found["error"] = error.strerror
                found["full"] = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return found

    def on_look(self, path: str, marks: list[str]) -> list[str]:
        """Which of the marks are in a folder. Each is asked for by its name: a listing may be an
        old one on a network disk."""
        return [mark for mark in marks if os.path.lexists(os.path.join(path, mark))]


def main() -> None:
    """Answer until standard input ends. What others print on standard output goes to standard
    error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit())  # through `finally` below
    signal.alarm(LIFE_S)
    probe = HostProbe()
    rest = b""
    try:
        while data := os.read(0, 65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                question = json.loads(line)
                try:
                    answer = {"answer": getattr(probe, f"on_{question.pop('op')}")(**question)}
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                view = memoryview(json.dumps(answer).encode() + b"\n")
                while view:
                    view = view[os.write(answers, view) :]
    except BrokenPipeError:
        pass  # nobody asks any more
    finally:
        probe.close()
        os._exit(0)  # threads that still wait for a name server are left
