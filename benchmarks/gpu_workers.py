"""A training step on one GPU and on several, beside PyTorch's DistributedDataParallel written by
hand (= 1.0).

    python benchmarks/gpu_workers.py                                    # all tasks, on 1, 2, 4, …
    GPUs of this machine python benchmarks/gpu_workers.py --tasks gpt-124M --workers 1,2 --turns 1
    python benchmarks/gpu_workers.py --device cpu --workers 2 --quick   # that it works, on a CPU

`regression` is the linear regression of the runner tutorial, 10,000 x 10, batch 32 a GPU, Adam,
reading the data included; `resnet-N` is ResNet-18 on synthetic images of 32 x 32, N a GPU, SGD with
momentum, bf16 autocast, channels last; `gpt-124M` has GPT-2's sizes, 16 x 1024 synthetic tokens a
GPU, fused AdamW, bf16 autocast. `contenders.py` has them, and who takes them on. For each number of
workers, processes of one GPU each are started once, and the contenders take turns in them. A figure
is the median of an epoch's seconds on the slowest rank over its steps, without the first epochs,
median over turns; a ratio is to `ddp` in the same turn. Efficiency is a contender's samples a
second on N GPUs over N times its own on one. With one worker `ddp` is the same loop without the
wrapper. A contender that fails is left out from there on, and the file of results says why. No turn
begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import statistics
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from contenders import CONTENDERS, TASKS, Clock, Task, alone, default_contenders
from report import machine, save_json

import allhands
from allhands.launch import spawn, worker

BASE = "ddp"
Turn = tuple[str, int, str]  # task, number of the turn, contender


def measure(turns: list[Turn], quick: bool, device: str, ends: float) -> None:
    """In a worker: all turns, each of which rank 0 announces before it and reports after it."""
    warnings.filterwarnings("ignore")
    world = allhands.init(device=device, timeout=120.0)
    failed = set()
    for turn in turns:
        if (turn[0], turn[2]) in failed:
            continue
        if world.is_main:
            worker.send({"began": turn})
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(
            everyone, one_turn(Task(turn[0], world.world_size, quick), turn[2], world)
        )
        found = slowest(everyone)
        if "failed" in found:
            failed.add((turn[0], turn[2]))
        if world.is_main:
            worker.send({"turn": turn, "found": found})
        late: list[Any] = [time.time() > ends]
        dist.broadcast_object_list(late, src=0)
        if late[0]:
            break
    allhands.finalize()


def one_turn(task: Task, contender: str, world: allhands.World) -> dict[str, Any]:
    """Seconds of each counted epoch over its steps, memory, and what was said about steps; or why
    there are none."""
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    clock, said, benchmarks = Clock(world.device), io.StringIO(), torch.backends.cudnn.benchmark
    began = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        # Lightning changes variables of the environment.
        with mock.patch.dict(os.environ), contextlib.redirect_stdout(said):
            if world.is_alone:
                alone()
            CONTENDERS[contender](task, world, clock)
        found["seconds"] = [seconds / task.steps for seconds in clock.seconds[task.warm :]]
        assert len(found["seconds"]) == task.epochs - task.warm
    except Exception as error:  # the other contenders are worth having
        found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    torch.backends.cudnn.benchmark = benchmarks
    found["wall"] = time.perf_counter() - began
    found["said"] = [
        line.strip() for line in said.getvalue().splitlines() if line.strip().startswith("step")
    ]
    found["gib"] = torch.cuda.max_memory_allocated(world.device) / 2**30 if cuda else None
    gc.collect()  # of the model's cycles, before the next one is made
    if cuda:
        torch.cuda.empty_cache()
    return found


def slowest(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of those of all ranks."""
    failed = next((found["failed"] for found in everyone if "failed" in found), None)
    joint = {"wall": max(found["wall"] for found in everyone), "said": everyone[0]["said"]}
    if failed is not None:
        return joint | {"failed": failed}
    seconds = statistics.median(
        max(ranks) for ranks in zip(*(found["seconds"] for found in everyone), strict=True)
    )
    if everyone[0]["gib"] is not None:
        joint["gib"] = max(found["gib"] for found in everyone)
    return joint | {"microseconds": 1e6 * seconds}


