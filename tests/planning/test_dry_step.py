"""A step on tensors without data sends and holds what a step of a training does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import allhands
from allhands import (
    DDP,
    FSDP,
    KVStore,
    LocalSGD,
    Mesh,
    Pipeline,
    Single,
    SupervisedRunner,
    Tensor,
    UserError,
)
from allhands.models.transformer import GPT, NextToken
from allhands.planning.dry_step import Workload, dry_step, dry_steps
from allhands.planning.step_recorder import UPDATE
from allhands.strategies import Strategy
from tests.traffic_counter import TrafficCounter
from tests.worlds import in_world

GIB = 2**30
SIZES = {"vocab_size": 32, "block_size": 16, "layers": 2, "heads": 4, "width": 16}
SAMPLES = 8
#: Five numbers of `allhands.loop.agreement`.
AGREEMENT = ("all_reduce", 5 * 8)

STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "ddp": lambda n: DDP(bucket_cap_mb=0.01),
    "ddp bf16": lambda n: DDP(compress="bf16"),
    "ddp sharded": lambda n: DDP(optimizer_state="sharded"),
    "fsdp": lambda n: FSDP(),
    "fsdp kept": lambda n: FSDP(reshard_after_forward=False),
    "kvstore": lambda n: KVStore(),
    "kvstore worker": lambda n: KVStore(update="worker"),
    "local_sgd": lambda n: LocalSGD(every=1),
    "tensor": lambda n: Tensor(),
    "pipeline": lambda n: Pipeline(microbatches=n),
    "gpipe": lambda n: Pipeline(microbatches=n, schedule="gpipe"),
    "hsdp": lambda n: Mesh(dp={"replicate": n // 2, "shard": 2}),
    "tensor x ddp": lambda n: Mesh(tp=2, dp=n // 2),
    "pipeline x ddp": lambda n: Mesh(pp=2, dp=n // 2, pipeline=Pipeline(microbatches=2)),
}


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(**SIZES, tied=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class StepTraffic(allhands.Callback):
    """The collectives from the end of the second step to that of the third."""

    def __init__(self, traffic: TrafficCounter) -> None:
        self.traffic, self.marks = traffic, []

    def on_step_end(self, training: Any) -> None:
        self.marks.append(len(self.traffic.transfers))

    def steps(self) -> list[list[tuple[str, int, int]]]:
        """Those of each step but the first; without the rounds in which ranks agree a few times a
        second whether to stop."""
        sent = self.traffic.transfers
        taken = [plain(sent[begin:end]) for begin, end in itertools.pairwise(self.marks)]
        return [[one for one in step if one[:2] != AGREEMENT] for step in taken]


def plain(transfers: list[Any]) -> list[tuple[str, int, int]]:
    return [(one.kind, one.payload, one.size) for one in transfers]


def trained(name: str, workers: int, accumulate: int) -> list[tuple[str, int, int]]:
    return trained_for(STRATEGIES[name](workers), workers, 3, accumulate)[1]


def trained_for(
    strategy: Strategy, workers: int, steps: int, accumulate: int = 1
) -> list[list[tuple[str, int, int]]]:
    """The collectives of each step of a training but the first."""
    model, optimizer = parts()
    tokens = torch.randint(32, ((steps + 1) * SAMPLES * accumulate * workers, 17))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    with TrafficCounter() as traffic:
        taken = StepTraffic(traffic)
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=NextToken(),
            optimizer=optimizer,
            datasets={"batch_size": SAMPLES, "train": data},
            distributed=strategy,
            callbacks=[taken],
            accumulate=accumulate,
            max_steps=steps,
        )
    return taken.steps()


def workload(accumulate: int) -> Workload:
    model, optimizer = parts()
    batch = torch.zeros(SAMPLES, 16, dtype=torch.int64)
    return Workload(
        model,
        NextToken(),
        optimizer,
        (batch, batch),
        SAMPLES,
        SupervisedRunner(device="cpu"),
        accumulate=accumulate,
        backend="gloo",
    )


def dry(name: str, workers: int, accumulate: int, rank: int) -> list[tuple[str, int, int]]:
    strategy = STRATEGIES[name](workers)
    return plain(dry_step(workload(accumulate), strategy, workers, rank).transfers)


PERIODS: dict[str, Callable[[], LocalSGD]] = {
    "whole": lambda: LocalSGD(every=4),
    "momentum": lambda: LocalSGD(every=3, outer="nesterov"),
    "fragments": lambda: LocalSGD(every=4, fragments=3),
    "compressed": lambda: LocalSGD(every=2, compress="bf16"),
    "beside steps": lambda: LocalSGD(every=4, overlap=2, mix=0.5),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("whole", 2),
        ("fragments", 4),
        *(
            pytest.param(name, workers, marks=pytest.mark.rare)  # every=1 and those above
            for name in PERIODS
            for workers in (2, 4, 8)
            if (name, workers) not in (("whole", 2), ("fragments", 4))
        ),
    ],
)
def test_kinds_of_steps_are_those_of_a_period(name: str, workers: int) -> None:
    """Each step of the second period of a training is like one of the kinds, as often as it
    says."""
    strategy = PERIODS[name]()
    sent = in_world(workers, trained_for, PERIODS[name](), workers, 2 * strategy.every)
    for rank in (0, workers - 1):
        kinds = dry_steps(workload(1), strategy, workers, rank)
        expected = [
            plain(kind.transfers)
            for kind in kinds
            for _ in range(round(kind.share * strategy.every))
        ]
        steps = sent[rank][-strategy.every :]
        assert sorted(steps) == sorted(expected), rank
        assert any(steps)


QUICK = (
    *((name, 2, 1) for name in STRATEGIES if " x " not in name and name not in ("hsdp", "gpipe")),
    *((name, 4, 2) for name in ("hsdp", "tensor x ddp", "pipeline x ddp")),
)
ALL = [
    (name, workers, accumulate)
    for name in STRATEGIES
    for workers in (2, 4, 8)
    for accumulate in (1, 2)
    if (workers > 2 or (" x " not in name and name != "hsdp"))
    # four heads, and two layers with what is beside them, are not cut into eight
    and (workers < 8 or name not in ("tensor", "pipeline", "gpipe"))
]


@pytest.mark.parametrize(
    ("name", "workers", "accumulate"),
    [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.rare]) for one in ALL],
)
def test_the_collectives_are_those_of_a_training(name: str, workers: int, accumulate: int) -> None:
    sent = in_world(workers, trained, name, workers, accumulate)
    for rank in range(workers) if workers == 2 else (0, workers - 1):
        assert dry(name, workers, accumulate, rank) == sent[rank], rank


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FULL = {"vocab_size": 50304, "block_size": 1024, "layers": 12, "heads": 12, "width": 768}
#: What cuBLAS takes on an H200, beside tensors.
LIBRARIES = 64 * 2**20


def gpt_step(
    strategy: Strategy,
    workers: int,
    samples: int,
    precision: str,
    step: str = "eager",
    keeps: bool = False,
    **options: Any,
) -> Any:
    with torch.device("meta"):
        model = GPT(**FULL, **options)
    batch = torch.zeros(samples, 1024, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    given = Workload(
        model,
        NextToken(),
        optimizer,
        (batch, batch),
        samples,
        SupervisedRunner(),
        precision,
        step=step,
        keeps_outputs=keeps,
    )
    return dry_step(given, strategy, workers)


def test_memory_is_what_a_gpu_has_shown() -> None:
    """Of an H200, or two; see benchmarks/planning.py for all cases."""
    cases = json.loads((RESULTS / "gpu_workers_h200_2.json").read_text())["cases"]
    shown = {
        case["workers"]: case["contenders"]["allhands-eager"]["gib"]
        for case in cases
        if case["task"] == "gpt-124M"
    }
    for strategy, workers in ((Single(), 1), (DDP(), 2)):
        step = gpt_step(strategy, workers, 16, "bf16")
        assert (step.peak + LIBRARIES) / GIB == pytest.approx(shown[workers], rel=0.02)
        assert sum(step.kinds.values()) == pytest.approx(step.peak, rel=0.01)


def test_a_captured_step_keeps_its_output_for_metrics() -> None:
    eager = gpt_step(Single(), 1, 8, "bf16")
    captured, kept = (gpt_step(Single(), 1, 8, "bf16", "auto", keeps) for keeps in (False, True))
    assert not eager.captured
    assert captured.captured
    logits = 8 * 1024 * FULL["vocab_size"] * 2
    assert captured.peak == pytest.approx(eager.peak, rel=0.001)
    assert kept.peak - eager.peak == pytest.approx(logits, rel=0.01)
    # As an H200 has shown, see benchmarks/planning_card.py.
    shown = json.loads((RESULTS / "planning_card.json").read_text())["cases"]
    gib = shown["GPT-124M, single, 1 worker"]["gib with making"]
    assert (captured.peak + LIBRARIES) / GIB == pytest.approx(gib, rel=0.02)


def test_images_are_copied_for_a_captured_step() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2))
    batch = torch.zeros(64, 3, 32, 32), torch.zeros(64, 2)
    given = Workload(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch,
        64,
        SupervisedRunner(device="cpu"),
    )
    size = batch[0].nbytes + batch[1].nbytes
    assert dry_step(replace(given, step="eager"), Single(), 1).kinds["input"] == size
    assert dry_step(given, Single(), 1).kinds["input"] == 3 * size


def test_memory_by_kind_is_what_is_known_of_it() -> None:
    step = gpt_step(DDP(optimizer_state="sharded"), 4, 2, "fp32")
    bytes_of_weights = 4 * sum(p.numel() for p in GPT(**FULL).parameters())
    assert step.kinds["weights"] == pytest.approx(bytes_of_weights, rel=0.01)
    # Parts are whole tensors, the embedding is a third of the model, and AdamW keeps two of each.
    assert bytes_of_weights / 2 <= step.kinds["optimizer"] < bytes_of_weights


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_the_update_moves_what_the_optimizer_reads_and_writes(options: dict[str, bool]) -> None:
    with torch.device("meta"):
        model = GPT(**SIZES)
    batch = torch.zeros(SAMPLES, 16, dtype=torch.int64)
    workload = Workload(
        model,
        NextToken(),
        torch.optim.AdamW(model.parameters(), **options),
        (batch, batch),
        SAMPLES,
        SupervisedRunner(device="cpu"),
    )
    step = dry_step(workload, Single(), 1)
    moved = sum(one.moved for phase, one in step.events if phase == UPDATE)
    size = sum(p.nbytes for p in model.parameters())
    # It reads weights, gradients and two states, and writes all but the gradients.
    assert moved >= 7 * size


def test_nothing_of_the_users_is_changed_and_no_world_is_left() -> None:
    model, optimizer = parts()
    before = [p.clone() for p in model.parameters()]
    batch = torch.zeros(SAMPLES, 16, dtype=torch.int64)
    given = Workload(
        model, NextToken(), optimizer, (batch, batch), SAMPLES, SupervisedRunner(device="cpu")
    )
    for name in ("fsdp", "ddp"):
        dry_step(given, STRATEGIES[name](2), 2)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert not optimizer._optimizer_step_pre_hooks
    assert not torch.distributed.is_initialized()
    assert optimizer.param_groups[0]["params"][0] is next(iter(model.parameters()))


def in_a_world() -> str:
    with pytest.raises(UserError) as raised:
        dry_step(workload(1), DDP(), 2)
    return str(raised.value)


def test_a_worker_of_a_world_is_refused() -> None:
    for text in in_world(2, in_a_world):
        assert "a plan needs a process of its own" in text
