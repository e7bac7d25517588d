"""From what one host told to findings on it: how it is reached, what is installed there, what its
system gives."""

from __future__ import annotations

from functools import partial
from typing import Any

from allhands.doctor.finding import Finding, Status, size
from allhands.launch.python import same_version

SLOW_LOGIN_S = 5.0
SKEW_S = 1.0
GIB = 1 << 30
MIB = 1 << 20

Facts = dict[str, Any]


def login(host: str, seconds: float) -> Finding:
    """How long ssh took to log in and start Python."""
    result = partial(Finding, host, "ssh")
    values = {"login_s": round(seconds, 3)}
    found = f"logged in and started Python in {seconds:.2f} s"
    if seconds < SLOW_LOGIN_S:
        return result("ok", found, values=values)
    advice = (
        "every start of a job waits as long. Usual causes: its sshd looks up names (set `UseDNS "
        "no` and `GSSAPIAuthentication no` there), its login files are slow, or Python lies on a "
        "slow network disk"
    )
    return result("warning", found, advice, values)


def unreachable(host: str, why: str) -> Finding:
    """It cannot be examined."""
    return Finding(host, "ssh", "problem", why, "nothing else could be checked there")


def shell(host: str, noise: bytes) -> Finding:
    """What the login shell prints on standard output when it is not interactive."""
    result = partial(Finding, host, "shell")
    if not noise:
        return result("ok", "its login shell prints nothing of its own")
    text = noise.decode("utf-8", "replace")
    first = (text.strip().splitlines() or [text])[0]
    advice = (
        "rsync and scp break on it, and so does --sync-dst-dir. Move what prints from ~/.bashrc, "
        "~/.cshrc or config.fish to the "
        "file for interactive shells, or put `[ -t 0 ] || return` before it"
    )
    return result("problem", f"its login shell prints on standard output: {first[:100]!r}", advice)


def rsync(host: str, version: str | None, *, needed: bool) -> Finding:
    result = partial(Finding, host, "rsync")
    if version is not None:
        return result("ok", f"rsync {version}")
    status: Status = "problem" if needed else "warning"
    advice = "install it (apt-get install rsync, dnf install rsync)" + (
        ""
        if needed
        else "; it is needed for --sync-dst-dir only, not where all hosts share the job's folder"
    )
    return result(status, "there is no rsync", advice)


def python(host: str, facts: Facts) -> Finding:
    """Which Python, and what is in it."""
    result = partial(Finding, host, "python")
    versions = facts["versions"]
    found = f"{facts['executable']}: " + ", ".join(
        f"{name} {version or 'none'}" for name, version in versions.items()
    )
    missing = [name for name in ("torch", "allhands", "numpy") if versions[name] is None]
    if not missing:
        return result("ok", found, values=dict(versions))
    advice = (
        f"install there what runs here: `{facts['executable']} -m pip install {' '.join(missing)}`"
    )
    if host:
        advice += ", or name a Python that has it with --python PATH"
    return result(
        "problem", f"{found}; {' and '.join(missing)} cannot be imported", advice, dict(versions)
    )


def clock(host: str, skew_s: float, round_trip_s: float) -> Finding:
    """How far its clock is from this machine's; known to half of the round trip."""
    result = partial(Finding, host, "clock")
    values = {"skew_ms": round(skew_s * 1e3, 1), "round_trip_ms": round(round_trip_s * 1e3, 2)}
    side = "ahead of" if skew_s > 0 else "behind"
    found = (
        f"its clock is {abs(skew_s) * 1e3:.1f} ms {side} this machine's (+- "
        f"{round_trip_s * 500:.1f} ms)"
    )
    if abs(skew_s) - round_trip_s / 2 < SKEW_S:
        return result("ok", found, values=values)
    advice = (
        "let both keep time with NTP (`timedatectl set-ntp true`, or chrony). Training does not "
        "read the clock, but logs are "
        "hard to compare, and `make` and rsync go by the times of files"
    )
    return result("warning", found, advice, values)


def cores(host: str, facts: Facts) -> Finding:
    """Cores, a container's share of them, and the threads that torch will use."""
    result = partial(Finding, host, "cores")
    count, quota = facts["cores"], facts["core_quota"]
    threads = facts["variables"].get("OMP_NUM_THREADS")
    values = {"cores": count, "quota": quota, "OMP_NUM_THREADS": threads}
    found = f"{count} cores" + (f", of whose time this container gets {quota:g}" if quota else "")
    found += (
        f"; OMP_NUM_THREADS={threads}"
        if threads
        else "; OMP_NUM_THREADS is not set, so the cores are shared among workers"
    )
    if threads is not None and not (
        threads.split(",")[0].isdecimal() and int(threads.split(",")[0]) > 0
    ):
        return result(
            "problem", found, "unset OMP_NUM_THREADS, or give a whole number of at least 1", values
        )
    number = int(threads.split(",")[0]) if threads else 0
    if number > count:
        advice = (
            f"unset OMP_NUM_THREADS, or set at most {count} divided by the workers a host: "
            "more threads than cores slow down"
        )
        return result("warning", found, advice, values)
    if quota and quota < 0.9 * count and (not threads or number > quota):
        advice = (
            f"--threads N with N x workers a host of at most {max(1, int(quota))}: torch "
            "counts the cores, not the share"
        )
        return result("warning", found, advice, values)
    return result("ok", found, values=values)


