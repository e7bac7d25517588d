from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from allhands.errors import UserError
from allhands.kvstore import specs
from allhands.kvstore.optimizers import (
    ChunkOptimizer,
    OptimizerSpec,
    create,
    hyper,
    known_optimizers,
    spec_from,
    spec_of_torch,
)

COUNT = 1003
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("adam", {"weight_decay": 0.1}),
    ("adam", {"amsgrad": True}),
    ("adamw", {"betas": (0.8, 0.99)}),
    ("adamax", {}),
    ("nadam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("radam", {}),
    ("adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("adadelta", {}),
    ("rmsprop", {}),
    ("rmsprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.01}),
    ("asgd", {"t0": 5}),  # averages from the sixth step on
    ("rprop", {}),
]


def cut(generator: torch.Generator, count: int = COUNT) -> list[slice]:
    """Pieces of odd sizes, one of them empty."""
    edges = sorted({0, count, *torch.randint(count, (24,), generator=generator).tolist()})
    return [slice(5, 5), *(slice(*pair) for pair in pairwise(edges))]


def chunks(spec: OptimizerSpec, weights: torch.Tensor, pieces: list[slice]) -> list[ChunkOptimizer]:
    return [ChunkOptimizer(spec, 0, weights[piece]) for piece in pieces]


def joined(
    optimizers: list[ChunkOptimizer], pieces: list[slice]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The state of the whole vector."""
    tensors: dict[str, torch.Tensor] = {}
    for optimizer, piece in zip(optimizers, pieces, strict=True):
        for name, value in optimizer.state()[0].items():
            tensors.setdefault(name, torch.full((COUNT,), torch.nan))[piece] = value
    assert not any(value.isnan().any() for value in tensors.values())
    return tensors, optimizers[-1].state()[1]


@pytest.mark.parametrize(
    ("name", "options"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_chunks_of_any_size_equal_torch_bit_for_bit_also_when_loaded_halfway_and_cut_otherwise(
    name: str, options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(COUNT, generator=generator)
    whole = torch.nn.Parameter(start.clone())
    reference = specs.CLASSES[name]([whole], foreach=False, **options)
    spec = spec_from(
        OptimizerSpec(name, tuple(json.loads(json.dumps(create(name, **options).groups))))
    )  # as it travels
    weights, pieces = start.clone(), cut(generator)
    optimizers = chunks(spec, weights, pieces)
    for step in range(20):
        grad = torch.randn(COUNT, generator=generator)
        kept = grad.clone()
        rate = 0.02 / (1 + step // 2)
        reference.param_groups[0]["lr"] = rate
        whole.grad = grad.clone()
        reference.step()
        if step == 9:
            tensors, numbers = joined(optimizers, pieces)
            weights, pieces = weights.clone(), cut(generator)
            optimizers = chunks(spec, weights, pieces)
            for optimizer, piece in zip(optimizers, pieces, strict=True):
                optimizer.load_state(
                    {name: value[piece] for name, value in tensors.items()}, numbers
                )
        for optimizer, piece in zip(optimizers, pieces, strict=True):
            optimizer.step(grad[piece], {"lr": rate} if step % 2 == 0 or step == 9 else None)
        assert torch.equal(grad, kept)
    assert torch.equal(weights, whole.detach())
    assert not torch.equal(weights, start)


def test_the_cases_cover_all_that_are_known() -> None:
    assert {name for name, _ in CASES} == set(known_optimizers())


def test_weights_of_16_bits_follow_a_master_of_32() -> None:
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(101, generator=generator).bfloat16()
    whole = torch.nn.Parameter(weights.float())
    reference = torch.optim.AdamW([whole], lr=1e-4)
    optimizer = ChunkOptimizer(create("adamw", lr=1e-4, multi_precision=True), 0, weights)
    without = ChunkOptimizer(create("adamw", lr=1e-4), 0, weights.clone())
    for step in range(12):
        grad = torch.randn(101, generator=generator).bfloat16()
        whole.grad = grad.float()
        reference.step()
        if step == 6:
            state = optimizer.state()
            weights = weights.clone()
            optimizer = ChunkOptimizer(create("adamw", lr=1e-4, multi_precision=True), 0, weights)
            optimizer.load_state(*state)
        optimizer.step(grad)
        without.step(grad)
    master = optimizer.state()[0]["master"]
    assert torch.equal(master, whole.detach())
    assert torch.equal(weights, whole.detach().bfloat16())
    assert not torch.equal(weights, without.weights)  # steps of 1e-4 are lost in 8 bits
    optimizer.load_state({}, {})
    assert torch.equal(optimizer.state()[0]["master"], weights.float())
    assert set(optimizer.state()[0]) == {"master"}
    assert (
        "master"
        not in ChunkOptimizer(create("sgd", multi_precision=True), 0, torch.zeros(2)).state()[0]
    )


def test_names_of_mxnet_are_taken() -> None:
    def group(name: str, **options: Any) -> dict[str, Any]:
        return create(name, **options).groups[0]

    adam = group("Adam", learning_rate=0.1, wd=0.2, beta1=0.8, epsilon=1e-6)
    assert (adam["lr"], adam["weight_decay"], adam["betas"], adam["eps"]) == (
        0.1,
        0.2,
        [0.8, 0.999],
        1e-6,
    )
    assert adam == group(
        "adam",
        lr=torch.tensor(0.1, dtype=torch.float64),
        weight_decay=0.2,
        betas=(0.8, 0.999),
        eps=1e-6,
    )
    assert group("rmsprop", gamma1=0.9, learning_rate=np.float32(0.5))["alpha"] == 0.9
    nag = create("nag", learning_rate=0.1)
    assert (nag.name, nag.groups[0]["nesterov"], nag.groups[0]["momentum"]) == ("sgd", True, 0.9)
    assert (
        create("sgd", multi_precision=True, lazy_update=True).groups[0]["multi_precision"] is True
    )
    assert "multi_precision" not in create("sgd", multi_precision=False).groups[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adm", {}, "no optimizer 'adm'; did you mean 'adam'.*adadelta, adagrad"),
        ("lbfgs", {}, "all parameters at once"),
        ("Adafactor", {}, "row and column.*Known are: adadelta"),
        ("muon", {}, "whole matrix"),
        ("SparseAdam", {}, "RowSparse"),
        ("builtins.eval", {}, "no optimizer"),
        ("sgd", {"lr": -1.0}, "sgd.*Invalid learning rate: -1.0"),
        ("sgd", {"lr": float("nan")}, "lr=nan; it must be a finite number"),
        ("sgd", {"lr": True}, "lr=True"),
        ("sgd", {"lr": "0.1"}, "lr='0.1'"),
        ("sgd", {"nesterov": 1}, "nesterov=1; it must be True or False"),
        ("sgd", {"nesterov": True}, "Nesterov"),
        ("sgd", {"momentun": 0.9}, "no option 'momentun'; did you mean 'momentum'"),
        ("sgd", {"beta1": 0.9}, "no option 'beta1'"),
        ("adam", {"betas": [0.9]}, "2 finite numbers"),
        ("adam", {"beta1": 1.5}, "Invalid beta"),
        (
            "adam",
            {"lr": 0.1, "learning_rate": 0.1},
            "'lr' and 'learning_rate' of 'adam' are the same",
        ),
        ("adam", {"beta2": 0.9, "betas": (0.9, 0.9)}, "the same"),
        ("adam", {"betas": (0.9, 0.9), "beta2": 0.9}, "the same"),
        ("adam", {"lr_scheduler": None}, "set_learning_rate"),
        ("adam", {"rescale_grad": 0.1}, "weight=samples"),
        ("adam", {"clip_gradient": 1.0}, "clamp_"),
        ("adam", {"param_idx2name": {}}, "keys are names"),
        ("adam", {"fused": True}, "plain loop"),
        ("adam", {"lazy_update": False}, "only when they are touched"),
        ("adam", {"multi_precision": "yes"}, "multi_precision='yes'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        create(name, **options)


def test_a_spec_from_elsewhere_is_checked_again() -> None:
    with pytest.raises(UserError, match="no option 'lrr'"):
        spec_from(OptimizerSpec("sgd", ({"lrr": 1.0},)))
    with pytest.raises(UserError, match="no group"):
        spec_from(OptimizerSpec("sgd", ()))
    with pytest.raises(UserError, match="give them to one of both"):
        spec_from(create("sgd"), {"lr": 1.0})
    with pytest.raises(UserError, match="42 is no optimizer"):
        spec_from(42)  # type: ignore[arg-type]


def test_a_torch_optimizer_becomes_a_spec_with_its_groups() -> None:
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW(
        [{"params": [first], "lr": torch.tensor(0.25)}, {"params": [second], "betas": (0.5, 0.75)}],
        lr=0.5,
        foreach=True,
    )
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.5, 0.25], total_steps=10)
    spec, params = spec_of_torch(optimizer)
    assert spec.name == "adamw"
    assert spec.groups[1]["betas"] == [optimizer.param_groups[1]["betas"][0], 0.75]
    assert [[id(one) for one in group] for group in params] == [[id(first)], [id(second)]]
    assert spec_from(OptimizerSpec("adamw", tuple(json.loads(json.dumps(spec.groups))))) == spec
    assert hyper(optimizer.param_groups[1]) == {
        "lr": pytest.approx(optimizer.param_groups[1]["lr"]),
        "betas": spec.groups[1]["betas"],
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    ChunkOptimizer(spec, 1, torch.zeros(3)).step(torch.ones(3), hyper(optimizer.param_groups[1]))
    with pytest.raises(UserError, match="2 groups"):
        spec_from(optimizer)


def test_torch_optimizers_that_a_store_cannot_run_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))

    class Other(torch.optim.SGD):
        pass

    for made, message in (
        (Other([weight]), "Other is no optimizer that a store knows"),
        (torch.optim.LBFGS([weight]), "all parameters at once"),
        (torch.optim.Adam([weight], fused=True), "fused=True"),
        (torch.optim.Adam([weight], differentiable=True), "differentiable=True"),
    ):
        with pytest.raises(UserError, match=message):
            spec_of_torch(made)
    used = torch.optim.Adam([weight])
    weight.grad = torch.ones(2, 2)
    used.step()
    with pytest.raises(UserError, match="has taken steps"):
        spec_from(used)


def test_a_step_refuses_what_it_cannot_do_and_leaves_the_weights() -> None:
    weights = torch.ones(3)
    optimizer = ChunkOptimizer(create("rmsprop"), 0, weights)
    for grad, options, message in (
        (torch.ones(4), None, r"shape \[4\] for a chunk of shape \[3\]"),
        (torch.ones(3), {"lrr": 1.0}, "has no option 'lrr'; did you mean 'lr'"),
        (torch.ones(3), {"centered": True}, "cannot change its option 'centered'"),
        (torch.ones(3), {"lr": -1.0}, "Invalid learning rate"),
    ):
        with pytest.raises(UserError, match=message):
            optimizer.step(grad, options)
    assert torch.equal(weights, torch.ones(3))
    optimizer.step(torch.ones(3))
    with pytest.raises(UserError, match="began with momentum 0"):
        optimizer.step(torch.ones(3), {"momentum": 0.9})
    optimizer.step(torch.ones(3))
    assert optimizer.state()[1] == {"step": 2.0}
    with pytest.raises(UserError, match="1-D"):
        ChunkOptimizer(create("sgd"), 0, torch.ones(3, 1))


def test_a_state_that_does_not_fit_is_refused() -> None:
    optimizer = ChunkOptimizer(create("adam"), 0, torch.ones(3))
    optimizer.step(torch.ones(3))
    tensors, numbers = optimizer.state()
    assert numbers == {"step": 1.0}
    for wrong, single, message in (
        ({**tensors, "exp_avg": torch.ones(2)}, numbers, "'exp_avg' has shape"),
        ({"exp_avg": torch.ones(3)}, numbers, "keeps .*exp_avg_sq.* but the state has"),
        ({**tensors, "sum": torch.ones(3)}, numbers, "the state has.*sum"),
        ({**tensors, "step": torch.ones(3)}, {}, "'step' of 'adam' must be a number"),
        ({**tensors, "master": torch.ones(3)}, numbers, "'master'"),
    ):
        with pytest.raises(UserError, match=message):
            optimizer.load_state(wrong, single)
    assert optimizer.state()[1] == {"step": 1.0}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entries = [
        EntryPoint(name, f"tests.kvstore.test_optimizers:{value}", "allhands.optimizers")
        for name, value in {"sign": "Sign", "lars": "WholeNorm", "broken": "Nothing"}.items()
    ]
    monkeypatch.setattr(specs, "entry_points", lambda group: entries)
    yield
    for name in ("sign", "lars"):
        specs.CLASSES.pop(name, None)
    for cached in (specs.defaults_of, specs.changeable, specs._layout, specs._accepted):
        cached.cache_clear()


class Sign(torch.optim.Optimizer):
    """Steps by the sign of a running mean; keeps its step as a plain number, as optimizers used
    to."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                mean = state.setdefault("mean", torch.zeros_like(weight))
                state["step"] = state.get("step", 0) + 1
                weight.sub_(
                    group["lr"] * mean.lerp_(weight.grad, group["beta"]).sign() / state["step"]
                )


class WholeNorm(Sign):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.sub_(weight.grad / weight.grad.norm())


def test_an_entry_point_adds_an_optimizer_when_it_can_update_chunks(installed: None) -> None:
    assert known_optimizers()[-3:] == ["broken", "lars", "sign"]
    spec = create("sign", lr=0.2)
    assert spec.groups == ({"lr": 0.2, "beta": 0.5},)
    whole = torch.zeros(4, requires_grad=True)
    reference = Sign([whole], lr=0.2)
    weights = torch.zeros(4)
    optimizer = ChunkOptimizer(spec, 0, weights)
    for _ in range(3):
        whole.grad = torch.randn(4)
        reference.step()
        state = optimizer.state()
        optimizer = ChunkOptimizer(spec, 0, weights)
        optimizer.load_state(*state)
        optimizer.step(whole.grad)
    assert torch.equal(weights, whole.detach())
    assert optimizer.state()[1] == {"step": 3}
    assert spec_of_torch(reference)[0] == spec
    with pytest.raises(UserError, match="'lars'.*WholeNorm.*cannot be cut into chunks"):
        create("lars")
    with pytest.raises(UserError, match="'broken'.*cannot be imported"):
        create("broken")
