"""GPTs in pieces beside PyTorch's own parts written by hand: tokens a second and memory of each
card.

    # all GPUs, 163 million and a billion parameters, bf16
    python benchmarks/gpt_parallel.py
    # 2 workers on one GPU, which nccl takes for two hosts; compiled steps beside captured ones
    python benchmarks/gpt_parallel.py --one-card --workers 2 --kinds fsdp --steps-by auto compile
    # that it works, on a CPU
    python benchmarks/gpt_parallel.py --device cpu --sizes tiny --out tiny

For each kind (fsdp, tensor, pipeline) and size, `gpt_by_hand.py` and allhands take turns in the
same processes: each makes its model, takes some steps to warm up, and is timed over the next ones,
over synthetic tokens that lie on the device. Both use the same model, criterion, optimizer (AdamW,
weights in fp32) and samples in a step; the time is that of the slowest card. Memory
is the most that a card has held at once: from the first step that is timed, and from before the
model was made. The ratio is
of tokens a second, to those of the one by hand in the same turn. No case begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import gpt_by_hand
import torch
from one_card import own_host
from report import machine, save_json
from torch.utils.data import TensorDataset

import allhands
from allhands import FSDP, Callback, Pipeline, SupervisedRunner, Tensor
from allhands.launch import spawn
from allhands.models.transformer import GPT, NextToken
from allhands.step import STEPS
from allhands.strategies import Strategy

SIZES = {
    "tiny": {"vocab_size": 64, "block_size": 32, "layers": 8, "heads": 4, "width": 32},
    "163M": {"vocab_size": 50304, "block_size": 1024, "layers": 12, "heads": 12, "width": 768},
    "1.1B": {"vocab_size": 50304, "block_size": 1024, "layers": 18, "heads": 16, "width": 2048},
}
# Samples of a step on each data rank, which is every card, or all of them together.
SAMPLES = {"fsdp": 8, "tensor": 8, "pipeline": 32}
MICROBATCHES = 8
KINDS = tuple(SAMPLES)


def cards_ready(device: torch.device) -> None:
    """Wait for this card, and for the others."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


