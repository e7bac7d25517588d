"""COALA's tutorial script under a real Slurm on two tasks, beside a plain loop of the same steps.

    python benchmarks/coala_tutorial.py --data FOLDER [--turns 3] [--whole]

FOLDER has MNIST as its publishers offer it, in MNIST/raw. Slurm is started here (see
tests/cluster/README.md, which says what that needs). A part is one round of 5 clients with 600
samples, 10 local epochs and batches of 32, and the test of the 10,000 images; both parts are tasks
of srun that read the same data, and take turns. The plain loop is the program that a user writes:
one thread a task, a DataLoader-less loop over permuted indices, torch.optim.Adam, the weights
averaged with one all-reduce, and the test in batches of 64. The figure is the wall time of a round
in the slower task; CPU seconds of both tasks stand beside it. With --whole the script runs to its
end too, and the seconds between its lines are noted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from report import machine, save, summarize  # noqa: E402
from tests.cluster.slurm import Slurm, why_not  # noqa: E402

SCRIPT = ROOT / "examples" / "federated_tutorial" / "with_slurm.py"
TASKS = ("-N1", "-n2")

# The tutorial's script with one round, timed from `run` to its end.
LIBRARY = """
import json, resource, runpy, sys, time
import allhands.federated as coala
init, run = coala.init, coala.run
def one_round(config):
    init({**config, "server": {"rounds": 1}})
def timed():
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    result = run()
    end = resource.getrusage(resource.RUSAGE_SELF)
    cpu = end.ru_utime + end.ru_stime - used.ru_utime - used.ru_stime
    print("FIGURES", json.dumps({"wall": time.perf_counter() - began, "cpu": cpu}), flush=True)
    return result
coala.init, coala.run = one_round, timed
runpy.run_path(sys.argv[1])
"""

PLAIN = """
import json, os, resource, sys, time
import torch
import torch.distributed as dist
from torch.nn import functional as F
from allhands.data import catalogue
from allhands.federated import slurm
from allhands.federated.coala.models import LeNet

torch.set_num_threads(1)
rank, _, size, address = slurm.setup()
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
(x, y), (test_x, test_y) = (
    catalogue.load("mnist", part, os.environ["ALLHANDS_DATA"]).tensors for part in ("train", "test")
)
torch.manual_seed(0)
clients = torch.randperm(len(x)).view(100, 600)[:5]
model = LeNet()
before = [p.detach().clone() for p in model.parameters()]
dist.barrier()
began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
sums = [torch.zeros_like(p) for p in before]
for own in clients[rank::size]:
    with torch.no_grad():
        for p, value in zip(model.parameters(), before):
            p.copy_(value)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(10):
        for batch in own[torch.randperm(600)].split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    for total, p in zip(sums, model.parameters()):
        total += p.detach() / 5
flat = torch.cat([total.flatten() for total in sums])
dist.all_reduce(flat)
with torch.no_grad():
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in before])):
        p.copy_(part.view_as(p))
    right = torch.zeros(1)
    for batch in torch.arange(len(test_x)).split(64)[rank::size]:
        right += (model(test_x[batch]).argmax(1) == test_y[batch]).sum()
dist.all_reduce(right)
end = resource.getrusage(resource.RUSAGE_SELF)
cpu = end.ru_utime + end.ru_stime - used.ru_utime - used.ru_stime
print("FIGURES", json.dumps({"wall": time.perf_counter() - began, "cpu": cpu}), flush=True)
if rank == 0:
    print(f"plain loop: accuracy {float(right) / len(test_x):.4f}", flush=True)
dist.destroy_process_group()
"""


def one_part(slurm: Slurm, program: str, environ: dict[str, str]) -> dict[str, float]:
    """Wall seconds of the slower task, and CPU seconds of both."""
    command = ["srun", *TASKS, f"--chdir={slurm.folder}", sys.executable, "-c", program]
    done = subprocess.run(
        [*command, str(SCRIPT)], env=environ, capture_output=True, text=True, check=False
    )
    figures = [
        json.loads(line.removeprefix("FIGURES "))
        for line in done.stdout.splitlines()
        if line.startswith("FIGURES ")
    ]
    if done.returncode or len(figures) != 2:
        raise SystemExit(done.stdout + done.stderr)
    shown = [line for line in done.stdout.splitlines() if "accuracy" in line]
    print("   ", *shown, flush=True)
    return {
        "wall": max(found["wall"] for found in figures),
        "cpu": sum(found["cpu"] for found in figures),
    }


def whole(slurm: Slurm, environ: dict[str, str]) -> dict[str, Any]:
    """The script as it stands, to its end: seconds from the command, and at each of its lines."""
    command = ["srun", *TASKS, f"--chdir={slurm.folder}", sys.executable, str(SCRIPT)]
    began, lines = time.monotonic(), []
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append([round(time.monotonic() - began, 1), line.rstrip()])
            print("   ", *lines[-1], flush=True)
    if process.returncode:
        raise SystemExit(f"the script ended with {process.returncode}")
    return {"seconds": round(time.monotonic() - began, 1), "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder with MNIST/raw")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="also the script to its end")
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    found: dict[str, list[dict[str, float]]] = {"plain": [], "allhands": []}
    load, run_through = [], None
    with Slurm(("d1", "d2"), label=f"bench-{os.getpid()}") as slurm:
        environ = slurm.environ(ALLHANDS_DATA=str(Path(options.data).resolve()))
        environ.pop("OMP_NUM_THREADS", None)
        if options.whole:
            run_through = whole(slurm, environ)
        for turn in range(options.turns):
            load.append(round(os.getloadavg()[0], 2))
            for name, program in (("plain", PLAIN), ("allhands", LIBRARY)):
                found[name].append(one_part(slurm, program, environ))
                wall, cpu = found[name][-1]["wall"], found[name][-1]["cpu"]
                print(f"turn {turn + 1}  {name:9s} {wall:6.1f} s, CPU {cpu:6.1f} s", flush=True)
    walls = {name: [part["wall"] for part in parts] for name, parts in found.items()}
    cpus = {name: [part["cpu"] for part in parts] for name, parts in found.items()}
    save(
        "coala_tutorial",
        {
            "tasks": 2,
            "unit": "seconds a round, wall time",
            **summarize(walls, "plain"),
            "cpu_seconds": summarize(cpus, "plain"),
            "load_at_turns": load,
            "whole": run_through,
            **machine(),
        },
    )


if __name__ == "__main__":
    main()