class Results:
    """What has been measured, written after every turn."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.about = {"machine": machine(), "device": args.device, "base": BASE}
        self.turns: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
        self.current: Turn | None = None
        self.broken = False  # some workers have not even begun

    def take(self, workers: int, message: dict[str, Any]) -> None:
        if "began" in message:
            self.current = tuple(message["began"])
            return
        self.add(workers, tuple(message["turn"]), message["found"])

    def add(self, workers: int, turn: Turn, found: dict[str, Any]) -> None:
        task, number, contender = turn
        self.current = None
        self.turns.setdefault((task, workers), {}).setdefault(contender, []).append(
            {"turn": number, **found}
        )
        shown = found["failed"] if "failed" in found else f"{found['microseconds']:10.1f} us a step"
        said = "".join(f"\n    {line}" for line in found.get("said", []))
        print(
            f"{task:10s} x {workers} {contender:16s} {shown}  ({found.get('wall', 0):.1f} s){said}",
            flush=True,
        )
        if self.args.name is not None:
            save_json(self.args.name, self.about | {"cases": self.cases()}, quiet=True)

    def has_failed(self, workers: int, task: str, contender: str) -> bool:
        return any(
            "failed" in found for found in self.turns.get((task, workers), {}).get(contender, [])
        )

    def cases(self) -> list[dict[str, Any]]:
        cases = []
        for (task, workers), by_name in self.turns.items():
            sizes = Task(task, workers, self.args.quick)
            rows = {name: self._row(by_name, name) for name in CONTENDERS if name in by_name}
            for name, row in rows.items():
                one = self.turns.get((task, 1), {}).get(name, [])
                alone = [found["microseconds"] for found in one if "microseconds" in found]
                if workers > 1 and alone and "microseconds" in row:
                    row["efficiency"] = round(statistics.median(alone) / row["microseconds"], 4)
            cases.append(
                {
                    "task": task,
                    "workers": workers,
                    "batch": sizes.batch,
                    "steps": sizes.steps,
                    "contenders": rows,
                }
            )
        return cases

    @staticmethod
    def _row(by_name: dict[str, list[dict[str, Any]]], name: str) -> dict[str, Any]:
        found = by_name[name]
        failed = next((turn["failed"] for turn in found if "failed" in turn), None)
        if failed is not None:
            return {"failed": failed}
        figures = {turn["turn"]: turn["microseconds"] for turn in found}
        row: dict[str, Any] = {
            "microseconds": round(statistics.median(figures.values()), 2),
            "turns": [round(value, 2) for value in figures.values()],
        }
        base = {turn["turn"]: turn.get("microseconds") for turn in by_name.get(BASE, [])}
        ratios = [base[number] / value for number, value in figures.items() if base.get(number)]
        if ratios:
            row["ratio"] = round(statistics.median(ratios), 4)
        if found[0].get("gib") is not None:
            row["gib"] = round(max(turn["gib"] for turn in found), 3)
        if found[0]["said"]:
            row["said"] = found[0]["said"]
        return row

    def table(self) -> None:
        for case in self.cases():
            print(
                f"\n{case['task']}, {case['workers']} worker{'s' if case['workers'] > 1 else ''}, "
                f"{case['batch']} each"
            )
            for name, row in case["contenders"].items():
                if "failed" in row:
                    print(f"  {name:16s} {row['failed']}")
                    continue
                ratio = f"{row['ratio']:6.2f} x" if "ratio" in row else ""
                efficiency = f"  efficiency {row['efficiency']:.3f}" if "efficiency" in row else ""
                print(f"  {name:16s} {row['microseconds']:10.1f} us a step {ratio}{efficiency}")


def run(args: argparse.Namespace, results: Results, workers: int, ends: float) -> None:
    """All turns on so many workers. Where workers have died, new ones go on with the turns of the
    others."""
    left: list[Turn] = []
    for task in args.tasks.split(","):
        names = args.contenders.split(",") if args.contenders else default_contenders(task)
        names = [name for name in CONTENDERS if name in {BASE, *names}]
        for number in range(args.turns):
            left += [(task, number, name) for name in (names if number % 2 == 0 else names[::-1])]
    done: set[Turn] = set()

    def hear(rank: int, message: dict[str, Any]) -> None:
        results.take(workers, message)
        if "turn" in message:
            done.add(tuple(message["turn"]))

    env = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    while left and time.time() < ends:
        results.current = None
        try:
            spawn(
                measure,
                (left, args.quick, args.device, ends),
                workers=workers,
                on_message=hear,
                env=env,
                threads=1 if args.device == "cpu" else None,
            )
            return
        except allhands.WorkerError as error:
            print(error, flush=True)
            if results.current is None:  # not while somebody trained: there is nothing to leave out
                results.broken = True
                return
            results.add(
                workers, results.current, {"failed": str(error).splitlines()[0], "said": []}
            )
            left = [
                t for t in left if t not in done and not results.has_failed(workers, t[0], t[2])
            ]


def main() -> None:
    gpus = torch.cuda.device_count()
    all_sizes = ",".join(str(2**k) for k in range(10) if 2**k <= max(1, gpus))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument(
        "--contenders",
        help=f"of {','.join(CONTENDERS)}; {BASE} is always there. Compiled ones are left out but "
        "for gpt",
    )
    parser.add_argument(
        "--workers", default=all_sizes, help="numbers of workers, one after another"
    )
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no turn begins")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes and a few steps, to see that the script works",
    )
    parser.add_argument(
        "--name", default="gpu_workers", help="of the file of results; none is written with --quick"
    )
    args = parser.parse_args()
    if args.quick:
        args.name = None
    unknown = (set(args.tasks.split(",")) - set(TASKS)) | (
        set((args.contenders or BASE).split(",")) - set(CONTENDERS)
    )
    if unknown:
        parser.error(
            f"there is no {', '.join(sorted(unknown))}; tasks: {', '.join(TASKS)}; contenders: "
            f"{', '.join(CONTENDERS)}"
        )
    sizes = [int(count) for count in args.workers.split(",")]
    if args.device == "cuda" and max(sizes) > gpus:
        if not gpus:
            parser.error(
                "this machine shows no GPU; --device cpu --quick shows that the script works"
            )
        parser.error(
            f"--workers {args.workers} needs {max(sizes)} GPUs, and this machine shows {gpus}; "
            f"write --workers {all_sizes}"
        )
    results, began = Results(args), time.time()
    for workers in sizes:
        run(args, results, workers, began + args.seconds)
    results.table()
    print(f"{time.time() - began:.0f} s")
    if results.broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
