"""Random deaths, hangs, leaves and joins in an elastic training, whose weights are compared in the
end with those of a training that nothing disturbed.

    python benchmarks/soak_membership.py --events 200 --workers 4
    python benchmarks/soak_membership.py --events 20 --workers 2 --device cuda
    python benchmarks/soak_membership.py --events 20 --workers 2 --device cuda --step graph
    python benchmarks/soak_membership.py --events 40 --every 8
    python benchmarks/soak_membership.py --events 20 --shards 2
    python benchmarks/soak_membership.py --events 20 --strategy "KVStore(update='store')"

With --every the training is one by `local_sgd`, with an outer momentum, and is compared with that
of as many workers. With --shards two copies of the model lie in so many shards each, and a worker
is lost once both are whole. With --strategy it is that one, and a
worker is lost once all are there.

Workers of one job are killed (SIGKILL), stopped (SIGSTOP) and told to leave (SIGTERM) at random
moments, also while others are lost, and one is started in the place of each that did not leave. It
ends with 1, and says why, where the job fails, weights differ by more than 1e-5 of their size, a
step was lost or taken twice, or a process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import machine, save_json

HOST_NAME = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from one_card import own_host
own_host()
"""

SCRIPT = """
import faulthandler, json, os, signal, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import allhands

batch, epochs, pause, device = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
steps, every, shards = epochs * -(-403 // int(sys.argv[5])), int(sys.argv[6]), int(sys.argv[7])
strategy = allhands.LocalSGD(every=every, outer="nesterov") if every else None
if shards:
    strategy = allhands.Mesh(dp={"replicate": 2, "shard": shards})
if os.environ.get("SOAK_STRATEGY"):
    strategy = eval("allhands." + os.environ["SOAK_STRATEGY"])
torch.manual_seed(0)
x = torch.randn(403, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
model = torch.nn.Sequential(
    torch.nn.Linear(20, 64), torch.nn.GroupNorm(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
data = TensorDataset(x, y)
loop = allhands.Loop(
    model=model, optimizer=optimizer, scheduler=(scheduler, "step"), device=device,
    strategy=strategy, step=os.environ.get("SOAK_STEP", "auto"),
    loaders={
        "train": DataLoader(data, batch_size=batch, shuffle=True),
        "valid": DataLoader(data, batch_size=batch),
    },
)

def loss_of(batch):
    inputs, targets = batch
    return F.cross_entropy(loop.model(inputs), targets)

faulthandler.register(signal.SIGUSR2, all_threads=True)
trains = Path(f"trains-{os.getpid()}")
for epoch in loop.epochs(epochs):
    for batch in epoch.train:
        loop.step(loss_of, batch)
        trains.touch()
        if not Path("done").exists():  # the training lasts as long as there are events to come
            part = loop.global_step / steps
            time.sleep(pause * (1 if part < 0.5 else 8 if part < 0.9 else 40))
    epoch.evaluate("valid", loss_of)
if loop.main:
    torch.save({name: p.detach().cpu() for name, p in model.named_parameters()}, "final.pt")
    Path("final.json").write_text(json.dumps([loop.history, loop.global_step]))
"""


def launched(workers: int, *options: str) -> list[str]:
    """The words that start a job of so many workers."""
    program = "from allhands.cli.main import main; main()"
    return [sys.executable, "-c", program, "launch", "-n", str(workers), *options]


def run_undisturbed(
    folder: Path, script: Path, batch: int, workers: int, epochs: int, device: str, every: int
) -> None:
    """Train in one process, or where an exchange follows `every` steps, in `workers`."""
    words = launched(workers) if every else [sys.executable]
    own = batch if every else batch * workers
    words += [
        str(script),
        str(own),
        str(epochs),
        "0",
        device,
        str(batch * workers),
        str(every),
        "0",
    ]
    (folder / "done").touch()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def training(folder: Path) -> list[int]:
    """The workers that take steps now."""
    pids = []
    for path in folder.glob("trains-*"):
        pid = int(path.name.removeprefix("trains-"))
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZTX":
                pids.append(pid)
    return pids


