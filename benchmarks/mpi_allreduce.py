"""How fast ranks of one host all-reduce float32 tensors: the mpi backend against gloo (= 1.0), in
the same processes.

    python benchmarks/mpi_allreduce.py [--workers 2] [--rounds 15] [--launcher mpich | openmpi]

Both groups are used in turn, round by round, so that a change of the machine's speed meets both; a
round of a size lasts about 0.1 s a contender. The rate is bytes of the tensor by seconds; the
figures are the best round of each contender and the median of the ratios round by round. gloo's
group is made with its defaults by the same `torch.distributed`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import machine, save_json

SIZES = {"4 KB": 1 << 10, "1 MB": 1 << 18, "25 MB": 25 << 18, "100 MB": 25 << 20}
LAUNCHERS = {
    "mpich": [str(Path(sys.executable).with_name("mpiexec"))],
    # Left alone it ties each rank, with gloo's threads too, to one core.
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
}
ROUND_S = 0.1


def measure(rounds: int) -> dict[str, Any]:
    """Seconds of one all-reduce, for each size and contender, round by round. Runs in every rank;
    rank 0's count."""
    import torch
    import torch.distributed as dist

    import allhands  # noqa: F401

    dist.init_process_group("mpi")
    groups = {"gloo": dist.new_group(backend="gloo"), "mpi": dist.group.WORLD}
    found: dict[str, dict[str, list[float]]] = {}
    for size, elements in SIZES.items():
        tensor = torch.ones(elements)
        found[size] = {name: [] for name in groups}
        repeats = 1
        for turn in range(rounds + 2):
            for name, group in groups.items():
                tensor.fill_(1.0)
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(repeats):
                    dist.all_reduce(tensor, group=group)
                seconds = (time.perf_counter() - begun) / repeats
                assert tensor[-1] == float(dist.get_world_size()) ** repeats or repeats > 30
                if turn > 1:
                    found[size][name].append(seconds)
            if turn == 1:  # the same number on all ranks, from what the last warm-up round took
                number = torch.tensor([max(1, round(ROUND_S / seconds))])
                dist.broadcast(number, 0)
                repeats = int(number)
    from mpi4py import MPI

    library = " ".join(MPI.Get_library_version().split("\n")[0].split()).rstrip("\0")
    return {"library": library, "world": dist.get_world_size(), "seconds": found}


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    sizes = {}
    for size, seconds in measured["seconds"].items():
        count = SIZES[size] * 4
        ratios = [gloo / mpi for gloo, mpi in zip(seconds["gloo"], seconds["mpi"], strict=True)]
        sizes[size] = {
            "best ms": {name: round(1e3 * min(values), 4) for name, values in seconds.items()},
            "best GB/s": {
                name: round(count / min(values) / 1e9, 3) for name, values in seconds.items()
            },
            "ratio of best": round(min(seconds["gloo"]) / min(seconds["mpi"]), 3),
            "median ratio": round(statistics.median(ratios), 3),
        }
        print(f"{size:7s} {sizes[size]}")
    return {"library": measured["library"], "workers": measured["world"], "sizes": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--launcher", choices=LAUNCHERS, help="default: each that is installed")
    parser.add_argument("--into", help=argparse.SUPPRESS)  # a rank: the file for its figures
    options = parser.parse_args()
    if options.into:
        measured = measure(options.rounds)
        if "0" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
            Path(options.into).write_text(json.dumps(measured))
        return
    for name, command in LAUNCHERS.items():
        if options.launcher not in (None, name) or shutil.which(command[0]) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            into = str(Path(folder, "measured.json"))
            ranks = [sys.executable, __file__, "--rounds", str(options.rounds), "--into", into]
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }  # as allhands.init() chooses
            subprocess.run(
                [*command, "-n", str(options.workers), *ranks], check=True, env=environment
            )
            result = summary(json.loads(Path(into).read_text()))
        save_json(
            f"mpi_allreduce_{name}_{options.workers}", {"baseline": "gloo", **result, **machine()}
        )


if __name__ == "__main__":
    main()
