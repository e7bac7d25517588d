"""From what nvidia-smi prints to findings on the GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from allhands.doctor.finding import Finding

Facts = dict[str, Any]
# So much of a GPU may be taken before it counts as used by somebody: drivers keep some hundred MiB
# for themselves.
_TAKEN = 0.05


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi tells it; memory in MiB."""

    index: int
    uuid: str
    name: str
    driver: str
    total: int
    free: int
    compute_mode: str
    mig: str


def read_gpus(text: str) -> list[Gpu]:
    """From `--query-gpu=` with index, uuid, name, driver_version, memory.total, memory.free,
    compute_mode and mig.mode.current.
    """
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 8 or not fields[0].isdecimal():
            raise ValueError(line)
        index, uuid, name, driver, total, free, mode, mig = fields
        found.append(Gpu(int(index), uuid, name, driver, _mib(total), _mib(free), mode, mig))
    return found


def _mib(text: str) -> int:
    return int(text) if text.isdecimal() else 0  # "[N/A]" where memory is the host's own


def read_links(text: str) -> dict[tuple[int, int], str]:
    """How each pair of GPUs is joined (NV18, PIX, SYS, …; OK, NS, …), from `nvidia-smi topo`'s
    table."""
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if (
            words
            and (match := re.fullmatch(r"GPU(\d+)", words[0]))
            and len(words) > 1
            and not words[1].startswith("GPU")
        ):
            row = int(match[1])
            for column, word in enumerate(words[1:]):
                if (
                    re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS|OK|[CGT]?NS|U", word)
                    and column != row
                ):
                    found[row, column] = word
    return found


def gpus(host: str, facts: Facts) -> list[Finding]:
    result = partial(Finding, host, "gpus")
    told = facts["nvidia_smi"]
    if told is None:
        return [result("ok", "none (CPU training)", values={"count": 0})]
    text = (told["gpus"] or "").strip()
    if not text or "No devices were found" in text:
        return [
            result(
                "ok",
                "nvidia-smi is installed, but finds no GPU (CPU training)",
                values={"count": 0},
            )
        ]
    try:
        found = read_gpus(text)
    except ValueError:
        advice = (
            "run `nvidia-smi` there; after an update of the driver the host must be booted "
            "once, or the module loaded again"
        )
        return [
            result(
                "problem", f"nvidia-smi failed: {text.splitlines()[0][:200]}", advice, {"count": 0}
            )
        ]
    return [_what(host, found, told, facts), *_trouble(host, found, told, facts)]


def _what(host: str, found: list[Gpu], told: dict[str, str], facts: Facts) -> Finding:
    names = {gpu.name: sum(other.name == gpu.name for other in found) for gpu in found}
    words = [f"{count} x {name}" for name, count in names.items()]
    words.append(f"driver {found[0].driver} (CUDA up to {_driver_cuda(told) or 'unknown'})")
    words.append(f"free memory {', '.join(f'{gpu.free}' for gpu in found)} of {found[0].total} MiB")
    links = read_links(told.get("topology") or "")
    if len(found) > 1 and links:
        kinds = sorted({kind for (a, b), kind in links.items() if a < b})
        words.append(
            f"joined by {', '.join(kinds)}"
            + (" (NVLink)" if all(kind.startswith("NV") for kind in kinds) else "")
        )
    values = {
        "count": len(found),
        "names": names,
        "driver": found[0].driver,
        "driver_cuda": _driver_cuda(told),
        "free_mib": [gpu.free for gpu in found],
        "total_mib": [gpu.total for gpu in found],
        "visible": facts["variables"].get("CUDA_VISIBLE_DEVICES"),
        "links": sorted({f"{a}-{b} {kind}" for (a, b), kind in links.items() if a < b}),
    }
    return Finding(host, "gpus", "ok", "; ".join(words), values=values)


def _driver_cuda(told: dict[str, str]) -> str | None:
    match = re.search(r"CUDA Version: *(\d+\.\d+)", told.get("overview") or "")
    return match[1] if match else None


