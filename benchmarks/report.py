"""What every benchmark writes down: ratios to a baseline of the same run, the machine, and the
versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def summarize(samples: dict[str, list[float]], baseline: str) -> dict[str, Any]:
    """Medians, and the median of the ratios run by run, which a change of the machine's speed
    between runs does not touch."""
    ratios = {
        name: [a / b for a, b in zip(values, samples[baseline], strict=True)]
        for name, values in samples.items()
    }
    return {
        "ratio": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
        "median": {name: round(statistics.median(values), 4) for name, values in samples.items()},
        "samples": {
            name: [round(value, 4) for value in values] for name, values in samples.items()
        },
    }


def machine() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    versions = {}
    for package in ("allhands", "torch", "lightning", "accelerate", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # Run from its source, not installed.
    if "allhands" not in versions and "allhands" in sys.modules:
        versions["allhands"] = sys.modules["allhands"].__version__
    found = {} if "torch" not in sys.modules else {"gpus": _gpus()}
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""
    )
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": versions,
        **found,
    }


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]


def save_json(name: str, result: dict[str, Any], quiet: bool = False) -> Path:
    """Write ``results/NAME.json``, and say so unless `quiet`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    if not quiet:
        print(f"written to {path.relative_to(RESULTS.parent.parent)}")
    return path


def save(name: str, result: dict[str, Any]) -> None:
    """Write ``results/NAME.json`` and print the ratios."""
    for contender, ratio in result["ratio"].items():
        print(f"{contender:16s} {ratio:6.3f}   ({result['median'][contender]:.1f})")
    save_json(name, result)
