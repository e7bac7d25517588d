"""What `tables.py` shows of results that are not `gpu_workers.py`'s: rows of figures, and how many
times as fast as the first."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Table = tuple[str, list[str], list[list[str]]]  # title, header, rows


def place(machine: dict[str, Any]) -> str:
    """The hardware in words: its GPUs where it has some, else its cores."""
    gpus = machine.get("gpus") or []
    if gpus:
        return f"{len(gpus)} x {gpus[0]}"
    return f"{machine['cores']} cores, {machine['cpu'].replace('(R)', '')}"


NAMES = {"torch": "torch", "lightning": "Lightning", "accelerate": "Accelerate", "flwr": "Flower"}


def software(machine: dict[str, Any], *packages: str) -> str:
    """Versions of torch and of `packages`, and the day."""
    versions = machine.get("versions", {})
    found = [
        f"{NAMES[package]} {versions[package]}"
        for package in ("torch", *packages)
        if package in versions
    ]
    return ", ".join([*found, f"Python {machine['python']}", machine["date"]])


def tables(stem: str, found: dict[str, Any]) -> list[Table]:
    """The tables of one file of results.

    Args:
        stem: the file's name without its ending.
        found: what it holds.
    """
    kind = next(prefix for prefix in MAKERS if stem.startswith(prefix))
    return MAKERS[kind](found)


def about(found: dict[str, Any], *packages: str) -> str:
    machine = found.get("machine", found)  # early files have it beside their figures
    return f"{place(machine)}; {software(machine, *packages)}"


def summary(
    found: dict[str, Any], title: str, names: dict[str, str], unit: str, digits: int = 0
) -> list[Table]:
    """A file of `report.summarize`: the medians, and one over their ratios to the baseline's."""
    kept = [name for name in names if name in found["median"]]
    cells = [
        f"{found['median'][name]:,.{digits}f} ({1 / found['ratio'][name]:.2f})" for name in kept
    ]
    return [
        (
            f"{title}, {about(found, *(name for name in NAMES if name in kept))}",
            ["", *(names[name] for name in kept)],
            [[unit, *cells]],
        )
    ]


def step_overhead(found: dict[str, Any]) -> list[Table]:
    names = {
        "by hand": "DataLoader and loop, by hand",
        "raw ddp": "DDP, by hand",
        "allhands": "allhands",
        "allhands ddp": "allhands",
        "lightning": "Lightning",
        "accelerate": "Accelerate",
    }
    processes = "one process" if found["baseline"] == "by hand" else "two gloo workers"
    ((title, header, rows),) = summary(
        found, f"Linear regression, batch 32, {processes}", names, "us of CPU time a step"
    )
    counted = found.get("instructions", {}).get("of", {})
    base = counted.get(found["baseline"])
    kept = [counted.get(name) for name in names if name in found["median"]]
    if base is not None:
        steps = [
            "" if one is None else f"{one['step'] / 1e3:,.0f} ({base['step'] / one['step']:.2f})"
            for one in kept
        ]
        once = ["" if one is None else f"{one['training'] / 1e6:,.0f}" for one in kept]
        rows = [
            *rows,
            ["thousand instructions a step", *steps],
            ["million instructions of a training beside its steps", *once],
        ]
    return [(title, header, rows)]


def launch(found: dict[str, Any]) -> list[Table]:
    names = {"torchrun": "`torchrun --standalone`", "allhands": "`allhands launch`"}
    title = f"From the command to the end of the first all-reduce of {found['workers']} workers"
    return summary(found, title, names, "seconds", 1)


def gpt_parallel(found: dict[str, Any]) -> list[Table]:
    cases = found["cases"]
    names = [name for name in next(iter(cases.values())) if name != "by hand"]
    rows = []
    for case, figures in cases.items():
        raw = figures["by hand"]
        speeds = [
            f"{max(figures[name]['tokens_per_second']):,.0f} ({figures[name]['speed']:.2f})"
            for name in names
        ]
        memory = [figures[name].get("gib with making") for name in ("by hand", *names)]
        rows.append(
            [
                case,
                f"{max(raw['tokens_per_second']):,.0f}",
                *speeds,
                *("" if gib is None else f"{gib:.2f}" for gib in memory),
            ]
        )
    shared = " on one GPU" if found.get("one_card") else ""
    header = [
        f"{found['workers']} workers{shared}",
        "tokens a second, by hand",
        *names,
        "GiB, by hand",
        *names,
    ]
    turns = f"{found['rounds']} turn{'s' if found['rounds'] > 1 else ''}"
    return [(f"{turns} of {found['steps']} steps, {about(found)}", header, rows)]