def _trouble(host: str, found: list[Gpu], told: dict[str, str], facts: Facts) -> list[Finding]:
    result = partial(Finding, host, "gpus")
    trouble = []
    driver_cuda, visible = _driver_cuda(told), facts["variables"].get("CUDA_VISIBLE_DEVICES")
    torch, cuda = facts["versions"]["torch"], facts["versions"]["CUDA"]
    if torch is not None and cuda is None:
        advice = (
            "install the build of torch with CUDA (https://pytorch.org/get-started), or the "
            "GPUs stay idle"
        )
        trouble.append(
            result("problem", f"torch is built without CUDA, beside {len(found)} GPUs", advice)
        )
    elif (
        driver_cuda is not None
        and cuda is not None
        and int(cuda.split(".")[0]) > int(driver_cuda.split(".")[0])
    ):
        what = (
            f"torch is built for CUDA {cuda}, but the driver {found[0].driver} knows CUDA up to "
            f"{driver_cuda}"
        )
        advice = (
            "update the driver, or install a torch that is built for CUDA "
            f"{driver_cuda.split('.')[0]}.x"
        )
        trouble.append(result("problem", what, advice))
    if visible is not None and visible.strip() in ("", "-1"):
        what = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU ({len(found)})"
        trouble.append(result("warning", what, "unset it, unless the CPU is meant"))
    users = _users(told.get("apps") or "")
    for gpu in found:
        trouble += _one(host, gpu, users.get(gpu.uuid, []))
    pairs = read_links(told.get("peers") or "")
    blocked = sorted(
        f"{a}-{b} ({kind})" for (a, b), kind in pairs.items() if a < b and kind != "OK"
    )
    if blocked:
        advice = (
            "nccl then copies through the host's memory, which is slower. In a virtual machine ask "
            "for direct access between its GPUs; on bare metal ACS and the IOMMU may be in the way "
            "(nccl's manual, 'PCI Access Control Services')"
        )
        trouble.append(
            result(
                "warning", f"GPUs cannot read one another's memory: {', '.join(blocked)}", advice
            )
        )
    return trouble


def _one(host: str, gpu: Gpu, users: list[str]) -> list[Finding]:
    result = partial(Finding, host, "gpus")
    trouble = []
    if gpu.compute_mode == "Prohibited":
        advice = f"`nvidia-smi -i {gpu.index} -c DEFAULT` as root"
        trouble.append(
            result(
                "problem",
                f"GPU {gpu.index} is in compute mode Prohibited: no process may use it",
                advice,
            )
        )
    elif gpu.compute_mode.startswith("Exclusive") and users:
        what = (
            f"GPU {gpu.index} is in compute mode {gpu.compute_mode} and taken by {', '.join(users)}"
        )
        trouble.append(
            result(
                "problem", what, "wait for it to end, or choose others with CUDA_VISIBLE_DEVICES"
            )
        )
        return trouble
    taken = gpu.total - gpu.free
    if users or taken > _TAKEN * gpu.total:
        if users:
            who = ", ".join(users)
        else:
            who = "a process that is not seen from here (of another user or container)"
        what = f"GPU {gpu.index}: {taken} of {gpu.total} MiB are taken by {who}"
        advice = (
            "both will be slower and may run out of memory: wait, end it, or choose others "
            "with CUDA_VISIBLE_DEVICES"
        )
        trouble.append(result("warning", what, advice))
    return trouble


def _users(text: str) -> dict[str, list[str]]:
    """Processes by the GPU that they use."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[1].isdecimal():
            found.setdefault(fields[0], []).append(
                f"pid {fields[1]} ({fields[2].rsplit('/', 1)[-1]}, {fields[3]} MiB)"
            )
    return found


def usable(host: str, facts: Facts) -> int:
    """How many of them workers get: those that CUDA_VISIBLE_DEVICES leaves, and none when something
    is wrong with them."""
    what, *trouble = gpus(host, facts)
    visible = facts["variables"].get("CUDA_VISIBLE_DEVICES")
    if any(finding.status == "problem" for finding in (what, *trouble)):
        return 0
    if visible is None:
        named = None
    else:
        named = len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return int(what.values["count"] if named is None else min(named, what.values["count"]))


def alike(facts: dict[str, Facts]) -> list[Finding]:
    """Whether the hosts have the same GPUs; the slowest one sets the pace."""
    kinds = {}
    for host, told in facts.items():
        values = next(iter(gpus(host, told))).values
        kinds[host] = (
            " and ".join(f"{count} x {name}" for name, count in values.get("names", {}).items())
            or "none"
        )
    if len(set(kinds.values())) < 2:
        return []
    what = "the hosts have different GPUs: " + ", ".join(
        f"{host} {kind}" for host, kind in kinds.items()
    )
    advice = (
        "each step waits for the slowest one; `slots=N` in the hosts file sets how many "
        "workers a host gets"
    )
    return [Finding("", "gpus", "warning", what, advice)]
