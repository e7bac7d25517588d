"""What `allhands.plan` predicts for a card, beside trainings on it: memory and time of a step.

    python benchmarks/planning_card.py --measure      # on a machine with a GPU
    python benchmarks/planning_card.py                # compares with plans, on any machine
    python benchmarks/planning_card.py --measure --device cpu --quick   # that it works

`--measure` trains ResNet-50 (images of 224 x 224, SGD with momentum) and three GPTs (1,024 tokens,
fused AdamW) in bf16, with and without activation checkpointing: in one process, whose steps are
captured and are not, and with several workers on the one card, each with a name of a host of its
own, as nccl wants it. After each training its figures are written down. `--profile` times
operations on the card. The comparison plans the same trainings by these. Several workers on one
card compute in turns, so that their times are no times of several cards; their memory is.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from gpt_parallel import Clock
from one_card import own_host
from report import RESULTS, machine, save_json
from torch import nn
from torch.utils.data import TensorDataset

import allhands
from allhands import FSDP, Pipeline, Single, SupervisedRunner, Tensor
from allhands.data.feed import GATHER_BYTES
from allhands.launch import spawn, worker
from allhands.models.transformer import GPT, NextToken
from allhands.planning.candidates import Candidate
from allhands.planning.machines import card_named
from allhands.planning.measured_profile import MeasuredProfile, write_times
from allhands.planning.operation_times import OperationTimes
from allhands.planning.plan import Prediction, plan
from allhands.strategies import Strategy
from planning import GIB, OUTSIDE

GPTS = {
    "GPT-124M": {"layers": 12, "heads": 12, "width": 768},
    "GPT-350M": {"layers": 24, "heads": 16, "width": 1024},
    "GPT-1.1B": {"layers": 18, "heads": 16, "width": 2048},
}
SAMPLES = {"ResNet-50": 64, "GPT-124M": 8, "GPT-350M": 8, "GPT-1.1B": 4}
MODELS = tuple(SAMPLES)
# Steps before those that are timed, and those: by the number of workers, one or several, which send
# over sockets.
WARM, STEPS = (6, 1), (10, 1)
# GiB of one workspace of cuBLAS on an H200, which each stream has.
WORKSPACE = 1 / 16

Case = tuple[str, str, bool]  # model, strategy, whether layers are computed again


def strategy_of(model: str, name: str) -> Strategy:
    if name == "tensor" and model == "ResNet-50":
        return Tensor(plan={"fc": "vocab"})
    made: dict[str, Strategy] = {
        "single": Single(),
        "single eager": Single(),
        "fsdp": FSDP(),
        "tensor": Tensor(),
        "pipeline": Pipeline(),
    }
    return made[name]


def cases_of(workers: int) -> list[Case]:
    """Those of a number of workers, those that tell most first."""
    if workers == 1:
        return [
            (model, kind, again)
            for kind in ("single", "single eager")
            for again in (False, True)
            for model in MODELS
        ]
    kinds = ("fsdp", "tensor", "pipeline")
    order = ("GPT-350M", "ResNet-50", "GPT-124M", "GPT-1.1B")
    return [(model, kind, again) for model in order for kind in kinds for again in (False, True)]


def words_of(case: Case, workers: int) -> str:
    model, kind, again = case
    count = f"{workers} workers" if workers > 1 else "1 worker"
    return f"{model}, {kind}, {count}" + (", recompute" if again else "")


def parts(model: str, quick: bool) -> tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor]]:
    """What is trained, on the device of the context, and a batch of it."""
    samples = 8 if quick else SAMPLES[model]
    if model == "ResNet-50":
        from torchvision.models import resnet50

        net: nn.Module = resnet50()
        side = 32 if quick else 224
        images = torch.randn(samples, 3, side, side, device="cpu")
        batch = images, torch.randint(1000, (samples,), device="cpu")
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        criterion: nn.Module = nn.CrossEntropyLoss()
    else:
        sizes = dict(GPTS[model], vocab_size=50304, block_size=1024)
        if quick:
            sizes |= {"vocab_size": 64, "block_size": 16, "layers": 4, "heads": 4, "width": 64}
        net = GPT(**sizes, tied=model != "GPT-1.1B")
        tokens = torch.randint(
            sizes["vocab_size"], (samples, sizes["block_size"] + 1), device="cpu"
        )
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        criterion = NextToken()
    return {"model": net, "criterion": criterion, "optimizer": optimizer}, batch


class Measured(Exception):
    """A training has taken its steps. It is given up, as to bring weights back takes longer."""


class CardClock(Clock):
    """Also what PyTorch has reserved, and what of the card is taken by all its processes."""

    def on_step_end(self, training: Any) -> None:
        if self.taken == self.warm + self.steps - 1 and self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            self.used = (total - free) / GIB
            self.reserved = torch.cuda.memory_reserved(self.device) / GIB
        super().on_step_end(None)
        if self.taken == self.warm + self.steps:
            raise Measured


def train(case: Case, world: allhands.World, quick: bool) -> dict[str, Any]:
    """Take a few steps of a training in this world, and tell its figures."""
    model, kind, again = case
    several = world.world_size > 1
    warm, steps = WARM[several], STEPS[several]
    torch.manual_seed(0)
    cuda = world.device.type == "cuda"
    before = torch.cuda.memory_allocated(world.device) / GIB if cuda else None
    with world.device:  # which is quicker
        given, batch = parts(model, quick)
    if several:  # a rank holds a part of it
        given["model"].cpu()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    shares = world.world_size if kind == "fsdp" else 1
    data = TensorDataset(*(torch.cat([one] * (shares * (warm + steps))) for one in batch))
    clock = CardClock(warm, steps, world.device)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(Measured):
        SupervisedRunner(device=world.device.type).train(
            **given,
            distributed=strategy_of(model, kind),
            callbacks=[clock],
            precision="bf16",
            activation_checkpointing=again,
            step="auto" if kind == "single" else "eager",
            datasets={"batch_size": len(batch[0]), "train": data},
        )
    found = clock.found()
    # Beside what a plan counts: the data lie on the device, and batches are gathered ahead.
    row = sum(one[:1].nbytes for one in batch)
    block = min(warm + steps, max(1, GATHER_BYTES // (row * len(batch[0])))) * len(batch[0])
    return {
        "before": before,
        "ms": 1e3 * found["seconds"] / steps,
        "gib": found["gib"],
        "gib with making": found["gib with making"],
        "reserved": getattr(clock, "reserved", None),
        "used": getattr(clock, "used", None),
        "data": (sum(one.nbytes for one in data.tensors) + row * (block - len(batch[0]))) / GIB,
        "said": [line.strip() for line in said.getvalue().splitlines() if "step" in line],
    }


def work(cases: Sequence[Case], device: str, quick: bool, ends: float) -> None:
    """In a worker: all trainings, of which rank 0 sends the figures."""
    if device == "cuda":
        own_host()
    world = allhands.init(device=device, timeout=60.0)
    for case in cases:
        late = torch.tensor(float(time.time() > ends), device=world.device)
        if not world.is_alone:
            torch.distributed.all_reduce(late)
        if late.item():
            break
        try:
            found = train(case, world, quick)
        except Exception as error:  # the other trainings are worth having
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:500]}
        everyone: list[Any] = [found]
        if not world.is_alone:
            everyone = [None] * world.world_size
            torch.distributed.all_gather_object(everyone, found)
        if world.is_main:
            worker.send({"case": case, "found": fullest(everyone)})
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    allhands.finalize()


def fullest(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the ranks' figures the largest each."""
    failed = [found["failed"] for found in everyone if "failed" in found]
    if failed:
        return {"failed": failed[0]}
    keys = ("before", "ms", "gib", "gib with making", "reserved", "used", "data")
    found: dict[str, Any] = {"said": everyone[0]["said"]}
    for key in keys:
        values = [one[key] for one in everyone if one[key] is not None]
        found[key] = round(max(values), 3) if values else None
    if everyone[0]["reserved"] is not None:
        found["reserved by all"] = round(sum(one["reserved"] for one in everyone), 3)
    return found


