"""What local SGD refuses, how it cuts a model, and what is left of numbers that travel in fewer
bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import LocalSGD, Single, SupervisedRunner, UserError, World
from allhands.cli.run_objects import strategy_from
from allhands.config import read_run
from allhands.loop.workers import Plan
from allhands.strategies import local_sgd
from allhands.strategies.base import BindOptions, Bound
from allhands.strategies.local_sgd_exchange import LocalSGDExchange
from allhands.strategies.local_sgd_fragments import cut_in_fragments, layers_of
from allhands.strategies.optimizer_means import own_state, take_own_state
from allhands.verify.report import LOSSY, SAME
from tests.runner.problems import arguments, classification, classifier, fit


def world_of(size: int, rank: int = 0) -> World:
    return World(rank, rank, 0, size, size, torch.device("cpu"), "gloo", "explicit")


def bound(strategy: LocalSGD, model: nn.Module, workers: int) -> Bound:
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]
    return strategy.bind(model, torch.optim.SGD(parameters, lr=0.1), world_of(workers))


def parts_of(made: Bound) -> list[Any]:
    assert isinstance(made.exchange, LocalSGDExchange)
    return made.exchange.own.parts


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, r"every=0\); it must be a whole number of steps, at least 1"),
        ({"every": 2.5}, "whole number of steps"),
        (
            {"outer": "adam"},
            "it must be 'average' or {'name': 'nesterov', 'lr': 0.7, 'momentum': 0.9}",
        ),
        ({"outer": {"lr": 0.7}}, "it must be 'average' or"),
        (
            {"outer": {"name": "average", "lr": 1.0}},
            "'average' has no options; write outer='average'",
        ),
        ({"outer": {"name": "nesterov", "beta": 0.9}}, "no option 'beta'; it has lr and momentum"),
        ({"outer": {"name": "nesterov", "lr": 0}}, "lr must be a positive number"),
        (
            {"outer": {"name": "nesterov", "momentum": 1.0}},
            "momentum must be at least 0 and below 1",
        ),
        ({"fragments": 0}, "whole number of at least 1"),
        ({"every": 2, "fragments": 3}, "set fragments to 2 or less, or every to 3"),
        ({"overlap": -1, "mix": 0.5}, "whole number of steps, at least 0"),
        ({"every": 2, "overlap": 2, "mix": 0.5}, "set overlap to 1 or less, or every to 3"),
        ({"overlap": 2}, "set mix to the part of its own weights that it keeps, such as 0.5"),
        ({"overlap": 2, "mix": 0.5, "compress": "int8"}, "leave one of the two settings out"),
        ({"compress": "fp8"}, r"LocalSGD\(compress='fp8'\): there is no codec 'fp8'"),
        (
            {"compress": "2bit"},
            "chosen for gradients, and weights change by other amounts; write 'int8'",
        ),
        ({"compress": "powersgd"}, "which only DDP has; write 'int8'"),
        ({"exchange": "bf16", "compress": "bf16"}, "leave exchange out"),
        ({"mix": 1}, "at least 0 and below 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        LocalSGD(**settings)


def test_trainings_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match="2 layers with trained parameters of their own; set fragments to 2 or less"
    ):
        bound(LocalSGD(fragments=3), classifier(), 1)
    with pytest.raises(UserError, match="no parameter is trained; write distributed='ddp'"):
        bound(LocalSGD(), nn.ReLU(), 1)
    for changes, said in (
        ({"precision": "fp16"}, "write precision='bf16'"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "write reduction='mean'"),
    ):
        with pytest.raises(UserError, match=said):
            SupervisedRunner(device="cpu").train(
                **arguments(**changes), distributed=LocalSGD(), workers=2
            )
    monkeypatch.setenv("ALLHANDS_ON_WORKER_FAILURE", "continue")
    with pytest.raises(UserError, match="write --on-worker-failure stop, with --max-restarts 3"):
        LocalSGD().check(world_of(2))


def test_exact_where_the_mathematics_says_so() -> None:
    model = classifier()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    assert LocalSGD(every=1).exact_for(sgd, None)
    assert not LocalSGD(every=1).exact_for(sgd, 1.0)
    assert not LocalSGD(every=1).exact_for(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None
    )
    assert not LocalSGD(every=1).exact_for(torch.optim.Adam(model.parameters()), None)
    for other in ({"every": 2}, {"outer": "nesterov"}, {"compress": "bf16"}, {"mix": 0.5}):
        assert not LocalSGD(**({"every": 1} | other)).exact_for(sgd, None)
    assert not LocalSGD.exact


# rare: verify/test_causes.py has a strategy that says it is lossy.
@pytest.mark.rare
@pytest.mark.serial
def test_verify_tells_the_exact_from_the_lossy() -> None:
    model = classifier()
    report = allhands.verify(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        workers=2,
        steps=7,
        loaders={"train": DataLoader(classification(50), 4, shuffle=True)},
        runner=SupervisedRunner(device="cpu"),
        strategies=[LocalSGD(every=1), LocalSGD(every=3)],
    )
    exact, lossy = report.rows
    assert (exact.verdict, lossy.verdict) == (SAME, LOSSY)
    assert exact.difference < 1e-6 < lossy.difference


def test_layers_are_dealt_in_their_order_to_fragments_of_about_one_size() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 100), nn.Linear(100, 4), nn.LayerNorm(4)
    )
    model[1].weight.requires_grad_(False)
    layers = layers_of(model)
    assert [len(layer) for layer in layers] == [2, 1, 2, 2, 2]
    expected: list[tuple[int, list[list[str]]]] = [
        (1, [["0", "1", "2", "3", "4"]]),
        (2, [["0", "1", "2"], ["3", "4"]]),
        (3, [["0", "1"], ["2"], ["3", "4"]]),
        (5, [["0"], ["1"], ["2"], ["3"], ["4"]]),
    ]
    for count, wanted in expected:
        fragments = cut_in_fragments(layers, count, 8)
        assert [sorted({name[0] for name in part.names}) for part in fragments] == wanted
        assert fragments[-1].offset == 0
    assert [part.offset for part in cut_in_fragments(layers, 5, 8)] == [1, 3, 4, 6, 0]


def test_old_names_of_formats_warn() -> None:
    with pytest.warns(FutureWarning, match=r"LocalSGD\(exchange=…\).*write LocalSGD\(compress=…\)"):
        assert LocalSGD(exchange="int8").compress == {"name": "int8"}
    with pytest.warns(FutureWarning, match=r"exchange='fp32'.*write LocalSGD\(\)"):
        assert LocalSGD(exchange="fp32").compress is None


def test_one_worker_averages_nothing_and_has_an_outer_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        SupervisedRunner,
        "_plan",
        lambda self, strategy, count: Plan(strategy or Single(), 0, "cpu"),
    )
    ours, _ = fit(distributed=LocalSGD(every=2))
    alone, _ = fit(distributed=None)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), alone.parameters(), strict=True)
    )
    strategy = LocalSGD(every=1, outer={"name": "nesterov", "lr": 1.0, "momentum": 0.5})
    model, data = nn.Linear(1, 1, bias=False), torch.ones(3, 1)
    nn.init.zeros_(model.weight)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=lambda output, target: -output.mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loaders={"train": DataLoader(TensorDataset(data, data), 1)},
        num_epochs=1,
        distributed=strategy,
    )
    # Each change is 1 upwards; the velocity is 1, 1.5 and 1.75, and a step is 1 + velocity / 2.
    assert model.weight.item() == pytest.approx(1.5 + 1.75 + 1.875)


def test_what_was_lost_is_owed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two have saved in int8; rank 0 of three, and each of two in fp32, add what all have lost to
    their next changes."""
    (part,) = parts_of(bound(LocalSGD(every=4, compress="int8"), classifier(), 1))
    zeros = torch.zeros_like(part.anchor)
    state = {
        "workers": 2,
        "fragments": 1,
        "outer": {"name": "average"},
        "anchor": part.by_name(part.anchor),
        "momentum": {},
        "epoch": [0, 0],
    }
    lost = {f"residual/{name}": value for name, value in part.by_name(zeros + 0.25).items()}
    lost |= {f"owed/{name}": value for name, value in part.by_name(zeros + 0.125).items()}
    for strategy, workers, tensors, expected in (
        (LocalSGD(every=4, compress="int8"), 3, lost, 3 * (0.25 / 2 + 0.125)),
        (LocalSGD(every=4, compress="int8"), 3, {}, None),
        (LocalSGD(every=4), 2, lost, 2 * (0.25 / 2 + 0.125)),
    ):
        monkeypatch.setattr(local_sgd, "broadcast_tensors", lambda tensors, world: None)
        made = bound(strategy, classifier(), workers)
        made.exchange.load_state_dict(state)
        assert made.exchange.load_own_tensors(tensors)
        made.exchange.begin(5)
        residual = parts_of(made)[0].residual
        assert (None if residual is None else residual.unique().tolist()) == (
            None if expected is None else [expected]
        )