def library_models(found: dict[str, Any]) -> list[Table]:
    names = list(dict.fromkeys(row["contender"] for row in found["rows"]))
    base = "by hand, compiled"
    tasks: dict[str, dict[str, float]] = {}
    for row in found["rows"]:
        tasks.setdefault(row["task"], {})[row["contender"]] = row["milliseconds"]
    rows = [
        [task, *(f"{ms[name]:.1f} ({ms[base] / ms[name]:.2f})" for name in names)]
        for task, ms in tasks.items()
    ]
    header = ["ms a step", *(f'`step="{n}"`' if n == "auto" else n for n in names)]
    return [(about(found), header, rows)]


def kvstore(found: dict[str, Any]) -> list[Table]:
    cases = {
        what: row
        for what, row in found.items()
        if isinstance(row, dict) and all("times_as_fast" in r for r in row.values())
    }
    result: list[Table] = []
    for kind, title in (
        ("pushpull", f"{found['megabytes']} MB, {found['workers']} workers"),
        ("ResNet-18", "A step of ResNet-18"),
    ):
        rows = {what: figures for what, figures in cases.items() if what.startswith(kind)}
        names = list(dict.fromkeys(name for figures in rows.values() for name in figures))
        made = [
            [
                f"ms, {what}".replace("1 server(s)", "1 server").replace("server(s)", "servers"),
                *(_seconds(figures.get(name)) for name in names),
            ]
            for what, figures in rows.items()
        ]
        result.append((f"{title}, {about(found)}", ["", *names], made))
    return [table for table in result if table[2]]


