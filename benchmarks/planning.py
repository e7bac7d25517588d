"""What `allhands.plan` predicts, beside what GPUs have shown: memory and time of a step.

    python benchmarks/planning.py     # needs no GPU: compares with benchmarks/results

The trainings are those of `gpt_parallel.py` and `gpu_workers.py`, and the measured figures those of
their result files. Times are predicted by published peaks alone.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from gpt_parallel import MICROBATCHES, SAMPLES, SIZES
from report import RESULTS, machine, save_json
from torch import nn

from allhands import DDP, FSDP, Pipeline, Single, SupervisedRunner, Tensor
from allhands.models import ResNet18
from allhands.models.transformer import GPT, NextToken
from allhands.planning.candidates import Candidate
from allhands.planning.plan import Prediction, plan
from allhands.strategies import Strategy
from allhands.world.cores import cores

GIB = 2**30
# Where the measured pipelines were cut by times (the smaller one as far as its memory tells).
CUTS = {"163M": "layers.7", "1.1B": "layers.9"}
# Beside PyTorch's tensors, which the measured figures do not count.
OUTSIDE = "CUDA and NCCL"
# The data of gpu_workers.py lie on the device: images of 3 x 32 x 32 in fp32.
IMAGE = 4 * 3 * 32 * 32


def predicted(
    strategy: Strategy, workers: int, precision: str, step: str = "eager", **parts: Any
) -> Prediction:
    candidate = Candidate(strategy, {"name": strategy.name})
    found = plan(
        **parts,
        gpus=workers,
        card="h200",
        link="nvlink",
        precision=precision,
        step=step,
        strategies=[candidate],
    )
    return found.rows[0]


def gpt(samples: int, tied: bool = True, **sizes: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = GPT(**sizes, tied=tied)
    batch = torch.zeros(samples, sizes["block_size"], dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return {
        "model": model,
        "criterion": NextToken(),
        "optimizer": optimizer,
        "batch": (batch, batch),
    }


def images(samples: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = ResNet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.zeros(samples, 3, 32, 32), torch.zeros(samples, dtype=torch.int64)
    return {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": optimizer,
        "batch": batch,
        "runner": SupervisedRunner(),
    }


def row(
    found: Prediction, timed: Prediction, gib: float, seconds: float, more: float = 0.0
) -> dict[str, Any]:
    assert timed.seconds is not None
    memory = (found.peak - found.memory[OUTSIDE] + more) / GIB
    return {
        "predicted gib": round(memory, 3),
        "measured gib": gib,
        "memory": round(memory / gib, 4),
        "predicted ms": round(1e3 * timed.seconds.total, 2),
        "measured ms": round(1e3 * seconds, 2),
        "time": round(timed.seconds.total / seconds, 4),
    }


def in_pieces() -> dict[str, Any]:
    narrow = {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"}
    made: dict[str, Strategy] = {
        "fsdp": FSDP(**narrow),  # type: ignore[arg-type]
        "tensor": Tensor(),
    }
    shown = json.loads((RESULTS / "gpt_parallel_2.json").read_text())["cases"]
    rows = {}
    for case, figures in shown.items():
        kind, size = case.split()
        precision = "fp32" if kind == "fsdp" else "bf16"
        parts = gpt(SAMPLES[kind], tied=False, **SIZES[size])
        strategy = made.get(kind) or Pipeline(microbatches=MICROBATCHES, stages=[CUTS[size]])
        found = predicted(strategy, 2, precision, **parts)
        tokens = SAMPLES[kind] * SIZES[size]["block_size"] * (2 if kind == "fsdp" else 1)
        (speed,) = figures["allhands"]["tokens_per_second"]
        rows[f"{kind}, GPT {size}, 2 GPUs"] = row(
            found, found, figures["allhands"]["gib"], tokens / speed
        )
    return rows


def copies() -> dict[str, Any]:
    rows = {}
    shown = json.loads((RESULTS / "gpu_workers_h200_2.json").read_text())["cases"]
    for case in shown:
        task, workers = case["task"], case["workers"]
        eager = case["contenders"].get("allhands-eager")
        captured = case["contenders"].get("allhands-graph")
        if task == "regression" or eager is None or captured is None:
            continue
        more = 0.0
        if task == "gpt-124M":
            parts = gpt(case["batch"], **SIZES["163M"])
        else:
            parts = images(case["batch"])
            more = case["steps"] * case["batch"] * IMAGE * workers
        strategy = Single() if workers == 1 else DDP()
        found = predicted(strategy, workers, "bf16", **parts)
        timed = predicted(strategy, workers, "bf16", "graph", **parts)
        seconds = captured["microseconds"] / 1e6
        name = f"{strategy.name}, {task}, {workers} GPU{'s' if workers > 1 else ''}"
        rows[name] = row(found, timed, eager["gib"], seconds, more)
    return rows


def large() -> float:
    """Seconds of a plan for a thousand GPUs on all cores, without the start of a process."""
    parts = gpt(8, **SIZES["163M"] | {"heads": 16})  # which 8 GPUs of a host can share
    began = time.perf_counter()
    plan(**parts, gpus=1000, card="h100", precision="bf16", processes=cores())
    return round(time.perf_counter() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="planning")
    out = parser.parse_args().out
    rows = copies() | in_pieces()
    for name, figures in rows.items():
        print(f"{name:34s}", *(f"{key} {value}" for key, value in figures.items()), sep="  ")
    seconds = large()
    print(f"a plan for 1,000 GPUs: {seconds} s")
    save_json(
        out, {"machine": machine(), "cases": rows, "seconds of a plan for 1000 GPUs": seconds}
    )


if __name__ == "__main__":
    main()