def memory(host: str, told: dict[str, int | None]) -> Finding:
    """Free memory; a worker with torch takes about a quarter of a GiB before it has a model."""
    result = partial(Finding, host, "memory")
    total, free = told["total"], told["free"]
    values = {"total_bytes": total, "free_bytes": free}
    if total is None or free is None:
        return result("ok", "the system does not tell how much memory is free", values=values)
    found = f"{size(free)} of {size(total)} free"
    if free >= GIB:
        return result("ok", found, values=values)
    advice = (
        "end what takes it (`ps aux --sort=-rss | head`); the kernel kills workers (SIGKILL) "
        "when memory runs out"
    )
    return result("problem" if free < 256 * MIB else "warning", found, advice, values)


def shm(host: str, told: dict[str, Any]) -> Finding:
    """Shared memory: loaders with worker processes hand their batches over in it, and so does
    `spawn` with its arguments."""
    result = partial(Finding, host, "shm")
    total, free = told["total"], told["free"]
    values = {"total_bytes": total, "free_bytes": free}
    if total is None:
        advice = (
            "mount it (`mount -t tmpfs tmpfs /dev/shm`); in a container it comes with "
            "--shm-size or --ipc=host"
        )
        return result("problem", "there is no /dev/shm", advice, values)
    found = f"/dev/shm: {size(free)} of {size(total)} free"
    if free >= GIB:
        return result("ok", found, values=values)
    advice = (
        "loaders with worker processes (num_workers) pass their batches through it and end with a "
        "bus error when it is full. In a container: `docker run --shm-size=8g` or `--ipc=host`; "
        "elsewhere `mount -o remount,size=8g /dev/shm`, and remove what ended jobs left in it"
    )
    return result("problem" if free < 16 * MIB else "warning", found, advice, values)


def limits(host: str, facts: Facts) -> Finding:
    """Open files, and memory that may be locked, which RDMA needs."""
    result = partial(Finding, host, "limits")
    soft, hard = facts["open_files"]
    locked, rdma = facts["memlock"], facts["infiniband"]
    values = {
        "open_files": soft,
        "open_files_hard": hard,
        "memlock_bytes": locked,
        "infiniband": rdma,
    }
    found = f"open files: {_number(soft)} (can be raised to {_number(hard)}); locked memory: "
    found += "no limit" if locked is None else size(locked)
    if soft is not None and soft < 1024:
        advice = (
            "`ulimit -n 65536` in the login file of the user, or LimitNOFILE= of the service that "
            "starts the job: each "
            'connection and each tensor that a loader process hands over is an open file ("Too '
            'many open files")'
        )
        return result("problem" if soft < 256 else "warning", found, advice, values)
    if rdma and locked is not None:
        advice = (
            f"{', '.join(rdma)} can be used by nccl only where memory may be locked: `* - memlock "
            "unlimited` in /etc/security/limits.conf, or `--ulimit memlock=-1` for a container; "
            "until then nccl fails or uses sockets"
        )
        return result("warning", found, advice, values)
    return result("ok", found, values=values)


def _number(value: int | None) -> str:
    return "no limit" if value is None else str(value)


def versions(facts: dict[str, Facts]) -> list[Finding]:
    """Whether all hosts of the job have the same. `facts` by host, in their order; the first one is
    the measure."""
    first, *others = facts
    measure = facts[first]["versions"]
    findings = []
    for host in others:
        own = facts[host]["versions"]
        for name in measure:
            if None in (own[name], measure[name]) and name != "CUDA":
                continue  # that it is absent is told already
            if same_version(name, own[name], measure[name]):
                continue
            found = (
                f"{host} has {name} {own[name] or 'none'}, {first} has {name} "
                f"{measure[name] or 'none'}"
            )
            if name == "numpy":
                advice = (
                    "install the same one on all hosts, or the same job may draw other random "
                    "numbers there"
                )
                findings.append(Finding(host, "versions", "warning", found, advice))
                continue
            advice = (
                "install the same one on all hosts (`pip install "
                f"{name.lower()}=={measure[name]}` on {host})"
            )
            if name in ("Python", "CUDA"):
                what = "Python" if name == "Python" else "build of torch"
                advice = f"use the same {what} on all hosts; --python PATH names another Python"
            findings.append(Finding(host, "versions", "problem", found, advice))
    if not findings:
        told = ", ".join(f"{name} {version or 'none'}" for name, version in measure.items())
        findings.append(Finding("", "versions", "ok", f"equal on {', '.join(facts)}: {told}"))
    return findings


def launcher(here: Facts, facts: dict[str, Facts]) -> list[Finding]:
    """Whether this machine, whose launcher talks to the hosts, has their allhands."""
    own = here["versions"]["allhands"]
    for host, told in facts.items():
        there = told["versions"]["allhands"]
        if own is not None and there is not None and there != own:
            advice = f"install the same one (`pip install allhands=={own}` on {host})"
            found = f"{host} has allhands {there}, and this machine, which launches, has {own}"
            return [Finding(host, "versions", "problem", found, advice)]
    return []