def test_an_optimizers_state_in_tensors_and_back() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    state: Any = {
        parameters[0]: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.ones(2),
            "count": 5,
            "flag": None,
        }
    }
    optimizer.state.update(state)
    tensors = own_state(state, optimizer)
    assert sorted(tensors) == ["number/0/count", "optimizer/0/exp_avg", "optimizer/0/step"]
    optimizer.state[parameters[0]] |= {"step": torch.tensor(9.0), "count": 9}
    optimizer.state[parameters[1]] = {"step": torch.tensor(9.0)}  # the mean's; this rank had none
    back = take_own_state(tensors, optimizer)
    assert list(back) == parameters[:1]
    found = back[parameters[0]]
    assert (float(found["step"]), found["count"], found["flag"], found["exp_avg"].tolist()) == (
        3.0,
        5,
        None,
        [1.0, 1.0],
    )


def test_the_run_file_chooses_it() -> None:
    given = "strategy={name: local_sgd, every: 8, outer: {name: nesterov, lr: 0.5}, compress: int8}"
    strategy = strategy_from(read_run(overrides=[given]))
    assert isinstance(strategy, LocalSGD)
    assert (strategy.every, strategy.compress) == (8, {"name": "int8"})
    assert strategy.outer == {"name": "nesterov", "lr": 0.5, "momentum": 0.9}
    with pytest.raises(UserError, match="strategy: LocalSGD.every=0"):
        strategy_from(read_run(overrides=["strategy.name=local_sgd", "strategy.every=0"]))
    with pytest.raises(UserError, match="local_sgd has no such option; .*every"):
        strategy_from(read_run(overrides=["strategy.name=local_sgd", "strategy.evry=8"]))


@pytest.mark.parametrize(
    ("every", "optimizer", "clip_norm", "notes"),
    [
        (1, torch.optim.SGD, None, 0),
        (1, torch.optim.Adam, None, 1),
        (1, torch.optim.SGD, 1.0, 1),
        (4, torch.optim.Adam, None, 0),
    ],
)
def test_a_note_says_where_it_is_not_the_training_of_one_process(
    every: int,
    optimizer: Any,
    clip_norm: float | None,
    notes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_sgd, "broadcast_tensors", lambda tensors, world: None)
    strategy = LocalSGD(every=every)

    def said(kind: Any, bound: float | None, workers: int = 2) -> list[str]:
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        options = BindOptions(clip_norm=bound)
        made = strategy.bind(model, optimizer, world_of(workers), options)
        return list(made.exchange.notes)

    assert len(said(optimizer, clip_norm)) == notes
    assert all("another training" in note for note in said(optimizer, clip_norm))
    assert said(optimizer, clip_norm, workers=1) == []
    assert said(torch.optim.SGD, None) == []  # the next training with the same object