def measure(given: argparse.Namespace) -> None:
    path = RESULTS / f"{given.out}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result |= {"machine": machine(), "quick": given.quick}
    result.setdefault("cases", {})
    began = time.time()
    if given.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        result["used before"] = (total - free) / GIB
    for count in given.workers:
        cases = [case for case in cases_of(count) if wanted(words_of(case, count), given.only)]
        left = list(cases)

        def hear(rank: int, message: dict[str, Any], count: int = count, left: Any = left) -> None:
            case = tuple(message["case"])
            left.remove(case)
            name = words_of(case, count)
            result["cases"][name] = message["found"]
            print(f"{time.time() - began:6.1f} s  {name}: {message['found']}", flush=True)
            save_json(given.out, result, quiet=True)

        while left and time.time() < began + given.seconds:
            before = len(left)
            try:
                spawn(
                    work,
                    (list(left), given.device, given.quick, began + given.seconds),
                    workers=count,
                    on_message=hear,
                    env={"CUDA_VISIBLE_DEVICES": ""} if given.device == "cpu" else {},
                    threads=1 if given.device == "cpu" else None,
                )
                break
            except allhands.WorkerError as error:  # the worker has died: the others go on
                print(error, flush=True)
                if len(left) == before:
                    result["cases"][words_of(left.pop(0), count)] = {"failed": str(error)[:500]}
                save_json(given.out, result, quiet=True)


def wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(one in name for one in only)


def predicted(case: Case, workers: int, quick: bool, times: OperationTimes | None) -> Prediction:
    model, kind, again = case
    with torch.device("meta"):
        given, batch = parts(model, quick)
    strategy = strategy_of(model, kind)
    return plan(
        **given,
        batch=batch,
        gpus=workers,
        per_host=1,
        card="h200",
        precision="bf16",
        step="auto" if kind == "single" else "eager",
        strategies=[Candidate(strategy, {"name": strategy.name}, again)],
        times=times,
    ).rows[0]


def profile(given: argparse.Namespace) -> None:
    """Time the operations of all trainings on the device that is here."""
    device = torch.device(given.device)
    path = RESULTS / f"{given.out}_profile.json"
    known = MeasuredProfile(path).operations() if path.exists() else {}
    times = OperationTimes(card_named("h200"), known, device)
    for count in given.workers:
        for case in cases_of(count):
            name = words_of(case, count)
            if case[1] == "single eager" or not wanted(name, given.only):
                continue
            began = time.time()
            try:
                row = predicted(case, count, given.quick, times)
            except Exception as error:
                traceback.print_exc()
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            seconds = time.time() - began
            print(f"{name}: {row.seconds} {row.refused} ({seconds:.1f} s)", flush=True)
            write_times(path, times)


def compare(given: argparse.Namespace) -> None:
    path, operations = (RESULTS / f"{given.out}{end}.json" for end in ("", "_profile"))
    result = json.loads(path.read_text())
    known = MeasuredProfile(operations).operations() if operations.exists() else {}
    rows: dict[str, Any] = result.get("compared", {})
    for count in (1, 2, 4):
        for case in cases_of(count):
            name = words_of(case, count)
            shown = result["cases"].get(name)
            if shown is None or "failed" in shown or not wanted(name, given.only):
                continue
            times = OperationTimes(card_named("h200"), known)
            rows[name] = row_of(
                predicted(case, count, result["quick"], times), shown, case[1] == "single"
            )
            print(f"{name:40s}", *(f"{key} {one}" for key, one in rows[name].items()), sep="  ")
    save_json(given.out, result | {"compared": rows})


def row_of(found: Prediction, shown: dict[str, Any], timed: bool) -> dict[str, Any]:
    if found.seconds is None:
        return {"refused": found.refused}
    memory = (found.peak - found.memory[OUTSIDE]) / GIB + shown["data"]
    row: dict[str, Any] = {"predicted gib": round(memory, 3)}
    if shown["gib with making"] is not None:
        # What trainings that were given up before have left; but for a workspace of cuBLAS, which
        # an eager one uses too.
        left = max(0.0, shown["before"] - (0.0 if timed else WORKSPACE))
        measured = shown["gib with making"] - left
        row["measured gib"] = round(measured, 3)
        row["memory"] = round(memory / measured, 4)
        if shown["before"] < 2 * WORKSPACE:  # else the allocator holds what is left, too
            row["reserved gib"] = shown["reserved"]
    row["measured ms"] = round(shown["ms"], 2)
    if timed:
        row["predicted ms"] = round(1e3 * found.seconds.total, 2)
        row["time"] = round(1e3 * found.seconds.total / shown["ms"], 4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="train on the device that is here")
    parser.add_argument("--profile", action="store_true", help="time operations on it")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of trainings")
    parser.add_argument("--seconds", type=float, default=120.0, help="no training begins later")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", default="planning_card")
    given = parser.parse_args()
    if given.measure:
        measure(given)
    if given.profile:
        profile(given)
    if not given.measure and not given.profile:
        compare(given)


if __name__ == "__main__":
    main()
