"""The program that looks at one host: it answers questions, one JSON object a line, over its
standard streams.

It is sent as text and never written to a disk there, so a host without allhands can be examined
too. It needs the standard library only; what allhands itself would choose (addresses, interfaces)
it asks the host's allhands, where there is one. It ends with its standard input, and then takes
away whatever it made: its listener and its mark in the job's folder.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

CONNECT_S = 3.0
RESOLVE_S = 5.0
# It cannot outlive a connection whose end nobody tells it, as after a power cut.
LIFE_S = 180
CHUNK = 1 << 18
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
        self.listener: socket.socket | None = None
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
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
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
            "open_files": [_limit(soft), _limit(hard)],
            "memlock": _limit(locked),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1,
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
        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listener.bind(("", 0))
        self.listener.listen(256)
        threading.Thread(
            target=self._accept, args=(self.listener, token.encode()), daemon=True
        ).start()
        return {"port": self.listener.getsockname()[1], "addresses": addresses()}

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        while True:
            try:
                peer = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=_serve, args=(peer, token), daemon=True).start()

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

    def on_flood(self, address: str, port: int, token: str, seconds: float) -> dict[str, float]:
        """Send to a listener for so long; the bytes that it got, and the seconds between its first
        and its last."""
        chunk = bytes(CHUNK)
        with socket.create_connection((address, port), CONNECT_S) as link:
            link.sendall(token.encode() + b"f")
            link.settimeout(10)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                link.sendall(chunk)
            link.shutdown(socket.SHUT_WR)
            return dict(json.loads(b"".join(iter(lambda: link.recv(4096), b""))))

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


def threads(
    jobs: Mapping[str, Callable[[], Any]], timeout: float, late: Any = None
) -> dict[str, Any]:
    """What each of the functions returns, all at the same time; `late` for those that take longer
    than `timeout` seconds."""
    answers: dict[str, Any] = dict.fromkeys(jobs, late)

    def work(name: str) -> None:
        answers[name] = jobs[name]()

    running = [threading.Thread(target=work, args=(name,), daemon=True) for name in jobs]
    for thread in running:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


# ---------------------------------------------------------------------- the network


def resolve(name: str) -> dict[str, Any]:
    """`addresses` of a name, or the `error`; asking a name server that is away is given up after
    some seconds."""

    def ask() -> dict[str, Any]:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            return {"addresses": [], "error": error.strerror or str(error)}
        # An IPv4 address in IPv6's clothes.
        plain = (str(one[4][0]).removeprefix("::ffff:") for one in found)
        return {"addresses": list(dict.fromkeys(plain)), "error": None}

    return threads(
        {"": ask}, RESOLVE_S, {"addresses": [], "error": f"no answer within {RESOLVE_S:.0f} s"}
    )[""]


def addresses() -> list[str]:
    """Where other hosts may reach this one, in the order in which a job tries them."""
    try:
        from allhands.launch.reach import reachable_addresses
    except ImportError:
        return os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return reachable_addresses()


def own_addresses() -> dict[str, str]:
    """Each address of this host, and its interface."""
    try:
        from allhands.world.interface import own_addresses as own
    except ImportError:
        return {}
    return own()


def interfaces() -> list[dict[str, Any]]:
    """The interfaces that have an address and are not the loopback: speed in Mbit/s, None where the
    system does not know."""
    found: dict[str, dict[str, Any]] = {}
    for address, name in own_addresses().items():
        folder = Path("/sys/class/net", name)
        if name == "lo" or address.startswith("fe80"):
            continue
        # The speed that a virtual one claims is no speed at which anything was ever measured.
        virtual = not (folder / "device").exists()
        speed = None if virtual else _number(folder / "speed")
        speed = speed if speed and speed > 0 else None
        entry = {
            "name": name,
            "addresses": list[str](),
            "speed": speed,
            "virtual": virtual,
            "mtu": _number(folder / "mtu"),
        }
        found.setdefault(name, entry)["addresses"].append(address)
    return list(found.values())


def knock(name: str, port: int, token: str) -> dict[str, Any]:
    """Whether a listener of the examination answers under this name."""
    resolved = resolve(name)
    if resolved["error"]:
        return {"error": f"the name is not known ({resolved['error']})"}
    mine = own_addresses()
    answer: dict[str, Any] = {}
    for address in resolved["addresses"]:
        if address.startswith("127.") or address in ("::1", *mine):
            answer = {"address": address, "error": "that is this host itself"}
            continue
        try:
            with socket.create_connection((address, port), CONNECT_S) as link:
                link.sendall(token.encode() + b"k")
                good = link.recv(1) == b"+"
                own = str(link.getsockname()[0])
        except TimeoutError:
            answer = {"address": address, "error": "timed out"}
        except OSError as error:
            answer = {"address": address, "error": error.strerror or str(error)}
        else:
            if good:
                return {"address": address, "own": own, "interface": mine.get(own), "error": None}
            answer = {"address": address, "error": "something else answers there"}
    return answer


def _serve(peer: socket.socket, token: bytes) -> None:
    """The other end of `knock` and of a flood."""
    with peer, contextlib.suppress(OSError):
        peer.settimeout(15)
        said = b""
        while len(said) <= len(token):
            piece = peer.recv(len(token) + 1 - len(said))
            if not piece:
                return
            said += piece
        if said[:-1] != token:
            return
        if said[-1:] == b"k":
            peer.sendall(b"+")
            return
        buffer, got, first = bytearray(CHUNK), 0, time.monotonic()
        while count := peer.recv_into(buffer):
            first = first if got else time.monotonic()
            got += count
        peer.sendall(json.dumps({"bytes": got, "seconds": time.monotonic() - first}).encode())


# ---------------------------------------------------------------------- programs and libraries


def versions() -> dict[str, str | None]:
    """Of Python, of the packages that must be equal on all hosts, and the CUDA that torch was built
    for. None: absent."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name in ("torch", "allhands", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if found["allhands"] is None and importlib.util.find_spec("allhands"):
        # On the path, not installed.
        found["allhands"] = importlib.import_module("allhands").__version__
    found["CUDA"] = None
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin:
        # Read and not imported, which takes seconds.
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            for line in ast.parse(Path(torch.origin).with_name("version.py").read_text()).body:
                targets = (
                    [line.target]
                    if isinstance(line, ast.AnnAssign)
                    else getattr(line, "targets", [])
                )
                if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
                    value = getattr(line, "value", None)
                    found["CUDA"] = ast.literal_eval(value) if value is not None else None
    return found