def last_step(folder: Path) -> float:
    """When a worker took the newest step, by the system's clock; 0 before the first."""
    return max((path.stat().st_mtime for path in folder.glob("trains-*")), default=0.0)


def disturb(
    job: subprocess.Popen[bytes],
    folder: Path,
    draw: random.Random,
    events: int,
    gap: float,
    leaves: int,
    seconds: float,
    least: int,
    limit: float,
) -> dict[str, int]:
    """Let workers die, so many times, where there are at least so many; how often, by kind. Then,
    and after `limit` seconds, let the job come to its end. It is ended where nobody takes a step
    for so many `seconds`."""
    began = time.time()
    done = {"SIGKILL": 0, "SIGSTOP": 0, "SIGTERM": 0}
    gone: set[int] = set()
    while job.poll() is None:
        if sum(done.values()) >= events or time.time() > began + limit:
            events = sum(done.values())
            (folder / "done").touch()
        if time.time() > max(began, last_step(folder)) + seconds:
            say_where(folder)
            job.terminate()
            job.wait()
            break
        time.sleep(min(3 * gap, draw.expovariate(1 / gap)))
        # Sometimes two at once, or one while the others make up for another.
        for _ in range(min(draw.choice((1, 1, 1, 2)), events - sum(done.values()))):
            living = sorted(set(training(folder)) - gone)
            if len(living) < least:
                break
            kinds = ["SIGKILL", "SIGKILL", "SIGSTOP"] + ["SIGTERM"] * (done["SIGTERM"] < leaves)
            kind = draw.choice(kinds)
            chosen = draw.choice(living)
            gone.add(chosen)
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen, getattr(signal, kind))
                done[kind] += 1
                said = f"{time.time() - began:.0f} s: {kind}, {sum(done.values())} of {events}"
                print(said, file=sys.stderr, flush=True)
    return done


def say_where(folder: Path) -> None:
    """Let the workers that live write where their threads are; and say in what the kernel has
    them."""
    for pid in training(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR2)
            for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
                words = [(task / name).read_text().strip() for name in ("comm", "wchan", "syscall")]
                print(pid, task.name, *words, file=sys.stderr)
    time.sleep(3.0)


def difference(one: Path, other: Path) -> float:
    """The largest difference of the weights in two folders, over their size."""
    mine, theirs = torch.load(one / "final.pt"), torch.load(other / "final.pt")
    return max(float((mine[k] - theirs[k]).norm() / theirs[k].norm()) for k in theirs)


