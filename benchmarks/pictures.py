"""Bars of what `gpu_workers.py` has measured, and curves of `growth.py`; `tables.py` calls for
them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gpu_results
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLOURS = {
    "ddp": "#606570",
    "ddp-compile": "#a3a8b3",
    "allhands-eager": "#e8a5ae",
    "allhands-graph": "#d1495b",
    "allhands-compile": "#8c1c2e",
    "lightning": "#6f94c3",
    "accelerate": "#b5cbe3",
}


def draw(folder: Path, images: Path) -> list[str]:
    """Write two pictures for each machine, the second one where something was measured on several
    GPUs, and one of `growth.py`; returns their names."""
    drawn = []
    grown = folder / "growth.json"
    if grown.exists():
        growth(json.loads(grown.read_text())["axes"], images / "growth.png")
        drawn.append("growth.png")
    for machine, files in gpu_results.machines(folder).items():
        cases = gpu_results.cases_of(files)
        for what, key, title in (
            ("steps", "ratio", "times as fast as DDP by hand"),
            ("scaling", "efficiency", "samples a second on N GPUs, over N times those on one"),
        ):
            kept = [
                case for case in cases if any(key in row for row in case["contenders"].values())
            ]
            if kept:
                name = gpu_results.picture(what, machine)
                bars(kept, key, f"{machine}: {title}", images / name)
                drawn.append(name)
    return drawn


def growth(axes_of: dict[str, list[dict[str, float]]], path: Path) -> None:
    """A field for each axis, of logarithmic scales: what each cost is at each size, in times of
    that at the first one; the dotted line grows as the size does."""
    rows = math.ceil(len(axes_of) / 3)
    figure = Figure(figsize=(11, 0.4 + 3.2 * rows), layout="constrained")
    fields = list(figure.subplots(rows, 3, squeeze=False).flat)
    for axes in fields[len(axes_of) :]:
        axes.set_axis_off()
    for axes, (name, points) in zip(fields, axes_of.items(), strict=False):
        sizes = [point["size"] for point in points]
        axes.loglog(sizes, [size / sizes[0] for size in sizes], color="#a3a8b3", linestyle=":")
        for cost in (key for key in points[0] if key not in ("size", "parameters", "layers")):
            values = [max(point[cost], 1e-9) for point in points]
            axes.loglog(sizes, [one / values[0] for one in values], marker="o", label=cost)
        axes.set_title(name, fontsize=10, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.supylabel("times of that at the smallest size", fontsize=9)
    figure.savefig(path, dpi=110)


def bars(cases: list[dict[str, Any]], key: str, title: str, path: Path) -> None:
    """A field for each task (across) and number of GPUs (down), each of a scale of its own: tasks
    differ tenfold."""
    tasks = [task for task in gpu_results.TASKS if any(case["task"] == task for case in cases)]
    sizes = sorted({case["workers"] for case in cases})
    names = [
        name
        for name in gpu_results.CONTENDERS
        if any(key in case["contenders"].get(name, {}) for case in cases)
    ]
    figure = Figure(
        figsize=(max(6.0, 2.6 * len(tasks)), 0.8 + 2.2 * len(sizes)), layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    fields = figure.subplots(len(sizes), len(tasks), squeeze=False)
    for axes in fields.flat:
        axes.set_axis_off()
    for case in cases:
        axes = fields[sizes.index(case["workers"])][tasks.index(case["task"])]
        axes.set_axis_on()
        for position, name in enumerate(names):
            value = case["contenders"].get(name, {}).get(key)
            if value is not None:
                axes.bar(position, value, color=COLOURS[name])
                axes.text(position, value, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
        axes.axhline(1, color="#606570", linewidth=0.8, linestyle=":")
        axes.set_title(gpu_results.title_of(case), fontsize=8)
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=COLOURS[name], label=gpu_results.CONTENDERS[name]) for name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