class Clock(Callback):
    """The seconds of the steps after the first ones, and the memory that they took."""

    def __init__(self, warm: int, steps: int, device: torch.device) -> None:
        self.warm, self.steps, self.device, self.taken = warm, steps, device, 0
        self.made: float | None = None
        cards_ready(device)
        self.forget()

    def forget(self) -> None:
        """Begin anew with the most that the card has held."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_step_end(self, training: Any) -> None:
        self.taken += 1
        if self.taken == self.warm:
            cards_ready(self.device)
            self.made = self._most()
            self.forget()
            self.started = time.perf_counter()
        elif self.taken == self.warm + self.steps:
            cards_ready(self.device)
            self.seconds = time.perf_counter() - self.started
            self.peak = self._most()
            if training is not None:
                training.stop("measured", now=True)

    def _most(self) -> float | None:
        return (
            torch.cuda.max_memory_allocated(self.device) / 2**30
            if self.device.type == "cuda"
            else None
        )

    def found(self) -> dict[str, Any]:
        with_making = None if self.made is None or self.peak is None else max(self.made, self.peak)
        return {"seconds": self.seconds, "gib": self.peak, "gib with making": with_making}


def by_hand(kind: str, sizes: dict[str, int], clock: Clock, tokens: torch.Tensor) -> None:
    device, count = clock.device, SAMPLES[kind]
    if kind == "pipeline":
        step = gpt_by_hand.pipeline(sizes, device, MICROBATCHES)
    else:
        step = getattr(gpt_by_hand, kind)(sizes, device)
    share = tokens
    if kind == "fsdp":
        share = tokens.view(clock.warm + clock.steps, -1, count, tokens.shape[1])[
            :, torch.distributed.get_rank()
        ].flatten(0, 1)
    share = share.to(device)
    for batch in share.split(count):
        step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        clock.on_step_end(None)


def ours(
    kind: str, sizes: dict[str, int], clock: Clock, tokens: torch.Tensor, step: str = "auto"
) -> None:
    device, narrow = clock.device, clock.device.type == "cuda"
    # drawn there, which is quicker, and kept elsewhere: the memory that is measured is the
    # strategy's
    with device:
        torch.manual_seed(0)
        model = GPT(**sizes, tied=False).cpu()
    clock.forget()
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpt_by_hand.RATE, fused=narrow)
    formats: dict[str, Any] = (
        {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"} if narrow else {}
    )
    made: dict[str, Callable[[], Strategy]] = {
        "fsdp": lambda: FSDP(**formats),
        "tensor": Tensor,
        "pipeline": lambda: Pipeline(microbatches=MICROBATCHES, balance="measured"),
    }
    SupervisedRunner(device=device.type).train(
        model=model,
        criterion=NextToken(),
        optimizer=optimizer,
        distributed=made[kind](),
        callbacks=[clock],
        step=step,
        precision="bf16" if narrow and kind != "fsdp" else "fp32",
        datasets={
            "batch_size": SAMPLES[kind],
            "train": TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        },
    )


def measure(
    kind: str,
    size: str,
    turns: tuple[int, int, int],
    device: str,
    steps_by: Sequence[str],
    one_card: bool,
) -> dict[str, list[dict[str, Any]]]:
    """On each rank: every contender's figures, turn by turn; `turns` is how many there are, and the
    steps of each that warm up and that count."""
    if one_card:
        own_host()
    rounds, warm, steps = turns
    world = allhands.init(device=device)
    sizes = SIZES[size]
    count = SAMPLES[kind] * (world.world_size if kind == "fsdp" else 1) * (warm + steps)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        sizes["vocab_size"], (count, sizes["block_size"] + 1), generator=generator
    )
    contenders: dict[str, Callable[..., None]] = {"by hand": by_hand}
    for step in steps_by:
        name = "allhands" if step == "auto" else f"allhands, {step}"
        contenders[name] = functools.partial(ours, step=step)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, contender in list(contenders.items())[:: 1 if turn % 2 == 0 else -1]:
            clock = Clock(warm, steps, world.device)
            contender(kind, sizes, clock, tokens)
            found[name].append(clock.found())
            gc.collect()  # of the model's cycles, before the next one is made
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
    allhands.finalize()
    return found


def slowest(by_rank: list[dict[str, list[dict[str, Any]]]], tokens: int) -> dict[str, Any]:
    """Tokens a second and the fullest card's memory of each contender, and the ratios turn by
    turn."""
    result: dict[str, Any] = {}
    for name in by_rank[0]:
        turns = list(zip(*(found[name] for found in by_rank), strict=True))
        speeds = [tokens / max(rank["seconds"] for rank in turn) for turn in turns]
        result[name] = {"tokens_per_second": [round(speed, 1) for speed in speeds]}
        for key in ("gib", "gib with making"):
            if turns[0][0][key] is not None:
                result[name][key] = round(max(rank[key] for turn in turns for rank in turn), 3)
    raw = result["by hand"]
    for one in result.values():
        if one is not raw:
            pairs = zip(one["tokens_per_second"], raw["tokens_per_second"], strict=True)
            one["speed"] = round(statistics.median(a / b for a, b in pairs), 4)
            if "gib" in one:
                # A captured step allocates as it is captured, and not as it is replayed.
                one["memory"] = round(one["gib with making"] / raw["gib with making"], 4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["163M", "1.1B"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument(
        "--workers", type=int, help="default: one a GPU of this machine, and 2 without"
    )
    parser.add_argument("--one-card", action="store_true", help="all workers share the first GPU")
    parser.add_argument("--steps-by", nargs="+", choices=STEPS, default=["auto"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument(
        "--out", help="name of the file of results; default: gpt_parallel_[one_card_]WORKERS"
    )
    given = parser.parse_args()
    if given.workers is None:
        given.workers = torch.cuda.device_count() if given.device == "cuda" else 2
        if given.workers < 2:
            print("gpt_parallel: left out, this machine shows fewer than 2 GPUs")
            return
    where = "one_card_" if given.one_card else ""
    given.out = given.out or f"gpt_parallel_{where}{given.workers}"
    settings = {
        "machine": machine(),
        "workers": given.workers,
        "one_card": given.one_card,
        "device": given.device,
        "rounds": given.rounds,
        "steps": given.steps,
        "samples": SAMPLES,
        "microbatches": MICROBATCHES,
        "sizes": {size: SIZES[size] for size in given.sizes},
    }
    started, cases = time.perf_counter(), {}
    for size in given.sizes:
        for kind in given.kinds:
            if time.perf_counter() - started > given.seconds:
                print(f"{kind} {size}: left out, after {given.seconds:.0f} s")
                continue
            turns = given.rounds, given.warm, given.steps
            arguments = (kind, size, turns, given.device, given.steps_by, given.one_card)
            try:
                by_rank = spawn(
                    measure,
                    arguments,
                    workers=given.workers,
                    threads=1 if given.device == "cpu" else None,
                )
            except allhands.WorkerError as error:  # the other cases are worth having
                print(f"{kind} {size} failed:\n{error}", flush=True)
                continue
            samples = SAMPLES[kind] * (given.workers if kind == "fsdp" else 1)
            case = cases[f"{kind} {size}"] = slowest(
                by_rank, samples * SIZES[size]["block_size"] * given.steps
            )
            print(f"{kind} {size}", json.dumps(case), flush=True)
            save_json(given.out, settings | {"cases": cases})
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
