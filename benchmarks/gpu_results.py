"""What `gpu_workers.py` has measured, by machine, as tables.py and pictures.py show it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import Table, place, software

CONTENDERS = {
    "ddp": "DDP, by hand",
    "ddp-compile": "DDP, by hand, compiled",
    "allhands-eager": "allhands, eager",
    "allhands-graph": "allhands, captured",
    "allhands-compile": "allhands, compiled",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
}
TASKS = {
    "regression": "linear regression, batch 32",
    "resnet-64": "ResNet-18, batch 64",
    "resnet-512": "ResNet-18, batch 512",
    "gpt-124M": "GPT-124M, 16 x 1,024 tokens",
}
Case = dict[str, Any]
Files = list[tuple[Path, dict[str, Any]]]


def gpus_of(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def title_of(case: Case) -> str:
    return f"{TASKS[case['task']]}, {gpus_of(case['workers'])}"


def machines(folder: Path) -> dict[str, Files]:
    """The files by the machine that they were measured on."""
    found: dict[str, Files] = {}
    for path in sorted(folder.glob("gpu_workers*.json")):
        result = json.loads(path.read_text())
        found.setdefault(place(result["machine"]), []).append((path, result))
    return found


def cases_of(files: Files) -> list[Case]:
    """All cases of one machine: by task, then by workers.

    Raises:
        SystemExit: two files have the same case, and nothing says which one holds.
    """
    cases: dict[tuple[str, int], Case] = {}
    for path, found in files:
        for case in found["cases"]:
            key = (case["task"], case["workers"])
            if key in cases:
                raise SystemExit(
                    f"{path.name}: another file of the same machine also has {title_of(case)}; "
                    "remove one of them"
                )
            cases[key] = case
    return [
        cases[key] for key in sorted(cases, key=lambda key: (list(TASKS).index(key[0]), key[1]))
    ]


def picture(what: str, machine: str) -> str:
    """The name of the file in docs/images."""
    return f"gpu_{what}_{'_'.join(machine.lower().split())}.png"


def tables(machine: str, files: Files) -> list[Table]:
    """Times and ratios, efficiency, memory, and who has no figure."""
    cases, header = cases_of(files), ["", *CONTENDERS.values()]
    versions = software(files[0][1]["machine"], "lightning", "accelerate")
    names = ", ".join(f"`benchmarks/results/{path.name}`" for path, _ in files)
    notes = "".join(f"; {found['note']}" for _, found in files if "note" in found)
    title = (
        f"**{machine}**: microseconds a step, and times as fast as `DDP, by hand` ({names}; "
        f"{versions}{notes})"
    )
    result = [(title, header, _rows(cases, _time))]
    scaling = _rows(cases, lambda row: f"{row['efficiency']:.2f}" if "efficiency" in row else "")
    result.append(("Samples a second on N GPUs, over N times those on one", header, scaling))
    memory = _rows(cases, lambda row: f"{row['gib']:.2f}" if "gib" in row else "")
    result.append(("GiB that the fullest GPU has held at once", header, memory))
    result.append(("Without a figure", ["", "contender", "why"], _failures(cases)))
    return [table for table in result if table[2]]


def _rows(cases: list[Case], cell: Callable[[dict[str, Any]], str]) -> list[list[str]]:
    rows = [
        [title_of(case), *(cell(case["contenders"].get(name, {})) for name in CONTENDERS)]
        for case in cases
    ]
    return [row for row in rows if any(row[1:])]


def _time(row: dict[str, Any]) -> str:
    if "microseconds" not in row:
        return ""
    return f"{row['microseconds']:,.0f}" + (f" ({row['ratio']:.2f})" if "ratio" in row else "")


def _failures(cases: list[Case]) -> list[list[str]]:
    return [
        [title_of(case), CONTENDERS[name], row["failed"].replace("|", "\\|")]
        for case in cases
        for name, row in case["contenders"].items()
        if "failed" in row
    ]


def for_readme(folder: Path) -> list[list[Any]]:
    """A row for each case: what a user gets by default and compiled, beside peers; None where
    nothing was measured."""
    rows: list[list[Any]] = []
    for machine, files in machines(folder).items():
        for case in cases_of(files):
            found = case["contenders"]
            # step="auto" captures where it can, and is eager elsewhere.
            default = (
                "allhands-graph" if "ratio" in found.get("allhands-graph", {}) else "allhands-eager"
            )
            shown = ("ddp", "ddp-compile", default, "allhands-compile", "lightning", "accelerate")
            where = f"{case['workers']} x {machine.partition(' x ')[2]}"
            if (TASKS[case["task"]], where) in {(row[0], row[1]) for row in rows}:
                continue  # one GPU of a machine of several, beside a machine of one
            rows.append(
                [TASKS[case["task"]], where, *(found.get(name, {}).get("ratio") for name in shown)]
            )
    return rows
