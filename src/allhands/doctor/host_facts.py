"""What the probe finds out about its own host: programs, libraries, and what the system gives."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any


def versions() -> dict[str, str | None]:
    """Of Python, of the packages that must be equal on all hosts, and the CUDA that torch was built
    for. None: absent."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name in ("torch", "allhands", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if found["allhands"] is None:  # it may be on the path and not installed
        found["allhands"] = _constant("allhands", "__version__")
    found["CUDA"] = _constant("torch", "cuda")
    return found


def _constant(package: str, name: str) -> Any:
    """The value of a name in a package's `version.py`; None where it has none. The file is read and
    not imported, which would take seconds."""
    found = importlib.util.find_spec(package)
    if found is None or not found.origin:
        return None
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for line in ast.parse(Path(found.origin).with_name("version.py").read_text()).body:
            if not isinstance(line, ast.Assign | ast.AnnAssign):
                continue
            targets = [line.target] if isinstance(line, ast.AnnAssign) else line.targets
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return None if line.value is None else ast.literal_eval(line.value)
    return None


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


def open_files() -> list[int | None]:
    """The soft and the hard limit of descriptors; None: no limit."""
    return [_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE)]


def locked_memory() -> int | None:
    """Bytes that may be locked; None: no limit."""
    return _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


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
        number_in(Path("/sys/fs/cgroup", name)) for name in ("memory.max", "memory.current")
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


def number_in(path: Path) -> int | None:
    """The number with which a file begins; None where it does not."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
