"""Seconds from the death of a worker to the end of the next optimizer step, beside torchrun.

    python benchmarks/membership.py --turns 10
    python benchmarks/membership.py --turns 3 --more

ResNet-18 on images of 32 x 32 (CIFAR-10's from ALLHANDS_DATA; without them, noise of the same
form), 3 workers on gloo, 8 images a worker. In `allhands --elastic` the others go on and a worker
in its place joins; in `torchrun --max-restarts` the same model, by DistributedDataParallel and with
a checkpoint after each step, is started again. A worker is killed once all have taken some steps;
contenders take turns. Of `allhands` also: for how long the others stand still as a worker joins, by
their own clocks. With --more the turns are added to those in the results.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import RESULTS, machine, save_json, summarize

COMMON = """
import os, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from allhands.models import ResNet18

torch.manual_seed(0)
x, y = torch.load("images.pt")
model = ResNet18()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
steps = Path(f"steps-{os.getpid()}").open("w", buffering=1)

def stepped(workers):
    steps.write(f"{time.time()} {workers}\\n")
"""
ALLHANDS = (
    COMMON
    + """
import allhands

loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
loop = allhands.Loop(model=model, optimizer=optimizer, loaders={"train": loader})

def loss_of(batch):
    images, labels = batch
    return F.cross_entropy(loop.model(images), labels)

for epoch in loop.epochs(1000):
    for batch in epoch.train:
        loop.step(loss_of, batch)
        stepped(loop.world.world_size)
"""
)
TORCHRUN = (
    COMMON
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

# A store of each attempt's own: what the one before has written is still there, and leads to
# processes that are gone.
shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("attempt" + os.environ["TORCHELASTIC_RESTART_COUNT"], shared)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
wrapped, done = DistributedDataParallel(model), 0
saved = Path("checkpoint.pt")
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["done"]
data = TensorDataset(x, y)
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
while True:
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()
        done += 1
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
            torch.save(state, "checkpoint.part")
            os.replace("checkpoint.part", saved)
        stepped(size)
"""
)
WORKERS = 3
JOINS = "others stand still for a join"


def images(path: Path) -> str:
    """Write the images that all read; what they are."""
    import torch

    folder = os.environ.get("ALLHANDS_DATA", "../shared/data")
    with contextlib.suppress(ImportError, OSError):
        sys.path.insert(0, folder)
        load = importlib.import_module("imagepack").load
        x, y = load(folder, "cifar10", "train", parts=[1])
        pixels = torch.as_tensor(x[:2000]).permute(0, 3, 1, 2).float() / 255
        torch.save((pixels, torch.as_tensor(y[:2000]).long()), path)
        return "CIFAR-10"
    torch.save((torch.randn(2000, 3, 32, 32), torch.randint(0, 10, (2000,))), path)
    return "noise"


class Job:
    """A training whose workers write down when each of their steps ended."""

    def __init__(self, script: str, words: list[str], pixels: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        (self.folder / "images.pt").symlink_to(pixels)
        (self.folder / "train.py").write_text(script)
        self.log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, *words, "train.py"],
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def workers(self) -> dict[int, list[tuple[float, int]]]:
        """When each living worker's steps ended, and in a world of what size."""
        found = {}
        for path in self.folder.glob("steps-*"):
            pid = int(path.name.removeprefix("steps-"))
            with contextlib.suppress(OSError, ValueError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    rows = [line.split() for line in path.read_text().splitlines()]
                    found[pid] = [(float(at), int(size)) for at, size in rows]
        return found

    def wait_for(self, steps: int) -> None:
        """Until all workers have taken so many steps."""
        deadline = time.monotonic() + 300
        while True:
            taken = [len(times) for times in self.workers().values()]
            if len(taken) >= WORKERS and min(taken) >= steps:
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log").read_text()[-5000:])
            time.sleep(0.05)

    def kill_one(self, draw: random.Random) -> float:
        """Seconds from the death of a worker to the end of the next step of another."""
        pid = draw.choice(sorted(self.workers()))
        os.kill(pid, signal.SIGKILL)
        killed = time.time()
        deadline = time.monotonic() + 300
        before = set(self.workers())
        while time.monotonic() < deadline:
            for other, steps in self.workers().items():
                # Those who go on without the worker, or who were started after it.
                new = [at for at, size in steps if size < WORKERS or other not in before]
                if new:
                    return new[0] - killed
            time.sleep(0.01)
        raise RuntimeError((self.folder / "log").read_text()[-5000:])

    def close(self) -> str:
        """End it; what it has printed."""
        self.process.terminate()
        self.process.wait()
        self.log.close()
        said = (self.folder / "log").read_text(errors="replace")
        self._folder.cleanup()
        return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--more", action="store_true", help="add to the results that there are")
    given = parser.parse_args()
    elastic = ["-c", "from allhands.cli.main import main; main()", "launch", "-n", str(WORKERS)]
    elastic += ["--elastic", "--max-restarts", "1000"]
    restart = ["-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS)]
    restart += ["--max-restarts", "1000", "--monitor-interval", "0.1", "--standalone"]
    contenders = {
        "allhands --elastic": (ALLHANDS, elastic),
        "torchrun --max-restarts": (TORCHRUN, restart),
    }
    draw = random.Random()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    joins: list[float] = []
    if given.more:
        before = json.loads((RESULTS / "membership.json").read_text())
        samples, joins = before["samples"], before[JOINS]["samples"]
    with tempfile.TemporaryDirectory() as folder:
        pixels = Path(folder, "images.pt")
        what = images(pixels)
        for _ in range(given.turns):
            for name, (script, words) in contenders.items():
                job = Job(script, words, pixels)
                try:
                    job.wait_for(4)
                    samples[name].append(job.kill_one(draw))
                    if script is ALLHANDS:
                        job.wait_for(1)  # of the worker in its place, too
                finally:
                    said = job.close()
                joins += [float(s) for s in re.findall(r"joined; .*\((\d+\.\d+) s\)", said)]
    result = {
        "unit": "seconds from a death to the end of the next step",
        "images": what,
        "machine": machine(),
        **summarize(samples, "torchrun --max-restarts"),
        JOINS: {"median": statistics.median(joins), "samples": joins},
    }
    save_json("membership", result)


if __name__ == "__main__":
    main()
