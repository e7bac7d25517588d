"""What a training has run on, for its report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path


def environment() -> dict[str, str]:
    """Versions, the machine and its devices; nothing of the variables of the environment."""
    found = {"Python": platform.python_version()}
    for name in ("allhands", "torch", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["system"] = platform.platform()
    found["host"] = platform.node()
    found["processor"] = (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores to use"
        if hasattr(os, "sched_getaffinity")
        else _processor()
    )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        found["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        found["CUDA"] = str(torch.version.cuda)
    job = os.environ.get("SLURM_JOB_ID")
    return found | ({"Slurm job": job} if job else {})


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
