"""Schedulers: whose optimizer they change, and how long they are beside the training."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from allhands import Federated, SupervisedRunner, UserError
from allhands.loop.schedule import Schedule
from tests.runner.problems import arguments, classifier, fit


def sgd(model: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD((model or classifier()).parameters(), lr=0.1)


def nested(optimizer: torch.optim.Optimizer, kind: Any = lr_scheduler.ChainedScheduler) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.StepLR(optimizer, 1)]
    return kind(parts) if kind is lr_scheduler.ChainedScheduler else kind(optimizer, parts, [2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda o: lr_scheduler.StepLR(o, 1),
            r"scheduler StepLR was made for another .*scheduler=StepLR\(optimizer, …\)",
        ),
        (
            lambda o: (lr_scheduler.StepLR(o, 1), "step"),
            r"scheduler=\(StepLR\(optimizer, …\), 'step'\)",
        ),
        (lr_scheduler.ReduceLROnPlateau, "scheduler ReduceLROnPlateau was made for another"),
        (nested, "was made for another optimizer .a SGD."),
        (
            lambda o: nested(o, lr_scheduler.SequentialLR),
            "scheduler SequentialLR was made for another",
        ),
    ],
)
def test_a_scheduler_of_another_optimizer_is_refused(make, message):
    model = classifier()
    with pytest.raises(UserError, match=message):
        fit(model=model, optimizer=sgd(model), scheduler=make(sgd(model)))


def test_a_part_of_another_optimizer_is_named_with_the_whole():
    mine = sgd()
    chained = lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(mine, 1), lr_scheduler.StepLR(mine, 2)]
    )
    chained._schedulers[1].optimizer = sgd()
    with pytest.raises(
        UserError, match="scheduler StepLR, inside of ChainedScheduler, was made for another"
    ):
        Schedule(chained).check_optimizer(mine)


def test_an_optimizer_around_another_shares_its_groups():
    inner = sgd()
    outer = sgd()
    outer.param_groups = inner.param_groups
    Schedule(lr_scheduler.StepLR(inner, 1)).check_optimizer(outer)
    Schedule(None).check_optimizer(outer)


def note(scheduler: Any, steps: int | None = 21, epochs: int = 3, **done: Any) -> str:
    return Schedule(scheduler).check_length(steps, epochs, **done)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 3), ""),
        (
            lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
            r"CosineAnnealingLR\(T_max=10\) steps once an epoch.* 3 epochs",
        ),
        (
            lambda o: lr_scheduler.CosineAnnealingLR(o, 21),
            r"T_max=21.* 3 epochs; to step once an optimizer step, write.*'step'",
        ),
        (lambda o: (lr_scheduler.CosineAnnealingLR(o, 21), "step"), ""),
        (
            lambda o: (lr_scheduler.LinearLR(o, total_iters=5), "step"),
            r"total_iters=5\) steps once an optimizer step.* 21 opt",
        ),
        (lambda o: lr_scheduler.PolynomialLR(o, 4), r"PolynomialLR\(total_iters=4\).* 3 epochs"),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=21), ""),
        (
            lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
            r"OneCycleLR\(total_steps=40\).* 21 optimizer steps",
        ),
        (lambda o: lr_scheduler.MultiStepLR(o, [1, 2]), ""),
        (lambda o: lr_scheduler.MultiStepLR(o, [1, 9]), r"last milestone=9.* 3 epochs"),
        (lambda o: lr_scheduler.StepLR(o, 1), ""),
        (lambda o: lr_scheduler.StepLR(o, 7), r"step_size=7.* 3 epochs"),
        (lambda o: nested(o, lr_scheduler.SequentialLR), ""),
        (
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, total_iters=1), lr_scheduler.CosineAnnealingLR(o, 2)],
                [1],
            ),
            "",
        ),
        (
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, total_iters=1), lr_scheduler.CosineAnnealingLR(o, 8)],
                [1],
            ),
            r"1 \+ T_max=9.* 3 epochs",
        ),
        (lr_scheduler.ReduceLROnPlateau, ""),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.9), ""),
    ],
)
def test_a_schedule_of_another_length_is_named_with_both(make, said):
    found = note(make(sgd()))
    assert re.fullmatch(f"note: .*{said}.*" if said else "", found), found


def test_streams_have_no_length_to_compare():
    assert note((lr_scheduler.CosineAnnealingLR(sgd(), 9), "step"), steps=None) == ""


def test_what_was_done_before_counts():
    optimizer = sgd()
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    assert "T_max=6" in note(scheduler, epochs=3)
    scheduler.last_epoch = 3  # of an earlier training of 3 epochs
    assert note(scheduler, epochs=3) == ""
    assert note(scheduler, epochs=6, done_epochs=3) == ""  # resumed: 3 of 6 are done


def test_one_cycle_that_ends_too_early_is_refused_before_the_first_step():
    model = classifier()
    optimizer = sgd(model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        UserError,
        match=r"total_steps=20\).* 21 optimizer steps: it fails after step 20; write "
        r"total_steps=21",
    ):
        fit(model=model, optimizer=optimizer, scheduler=scheduler)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_note_and_the_seed_are_printed(capsys):
    model = classifier()
    optimizer = sgd(model)
    fit(
        model=model,
        optimizer=optimizer,
        scheduler=lr_scheduler.CosineAnnealingLR(optimizer, 50),
        seed=7,
    )
    printed = capsys.readouterr().out
    assert "; seed 7\n" in printed
    assert (
        "note: CosineAnnealingLR(T_max=50) steps once an epoch, and the training has 3 epochs\n"
        in printed
    )


def test_a_schedule_of_rounds_is_compared_with_the_rounds(capsys):
    given = arguments(num_epochs=1)
    scheduler = lr_scheduler.CosineAnnealingLR(given["optimizer"], 50)
    rounds = Federated(clients=2, partition="iid", rounds=2)
    SupervisedRunner(device="cpu").train(
        **given, scheduler=scheduler, distributed=rounds, workers=1
    )
    assert (
        "note: CosineAnnealingLR(T_max=50) steps once a round, and the training has 2 rounds"
        in capsys.readouterr().out
    )
