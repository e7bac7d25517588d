"""A step of many copies, derived from one of two copies, is the one that is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allhands import DDP, FSDP, LocalSGD, Mesh, Pipeline, SupervisedRunner
from allhands.comm.traffic import Collective
from allhands.models.transformer import GPT, NextToken
from allhands.planning.candidates import Candidate
from allhands.planning.derived_steps import DerivedSteps, taken, with_copies
from allhands.planning.dry_step import DryStep, Workload
from allhands.strategies import Strategy
from allhands.strategies.degrees import Degrees


def workload(**options: Any) -> Workload:
    with torch.device("meta"):
        model = GPT(vocab_size=32, block_size=16, layers=2, heads=4, width=16)
    batch = torch.zeros(4, 16, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    runner = SupervisedRunner(device="cpu")
    return Workload(model, NextToken(), optimizer, (batch, batch), 4, runner, **options)


def seen(step: DryStep) -> list[Any]:
    """What a step does, with the ranks of a group in place of its name."""
    return [
        (phase, one.kind, one.payload, one.size, step.groups[one.group])
        if isinstance(one, Collective)
        else (phase, one)
        for phase, one in step.events
    ]


WAYS = {
    "ddp": lambda copies: (DDP(bucket_cap_mb=0.01), copies),
    "local_sgd": lambda copies: (LocalSGD(every=2), copies),
    "fsdp": lambda copies: (Mesh(dp={"replicate": copies, "shard": 2}), 2 * copies),
    "tensor": lambda copies: (Mesh(tp=2, dp=copies), 2 * copies),
    "pipeline": lambda copies: (
        Mesh(pp=2, dp=copies, pipeline=Pipeline(microbatches=2)),
        2 * copies,
    ),
}


def way(name: str, copies: int) -> tuple[Candidate, int]:
    strategy: Strategy
    strategy, gpus = WAYS[name](copies)
    return Candidate(strategy, {"name": name}), gpus


@pytest.mark.parametrize("name", WAYS)
def test_a_derived_step_is_the_one_that_is_taken(name: str) -> None:
    given, take = workload(clip_norm=1.0, accumulate=2), DerivedSteps()
    for copies in (2, 3, 8):
        candidate, gpus = way(name, copies)
        for rank in (0, gpus - 1):
            derived = take(given, candidate, gpus, rank, 4)
            if copies == 2:  # the one that others are derived from
                continue
            real = taken(given, candidate, gpus, rank, 4)
            assert [seen(step) for step in derived] == [seen(step) for step in real], (copies, rank)
            for one, other in zip(derived, real, strict=True):
                assert (one.peak, one.kinds, one.share) == (other.peak, other.kinds, other.share)


def test_only_the_first_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from allhands.planning import derived_steps

    calls = []
    monkeypatch.setattr(derived_steps, "taken", lambda *args: calls.append(args[2]) or taken(*args))
    take = DerivedSteps()
    for copies in (2, 8, 16):
        take(workload(), Candidate(DDP(), {"name": "ddp"}), copies, 0, 4)
        take(workload(), Candidate(FSDP(), {"name": "fsdp"}), copies, 0, 4)
    assert calls == [2, 2, 8, 16]  # shards have other sizes


def test_what_depends_on_the_number_of_copies_is_not_derived() -> None:
    rounded = Candidate(DDP(compress="bf16"), {"name": "ddp"})
    (step,) = taken(workload(), rounded, 2, 0, 4)
    assert with_copies(step, Degrees(replicate=2), Degrees(replicate=8)) is None