def _seconds(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{1000 * row['median_s']:,.0f} ({row['times_as_fast']:.2f})"


def mpi(found: dict[str, Any]) -> list[Table]:
    library = found["library"].split(",")[0].removesuffix(".").replace(" Version:", "")
    rows = [
        [
            size,
            f"{row['best ms']['gloo']:.2f}",
            f"{row['best ms']['mpi']:.2f} ({row['median ratio']:.2f})",
        ]
        for size, row in found["sizes"].items()
    ]
    return [
        (
            f"All-reduce of {found['workers']} ranks, {library}, {about(found)}",
            ["best ms", "gloo", "mpi"],
            rows,
        )
    ]


def horovod(found: dict[str, Any]) -> list[Table]:
    where = "nccl" if found["device"] == "cuda" else "gloo"
    title = (
        f"ResNet-18 of width {found['width']}, batch {found['batch']}, {found['workers']} "
        f"workers, {where}"
    )
    return summary(
        found, title, {"ddp": "DDP, by hand", "horovod": "allhands.horovod.torch"}, "ms a step", 1
    )


def horovod_tensorflow(found: dict[str, Any]) -> list[Table]:
    model = {"guide": "the CIFAR-100 guide's model", "wide": "a model with 43 MB of gradients"}[
        found["model"]
    ]
    title = f"TensorFlow {found['tensorflow']}, {model}, {found['workers']} workers, gloo"
    names = {
        "by hand": "a fused exchange, by hand",
        "horovod": "allhands.horovod.tensorflow",
        "no exchange": "no exchange",
    }
    return summary(found, title, names, "ms a step", 1)


NETWORKS = {"cnn": "CNN", "resnet": "ResNet-18 with GroupNorm", "lr": "logistic regression"}


def by_contender(found: dict[str, Any], names: dict[str, str], ratio: Any) -> list[list[str]]:
    """Rows of a network and a cohort, with the milliseconds of a round."""
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for row in found["rows"]:
        cell = f"{row['milliseconds']['median']:,.1f} ({ratio(row):.2f})"
        rows.setdefault((row["model"], row["cohort"]), {})[row["contender"]] = cell
    return [
        [f"{NETWORKS[model]}, cohort of {cohort}", *(cells.get(name, "") for name in names)]
        for (model, cohort), cells in rows.items()
    ]


def federated(found: dict[str, Any]) -> list[Table]:
    names = {
        "loop": "loop, by hand",
        "graph": "`graph`",
        "stacked": "`stacked`",
        "stacked:compile=true": "`stacked`, `compile`",
    }
    rows = by_contender(found, names, lambda row: row["times_the_loop"])
    return [
        (
            f"A round of 1,000 clients' cohorts, {about(found)}",
            ["ms a round", *names.values()],
            rows,
        )
    ]


def federated_devices(found: dict[str, Any]) -> list[Table]:
    rows = [
        [str(row["workers"]), f"{row['milliseconds']['median']:.1f}", f"{row['efficiency']:.2f}"]
        for row in found["rows"]
    ]
    title = (
        f"A round of the CNN, cohort of {found['rows'][0]['cohort']}, "
        f"`{found['rows'][0]['executor']}`, {about(found)}"
    )
    return [(title, ["GPUs", "ms a round", "efficiency"], rows)]


def federated_peers(found: dict[str, Any]) -> list[Table]:
    names = {"ours": "allhands", "pfl": "pfl-research", "flwr": "Flower's simulation"}
    rows = by_contender(found, names, lambda row: 1 / row["times_ours"]["median"])
    return [
        (f"A round of 100 clients' cohorts, {about(found)}", ["ms a round", *names.values()], rows)
    ]


def federated_sites(found: dict[str, Any]) -> list[Table]:
    rows = []
    for part in ("rounds", "loading"):
        if part not in found:
            continue
        result = found[part]["result"]
        what = f"{result['sites']} sites" + (
            f" that take {result['loading']:.0f} s to load their data" if result["loading"] else ""
        )
        ratio = 1 / result["ours_of_flowers"]["median"]
        rows.append(
            [
                what,
                f"{result['seconds']['flower']:.1f}",
                f"{result['seconds']['ours']:.1f} ({ratio:.2f})",
            ]
        )
    title = (
        f"A round across processes on one machine, {about(found['rounds'], 'flwr')}"
        if "rounds" in found
        else "Sites"
    )
    return [(title, ["seconds a round", "Flower, an app by hand", "allhands"], rows)]


def coala_tutorial(found: dict[str, Any]) -> list[Table]:
    rows = []
    for unit, figures in (("seconds", found), ("seconds of CPU time", found["cpu_seconds"])):
        median, ratio = figures["median"], 1 / figures["ratio"]["allhands"]
        rows.append(
            [
                f"{unit}, the slower task" if unit == "seconds" else f"{unit}, both tasks",
                f"{median['plain']:.0f}",
                f"{median['allhands']:.0f} ({ratio:.2f})",
            ]
        )
    loads = ", ".join(f"{load:g}" for load in found["load_at_turns"])
    title = (
        f"A round of COALA's tutorial, {found['tasks']} tasks of srun, {about(found)}; load of the "
        f"machine at the turns {loads}"
    )
    return [(title, ["", "plain loop", "allhands"], rows)]


def planning(found: dict[str, Any]) -> list[Table]:
    rows = [
        [
            name,
            f"{row['predicted gib']:.2f}",
            f"{row['measured gib']:.2f}",
            f"{100 * (row['memory'] - 1):+.1f} %",
            f"{row['predicted ms']:,.1f}",
            f"{row['measured ms']:,.1f}",
            f"{row['time']:.2f}",
        ]
        for name, row in found["cases"].items()
    ]
    header = ["", "GiB, plan", "measured", "error", "ms, plan", "measured", "of it"]
    return [("bf16, a step of each on H200s", header, rows)]


def planning_card(found: dict[str, Any]) -> list[Table]:
    rows = []
    for name, row in found["compared"].items():
        timed = "predicted ms" in row
        rows.append(
            [
                name,
                f"{row['predicted gib']:.2f}",
                f"{row['measured gib']:.2f}",
                f"{100 * (row['memory'] - 1):+.1f} %",
                f"{row['reserved gib']:.2f}" if "reserved gib" in row else "",
                f"{row['predicted ms']:,.1f}" if timed else "",
                f"{row['measured ms']:,.1f}" if timed else "",
                f"{100 * (row['time'] - 1):+.1f} %" if timed else "",
            ]
        )
    header = ["", "GiB, plan", "measured", "error", "reserved", "ms, plan", "measured", "error"]
    return [(f"bf16, a step on one H200, {about(found)}", header, rows)]


GROWTH = {  # title, and what a size counts
    "workers": ("Processes under `ddp` on gloo, a linear model of 64 x 64", "workers"),
    "clients": ("Cohorts of 10 out of clients that hold 2 samples each", "clients"),
    "parameters": ("Plans of GPTs on the meta device, 8 GPUs, `ddp` and `fsdp`", "parameters"),
    "stored": ("A checkpoint of a model with Adam", "parameters"),
    "samples": ("A shuffled data set that computes its samples, batches of 256", "samples"),
    "keys": ("`pushpull` of a list of keys, 16 numbers each", "keys"),
}


def exponent(points: list[dict[str, float]], name: str) -> float:
    """The x of n^x, from the last size but one to the largest; below 0.05 also where it fell."""
    (one, other) = points[-2:]
    if min(one[name], other[name]) <= 0:
        return 0.0
    return math.log(other[name] / one[name]) / math.log(other["size"] / one["size"])


def growth(found: dict[str, Any]) -> list[Table]:
    made = []
    for axis, points in found["axes"].items():
        title, unit = GROWTH[axis]
        names = [name for name in points[0] if name not in ("size", "parameters")]
        rows = [
            [
                name,
                *(
                    f"{point[name]:,.0f}"
                    if point[name] >= 20 or isinstance(point[name], int)
                    else f"{point[name]:,.2f}"
                    for point in points
                ),
                "" if name == "layers" else f"{exponent(points, name):.2f}",
            ]
            for name in names
        ]
        header = [unit, *(_count(point["size"]) for point in points), "n^x at the end"]
        made.append((f"{title}, {about(found)}", header, rows))
    return made


def _count(number: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:g} {name}"
    return f"{number:,.0f}"


def planning_links(found: dict[str, Any]) -> list[Table]:
    rows = [
        [
            f"{case}, {speed}",
            f"{row['predicted ms']:,.1f}",
            f"{row['compute ms']:,.1f}",
            f"{row['waiting ms'] + row['bubble ms']:,.1f}",
            f"{row['measured ms']:,.1f}",
            f"{100 * (row['of it'] - 1):+.0f} %",
        ]
        for speed, one in found["speeds"].items()
        for case, row in one["cases"].items()
    ]
    header = ["ms a step", "plan", "computes", "waits", "measured", "error"]
    return [(f"Two workers with a core each, {about(found)}", header, rows)]


# By the beginning of a file's name; the longer names come first.
MAKERS = {
    "growth": growth,
    "planning_links": planning_links,
    "planning_card": planning_card,
    "planning": planning,
    "step_overhead": step_overhead,
    "launch": launch,
    "gpt_parallel": gpt_parallel,
    "library_models": library_models,
    "kvstore": kvstore,
    "mpi_allreduce": mpi,
    "horovod_tensorflow": horovod_tensorflow,
    "horovod": horovod,
    "federated_devices": federated_devices,
    "federated_peers": federated_peers,
    "federated_sites": federated_sites,
    "federated": federated,
    "coala_tutorial": coala_tutorial,
}


def for_readme(folder: Path) -> list[list[Any]]:
    """Rows of what was measured on processors: what, where, and times as fast, None where there is
    nothing."""
    rows: list[list[Any]] = []
    asked = {
        "step_overhead_1": ("linear regression, batch 32, CPU time", "by hand", "allhands"),
        "step_overhead_2": (
            "linear regression, batch 32, CPU time, 2 workers",
            "raw ddp",
            "allhands ddp",
        ),
        "launch": ("start of 4 workers, beside torchrun", "torchrun", "allhands"),
    }
    for name, (title, base, ours) in asked.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        ratios = {contender: 1 / ratio for contender, ratio in found["ratio"].items()}
        where = place(found.get("machine", found))
        rows.append(
            [
                title,
                where,
                ratios[base],
                None,
                ratios[ours],
                None,
                ratios.get("lightning"),
                ratios.get("accelerate"),
            ]
        )
    return rows
