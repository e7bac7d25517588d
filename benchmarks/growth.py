"""How costs grow with workers, clients, parameters, samples and keys.

    python benchmarks/growth.py [--only workers clients …] [--largest N]

Each size is measured in a process of its own, with one thread. Times are of the processor (user
and system), unless a name says "seconds until": a busy machine changes them little.

* workers: processes with a linear model of 64 x 64 under `ddp` on gloo: a step and a checkpoint of
  one worker, the time until all run, the memory of rank 0.
* clients: rounds of a cohort of 10 out of so many clients, 2 samples each: what comes before the
  first round, a round, memory.
* parameters: a plan of a GPT on the meta device, on 8 GPUs under `ddp` and `fsdp`.
* stored: a checkpoint of a real model with Adam, of so many parameters.
* samples: a data set that computes its samples, shuffled: what comes before the first step,
  memory. 50 steps of 256 samples are taken of each.
* keys: `pushpull` of a list of keys of 16 numbers: the first one and a later one of a store without
  servers, and one through a server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import machine, save_json

Point = dict[str, float]


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def worker(began: float, logdir: str) -> Point:
    """In one of the workers: what a step and a checkpoint take."""
    ready = time.time() - began
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import allhands

    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    rows = 200 * 4 * int(os.environ["WORLD_SIZE"])
    data = TensorDataset(torch.randn(rows, 64), torch.randn(rows, 64))
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loaders={"train": DataLoader(data, batch_size=4)},
        device="cpu",
        logdir=logdir,
    )
    found: Point = {}
    for epoch in loop.epochs(2):
        before = time.process_time()
        for batch in epoch.train:
            loop.step(lambda b: torch.nn.functional.mse_loss(loop.model(b[0]), b[1]), batch)
        found["ms a step"] = (time.process_time() - before) / 200 * 1e3
        before = time.process_time()
        loop.checkpoints.wait()
        loop.checkpoints.save(None, False, {})
        loop.checkpoints.wait()
        found["ms a checkpoint"] = (time.process_time() - before) * 1e3
    return {"seconds until all run": ready, **found, "MB of rank 0": peak_megabytes()}


def workers(count: int) -> Point:
    from allhands.launch.spawn import spawn

    os.environ["ALLHANDS_CURVES"] = "0"
    with tempfile.TemporaryDirectory() as logdir:
        every = spawn(worker, (time.time(), logdir), workers=count, threads=1, preload=["torch"])
    mean = {name: sum(one[name] for one in every) / count for name in every[0]}
    return {
        **mean,
        "seconds until all run": max(one["seconds until all run"] for one in every),
        "MB of rank 0": every[0]["MB of rank 0"],
    }


def clients(count: int) -> Point:
    from allhands.launch.spawn import spawn

    return spawn(rounds, (count,), workers=1, threads=1)[0]


def rounds(count: int) -> Point:
    """In a worker: what rounds out of so many clients take."""
    import torch
    from torch.utils.data import TensorDataset

    from allhands import Callback, SupervisedRunner
    from allhands.federated import Federated

    marks: list[float] = []

    class Marks(Callback):
        def on_epoch_start(self, training: Any) -> None:
            marks.append(time.process_time())

        def on_epoch_end(self, training: Any) -> None:
            marks.append(time.process_time())

    data = TensorDataset(torch.randn(2 * count, 8), torch.randint(0, 2, (2 * count,)))
    model = torch.nn.Linear(8, 2)
    began = time.process_time()
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": torch.utils.data.DataLoader(data, batch_size=2)},
        callbacks=[Marks()],
        distributed=Federated(clients=count, partition="iid", per_round=10, rounds=4),
    )
    each = [after - before for before, after in zip(marks[::2], marks[1::2], strict=True)]
    return {
        "ms before": (marks[0] - began) * 1e3,
        "ms a round": min(each) * 1e3,
        "MB": peak_megabytes(),
    }


def parameters(count: int) -> Point:
    import torch

    from allhands.models import GPT
    from allhands.planning.candidates import Candidate
    from allhands.planning.plan import plan
    from allhands.strategies import DDP, FSDP

    class Transposed(torch.nn.Module):
        """Classes come before positions, as the criterion takes them."""

        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.transpose(1, 2)

    width, depth = _gpt(count)
    with torch.device("meta"):
        model = torch.nn.Sequential(
            GPT(vocab_size=1024, block_size=64, width=width, layers=depth, heads=width // 64),
            Transposed(),
        )
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    began = time.process_time()
    plan(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters()),
        batch=(tokens, tokens),
        gpus=8,
        strategies=[Candidate(DDP(), {"name": "ddp"}), Candidate(FSDP(), {"name": "fsdp"})],
    )
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "layers": depth,
        "seconds of a plan": time.process_time() - began,
        "MB": peak_megabytes(),
    }


def _gpt(count: int) -> tuple[int, int]:
    """Width and layers of about so many parameters, 12 x width^2 a layer."""
    depth = {6: 5, 7: 7, 8: 12, 9: 24}[len(str(count)) - 1]
    return max(64, round((count / 12 / depth) ** 0.5 / 64) * 64), depth


def stored(count: int) -> Point:
    import torch

    from allhands.loop.checkpoint.saver import Saver

    model = torch.nn.Linear(1000, count // 1000, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    times = []
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".growth-") as folder:
        saver = Saver(Path(folder) / "checkpoints")
        for epoch in range(1, 4):
            began = time.process_time()
            saver.save(state, {}, {"epoch": epoch}, None, False)
            saver.wait()
            times.append(time.process_time() - began)
        saver.close()
    return {"ms a checkpoint": min(times) * 1e3, "MB": peak_megabytes()}


def samples(count: int) -> Point:
    import torch
    from torch.utils.data import DataLoader, Dataset

    from allhands import Callback, SupervisedRunner

    marks: list[float] = []

    class Marks(Callback):
        def on_step_end(self, training: Any) -> None:
            marks.append(time.process_time())

    class Computed(Dataset):
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return torch.full((4,), index / count), index % 2

    model = torch.nn.Linear(4, 2)
    began = time.process_time()
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(Computed(), batch_size=256, shuffle=True)},
        max_steps=50 if count > 50 * 256 else count // 256,
        callbacks=[Marks()],
    )
    return {
        "ms until the first step is over": (marks[0] - began) * 1e3,
        "ms a step": (marks[-1] - marks[0]) / (len(marks) - 1) * 1e3,
        "MB": peak_megabytes(),
    }


def pushes(count: int, kind: str) -> list[float]:
    """Seconds of making so many keys, and of three times `pushpull` of all."""
    import torch

    from allhands import kvstore

    torch.set_num_threads(1)
    store = kvstore.create(kind)
    names, values = [str(n) for n in range(count)], [torch.ones(16) for _ in range(count)]
    marks = [time.process_time()]
    store.init(names, values)
    marks.append(time.process_time())
    for _ in range(3):
        store.pushpull(names, values, values)
        marks.append(time.process_time())
    store.close()
    return [after - before for before, after in itertools.pairwise(marks)]


def keys(count: int) -> Point:
    from allhands.launch.spawn import spawn

    made, first, *later = pushes(count, "local")
    (served,) = spawn(pushes, (count, "dist"), workers=1, servers=1, threads=1)
    return {
        "ms of init": made * 1e3,
        "ms of the first pushpull": first * 1e3,
        "ms of a later one": min(later) * 1e3,
        "ms through a server": min(served[2:]) * 1e3,
        "MB": peak_megabytes(),
    }


AXES: dict[str, tuple[Callable[[int], Point], tuple[int, ...]]] = {
    "workers": (workers, (1, 2, 4, 8, 16, 32)),
    "clients": (clients, (10, 100, 1_000, 10_000, 100_000)),
    "parameters": (parameters, (1_000_000, 10_000_000, 100_000_000, 2_000_000_000)),
    "stored": (stored, (1_000_000, 4_000_000, 16_000_000, 64_000_000)),
    "samples": (samples, (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)),
    "keys": (keys, (10, 100, 1_000, 10_000, 100_000)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--largest", type=int, help="leave out what is larger")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        import torch

        torch.set_num_threads(1)
        axis, size = given.point
        print("point " + json.dumps(AXES[axis][0](int(size))))
        return
    path = Path(__file__).parent / "results" / "growth.json"
    result = json.loads(path.read_text()) if path.exists() else {"axes": {}}
    for axis in given.only:
        points = []
        for size in AXES[axis][1]:
            if given.largest is not None and size > given.largest:
                continue
            this = [sys.executable, __file__, "--point", axis, str(size)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "ALLHANDS_OUTPUT": "quiet"}
            done = subprocess.run(this, capture_output=True, text=True, env=environ, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("point ")]
            if done.returncode or not lines:
                raise SystemExit(f"{axis} {size} failed:\n{done.stderr[-3000:]}")
            found = json.loads(lines[0].removeprefix("point "))
            points.append({"size": size, **{k: round(v, 3) for k, v in found.items()}})
            print(axis, points[-1], flush=True)
        result["axes"][axis] = points
    save_json("growth", {**result, "machine": machine()})


if __name__ == "__main__":
    main()
