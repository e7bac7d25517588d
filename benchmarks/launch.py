"""How long it takes from the command to the end of the first collective of 4 workers: torchrun (=
1.0) and allhands.

    python benchmarks/launch.py [--runs 7] [--workers 4]

Both run the same script: import torch, make a gloo group, all-reduce three numbers. The figure is
the wall time from the
start of the command until the last worker has its sum. The contenders take turns, so that a change
of the machine's speed meets both. Neither gets a thread setting, so both choose their own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import machine, save, summarize

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.ones(3)
dist.all_reduce(numbers)
done = time.clock_gettime(time.CLOCK_MONOTONIC)
assert numbers[0] == dist.get_world_size()
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(str(done))
dist.destroy_process_group()
"""


def first_collective(command: list[str], script: Path, workers: int) -> float:
    """Seconds from the start of the command to the end of the collective in the last worker."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.clock_gettime(time.CLOCK_MONOTONIC)
        subprocess.run(
            [*command, str(script), folder],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        times = [float(path.read_text()) for path in Path(folder).iterdir()]
    assert len(times) == workers, f"{len(times)} of {workers} workers finished"
    return max(times) - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)
    commands = {
        "torchrun": [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={options.workers}",
        ],
        "allhands": [
            sys.executable,
            "-c",
            "from allhands.cli.main import main; main()",
            "launch",
            "-n",
            str(options.workers),
        ],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        for run in range(options.runs + 1):
            for name, command in commands.items():
                seconds = first_collective(command, script, options.workers)
                if run:  # the first of each fills the file cache
                    samples[name].append(seconds)
                    print(f"run {run}  {name:10s} {seconds:.2f} s", flush=True)
    save(
        "launch",
        {
            "workers": options.workers,
            "unit": "seconds",
            **summarize(samples, "torchrun"),
            **machine(),
        },
    )


if __name__ == "__main__":
    main()