def soak(
    events: int,
    workers: int,
    device: str,
    seed: int,
    gap: float,
    seconds: float,
    every: int,
    shards: int,
    leaves: int,
    limit: float,
    keep: str | None,
    strategy: str | None = None,
    epochs: int | None = None,
    spares: int = 0,
    step: str = "auto",
) -> dict[str, Any]:
    """One job; what has happened, with "wrong": what should not have."""
    draw, batch, pause = random.Random(seed), 8, 0.25
    # A joining worker takes some seconds to start, in which nobody else may be left to kill.
    epochs = epochs or max(3, int(events * (gap + 8) / pause * batch * workers / 403))
    with tempfile.TemporaryDirectory() as name:
        alone, together = Path(name, "alone"), Path(name, "together")
        alone.mkdir()
        together.mkdir()
        script = Path(name, "train.py")
        script.write_text((HOST_NAME if device == "cuda" else "") + SCRIPT)
        run_undisturbed(alone, script, batch, workers, epochs, device, every)
        options = ["--spares", str(spares)] if spares else []
        words = launched(workers, "--elastic", "--max-restarts", "1000000", *options)
        words += [str(script), str(batch), str(epochs), str(pause), device, str(batch * workers)]
        words += [str(every), str(shards)]
        environment = os.environ | {"ALLHANDS_SOAK": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        environment |= {"SOAK_STEP": step, **({"SOAK_STRATEGY": strategy} if strategy else {})}
        began = time.monotonic()
        with (together / "log").open("wb") as log:
            job = subprocess.Popen(
                words,
                cwd=together,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            whole = shards or strategy  # what is lost with one worker is made up for before another
            least = workers if whole else 2
            most_leave = 0 if whole else min(leaves, workers - 2)
            try:
                done = disturb(job, together, draw, events, gap, most_leave, seconds, least, limit)
            finally:
                job.terminate()
                job.wait()
                if keep:
                    shutil.copytree(together, keep, dirs_exist_ok=True)
        said = (together / "log").read_text(errors="replace")
        waits = [
            float(line.rpartition("(")[2].removesuffix(" s)"))
            for line in said.splitlines()
            if "membership " in line and line.endswith(" s)")
        ]
        found: dict[str, Any] = {
            "workers": workers,
            "device": device,
            "every": every,
            "shards": shards,
            "strategy": strategy,
            "step": step,
            "captures": said.count("step: captured"),
            "spares": spares,
            "seed": seed,
            "seconds": time.monotonic() - began,
            "events": done,
            "joins": said.count(" joined"),
            "regroup_seconds": {"median": statistics.median(waits), "most": max(waits)}
            if waits
            else None,
        }
        wrong = [] if job.returncode == 0 else [f"exit code {job.returncode}"]
        if sum(done.values()) < events:
            wrong.append(f"{sum(done.values())} of {events} events before the training had ended")
        if job.returncode == 0:
            mine, theirs = (json.loads((f / "final.json").read_text()) for f in (together, alone))
            found["difference"] = difference(together, alone)
            if found["difference"] > 1e-5:
                wrong.append(f"weights differ by {found['difference']:.2g}")
            if mine[1] != theirs[1] or mine[0]["step"] != theirs[0]["step"]:
                wrong.append(f"{mine[1]} steps, and {theirs[1]} alone")
            for loader in ("train", "valid"):
                pairs = zip(mine[0][loader]["loss"], theirs[0][loader]["loss"], strict=True)
                if any(abs(a - b) > 1e-4 for a, b in pairs):
                    wrong.append(f"losses of '{loader}' differ")
        left = [pid for pid in os.listdir("/proc") if pid.isdecimal() and _is_ours(pid)]
        wrong += [f"processes left: {left}"] if left else []
        if wrong:
            sys.stderr.write(said[-20_000:])
        return found | {"wrong": wrong}


def _is_ours(pid: str) -> bool:
    mark = f"ALLHANDS_SOAK={os.getpid()}".encode()
    with contextlib.suppress(OSError):
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--workers", type=int, help="3; with --shards of both copies")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=float, default=2.0, help="mean seconds between two events")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="the longest time without a step"
    )
    parser.add_argument("--every", type=int, default=0, help="steps between exchanges (local_sgd)")
    parser.add_argument("--shards", type=int, default=0, help="of each of two copies (a mesh)")
    parser.add_argument("--strategy", help="such as KVStore(update='store')")
    parser.add_argument("--step", default="auto", help="graph: steps are captured")
    parser.add_argument("--epochs", type=int, help="of 403 samples; so many as events may take")
    parser.add_argument("--spares", type=int, default=0, help="workers that wait to take part")
    parser.add_argument("--leaves", type=int, default=100, help="at most, of those that leave")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds, no events after them")
    parser.add_argument("--keep", help="a folder for what the job has written")
    parser.add_argument("--save", help="name of a file of results")
    given = parser.parse_args()
    workers = given.workers or 2 * given.shards or 3
    found = soak(
        given.events,
        workers,
        given.device,
        given.seed,
        given.gap,
        given.seconds,
        given.every,
        given.shards,
        given.leaves,
        given.limit,
        given.keep,
        given.strategy,
        given.epochs,
        given.spares,
        given.step,
    )
    print(json.dumps(found, indent=1))
    if given.save:
        save_json(given.save, {"machine": machine(), **found})
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