def rsync_version() -> str | None:
    """Such as 3.2.7; None where there is no rsync."""
    said = run(["rsync", "--version"])
    if said is None:
        return None
    words = said.split()
    return words[2] if len(words) > 2 and words[1] == "version" else "of an unknown version"


def run(words: list[str]) -> str | None:
    """What a program prints, its errors included; None when there is none, or it does not end."""
    null, both = subprocess.DEVNULL, subprocess.STDOUT
    try:
        done = subprocess.run(
            words, stdin=null, stdout=subprocess.PIPE, stderr=both, timeout=15, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


# ---------------------------------------------------------------------- what the system gives


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def space(path: str) -> dict[str, Any]:
    """Bytes of the file system that holds `path`: `total` and `free` (for this user); all None
    where there is none."""
    try:
        told = os.statvfs(path)
    except OSError:
        return {"total": None, "free": None, "files_free": None}
    free_files = told.f_favail if told.f_files else None  # some file systems count no files
    return {
        "total": told.f_frsize * told.f_blocks,
        "free": told.f_frsize * told.f_bavail,
        "files_free": free_files,
    }


def file_system(path: str) -> str | None:
    """The kind of file system that holds `path`, such as ext4 or nfs4."""
    best, kind = "", None
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, name, *_ = line.split(" ")
            place = place.replace("\\040", " ")
            inside = os.path.realpath(path) == place or os.path.realpath(path).startswith(
                place.rstrip("/") + "/"
            )
            if inside and len(place) >= len(best):
                best, kind = place, name
    return kind


def memory() -> dict[str, int | None]:
    """Bytes of memory: `total` and `free`, as far as a container's limit leaves them."""
    told: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            told[name] = int(rest.split()[0]) * 1024
    total, free = told.get("MemTotal"), told.get("MemAvailable")
    limit, taken = (
        _number(Path("/sys/fs/cgroup", name)) for name in ("memory.max", "memory.current")
    )
    if limit is not None and total is not None and limit < total:
        total, free = limit, min(free or 0, max(0, limit - (taken or 0)))
    return {"total": total, "free": free}


def core_quota() -> float | None:
    """The cores' worth of time that a container gets; None without a bound."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    return None


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


if __name__ == "__main__":
    main()
