from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.kvstore import KVStore, Trainer, create, optimizer
from tests.kvstore.training import (
    OPTIMIZERS,
    backward,
    by_hand,
    largest_difference,
    line,
    model,
    take_steps,
)

STORES: list[tuple[str | None, bool | None]] = [
    (None, None),
    ("local", False),
    ("local", True),
    ("device", None),
    ("device", True),
]


@pytest.mark.parametrize(("kvstore", "on_store"), STORES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_the_hand_written_loop(
    name: str, kvstore: str | None, on_store: bool | None
) -> None:
    net, store = model(), create("device")
    optimizer_name, options, _ = OPTIMIZERS[name]
    trainer = Trainer(net, optimizer_name, options, kvstore=kvstore, update_on_kvstore=on_store)
    take_steps(net, trainer, store, range(20))
    assert largest_difference(dict(net.state_dict()), by_hand(name)) <= 1e-6


@pytest.mark.parametrize("on_store", [False, True])
def test_gradients_are_cleared_and_several_backward_passes_add_up(on_store: bool) -> None:
    net = line()
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0}, update_on_kvstore=on_store)
    backward(net, 1.0, 2.0)
    backward(net, 6.0)
    trainer.step(3)
    assert net.weight.grad is None
    assert net.weight.item() == -3.0
    assert trainer.last_step is not None
    assert (trainer.last_step.number, trainer.last_step.workers, trainer.last_step.staleness) == (
        1,
        1,
        0.0,
    )


@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({}, -5.0),
        ({"reduction": "mean"}, -10.0),
        ({"aggregate": "sum"}, -5.0),
        ({"aggregate": "sum", "reduction": "mean"}, -10.0),
    ],
)
def test_reductions_of_the_loss(options: dict[str, Any], moved: float, on_store: bool) -> None:
    net = line()
    trainer = Trainer(net, "sgd", {"lr": 1.0}, update_on_kvstore=on_store, **options)
    backward(net, 4.0, 6.0)  # as a sum: 10
    trainer.step(2)
    assert net.weight.item() == moved


@pytest.mark.parametrize("on_store", [False, True])
def test_parameters_on_several_devices(on_store: bool) -> None:
    first, second = line(), line()
    nn.init.ones_(second.weight)  # the first one's values are taken
    replicas = {"w": [first.weight, second.weight], "b": [first.bias, second.bias]}
    trainer = Trainer(replicas, "sgd", {"lr": 1.0}, update_on_kvstore=on_store)
    assert second.weight.item() == 0.0
    backward(first, 1.0)
    backward(second, 2.0, 3.0)
    trainer.step(3)
    assert first.weight.item() == second.weight.item() == -2.0
    backward(first, 3.0)  # nothing for the second device
    trainer.step(1)
    assert first.weight.item() == second.weight.item() == -5.0
    with pytest.raises(UserError, match="reduction='mean' with several replicas"):
        Trainer(replicas, "sgd", reduction="mean")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.two = self.one
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_names_are_keys_shared_ones_come_once_and_frozen_ones_do_not() -> None:
    net, store = Tied(), create("local")
    Trainer(net, "sgd", kvstore=store, update_on_kvstore=True)
    assert sorted(store.shapes) == ["one.bias", "one.weight"]
    assert torch.equal(store.pull("one.bias"), net.one.bias)
    for params in (
        net.named_parameters(),
        dict(net.named_parameters()),
        list(net.named_parameters()),
        net.parameters(),
    ):
        named = create("local")
        Trainer(params, "sgd", kvstore=named, update_on_kvstore=True)
        assert len(named.shapes) == 2


def test_stale_gradients() -> None:
    for on_store in (False, True):
        net = nn.ModuleDict({"used": line(), "other": line()})
        trainer = Trainer(net, "adam", {"lr": 1.0}, update_on_kvstore=on_store)
        backward(net["used"], 1.0)
        with pytest.raises(
            UserError,
            match="no gradient since the last step: 'other.bias', 'other.weight'; call backward",
        ):
            trainer.step(1)
        trainer.step(1, ignore_stale_grad=True)
        assert net["used"].weight.item() == pytest.approx(-1.0)
        assert net["other"].weight.item() == 0.0
        backward(net["used"], 1.0)
        backward(net["other"], 1.0)
        trainer.step(1)  # the other's first step, with the bias correction of a first step
        assert net["other"].weight.item() == pytest.approx(-1.0)


def test_a_step_without_samples_of_anybody() -> None:
    for on_store in (False, True):
        trainer = Trainer(line(), "sgd", {"lr": 1.0}, update_on_kvstore=on_store)
        with pytest.raises(UserError, match="no worker has a sample in this step"):
            trainer.step(0)


@pytest.mark.parametrize("on_store", [False, True])
def test_learning_rates(on_store: bool) -> None:
    net = line()
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0}, update_on_kvstore=on_store)
    moved = []
    for rate in (None, 0.5, 0.125):
        if rate is not None:
            trainer.set_learning_rate(rate)
            assert trainer.learning_rate == rate
        before = net.weight.item()
        backward(net, 1.0)
        trainer.step(1)
        moved.append(before - net.weight.item())
    assert moved == [1.0, 0.5, 0.125]
    with pytest.raises(UserError, match="a learning rate of -1"):
        trainer.set_learning_rate(-1)


@pytest.mark.parametrize("on_store", [False, True])
def test_a_function_as_scheduler_is_called_with_the_number_of_the_step(on_store: bool) -> None:
    net = line()
    trainer = Trainer(
        net, "sgd", {"lr_scheduler": lambda number: 2.0**-number}, update_on_kvstore=on_store
    )
    moved = []
    for _ in range(3):
        before, rate = net.weight.item(), trainer.learning_rate
        backward(net, 1.0)
        trainer.step(1)
        moved.append(before - net.weight.item())
        assert moved[-1] == rate
    assert moved == [0.5, 0.25, 0.125]
    with pytest.raises(UserError, match="set_learning_rate with an lr_scheduler"):
        trainer.set_learning_rate(1.0)


@pytest.mark.parametrize("on_store", [False, True])
def test_schedulers_of_torch(on_store: bool, recwarn: pytest.WarningsRecorder) -> None:
    net = line()
    trainer = Trainer(net, "sgd", {"lr": 1.0}, update_on_kvstore=on_store)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    moved = []
    for _ in range(3):
        before = net.weight.item()
        backward(net, 1.0)
        trainer.step(1)
        scheduler.step()
        moved.append(before - net.weight.item())
    assert moved == [1.0, 0.5, 0.25]
    assert [str(warning.message) for warning in recwarn] == []


def test_groups_of_a_torch_optimizer() -> None:
    for on_store in (False, True):
        net = line()

        def made(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            by_shape = {param.dim(): param for param in params}
            return torch.optim.SGD(
                [{"params": [by_shape[2]], "lr": 1.0}, {"params": [by_shape[1]], "lr": 0.5}]
            )

        trainer = Trainer(net, made, update_on_kvstore=on_store)
        backward(net, 1.0)
        trainer.step(1)
        assert (net.weight.item(), net.bias.item()) == (-1.0, -0.5)
        trainer.optimizer.param_groups[1]["lr"] = 0.25
        backward(net, 1.0)
        trainer.step(1)
        assert (net.weight.item(), net.bias.item()) == (-2.0, -0.75)


def test_optimizers_that_only_a_worker_can_run() -> None:
    net, reference = model(), model()
    trainer = Trainer(net, "adafactor", {"learning_rate": 0.1}, kvstore="device")
    theirs = torch.optim.Adafactor(reference.parameters(), lr=0.1)
    for _ in range(3):
        for each in (net, reference):
            each(torch.ones(2, 5)).sum().backward()
        trainer.step(1)
        theirs.step()
        theirs.zero_grad()
    assert largest_difference(dict(net.state_dict()), dict(reference.state_dict())) == 0.0
    with pytest.raises(UserError, match="cannot run 'adafactor'"):
        Trainer(model(), "adafactor", kvstore="device", update_on_kvstore=True)


def test_between_the_sum_and_the_update_gradients_can_be_changed() -> None:
    first, second = line(), line()
    replicas = {"w": [first.weight, second.weight], "b": [first.bias, second.bias]}
    trainer = Trainer(replicas, "sgd", {"lr": 1.0})
    backward(first, 1.0)
    backward(second, 2.0, 3.0)
    with pytest.raises(UserError, match=r"not added up; call allreduce_grads\(\) first"):
        trainer.update(3)
    trainer.allreduce_grads()
    assert first.weight.grad.item() == second.weight.grad.item() == 6.0
    with pytest.raises(UserError, match="would add up twice"):
        trainer.step(3)
    first.weight.grad.clamp_(max=1.5)
    trainer.update(3)
    assert first.weight.item() == second.weight.item() == -0.5
    on_store = Trainer(line(), "sgd", update_on_kvstore=True)
    for call in (on_store.allreduce_grads, lambda: on_store.update(1)):
        with pytest.raises(
            UserError, match=r"use step\(batch_size\), or Trainer\(…, update_on_kvstore=False\)"
        ):
            call()


def test_weights_changed_behind_the_stores_back() -> None:
    net = line()
    trainer = Trainer(net, "sgd", update_on_kvstore=True)
    backward(net, 1.0)
    net.load_state_dict(line().state_dict())
    with pytest.raises(
        UserError, match="the weights of 'bias' were changed since the Trainer last wrote them"
    ):
        trainer.step(1)


def used_store() -> KVStore:
    store = create("local")
    Trainer(line(), "sgd", kvstore=store, update_on_kvstore=True)
    return store


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], "sgd"), {}, "there is no parameter to train"),
        ((3, "sgd"), {}, "params is a int; Trainer takes a net"),
        (({"w": torch.zeros(2)}, "sgd"), {}, r"params\['w'\] is a Tensor"),
        (([{"params": []}], "sgd"), {}, "params is a list of dicts"),
        ((nn.LazyLinear(2), "sgd"), {}, "has no shape yet"),
        ((line(), "sdg"), {}, "did you mean 'sgd'"),
        ((line(), "sgd", {"lerning_rate": 1}), {}, "no option 'lerning_rate'"),
        ((line(), "lbfgs"), {}, "LBFGS evaluates the loss several times"),
        ((line(), lambda params: 3), {}, "gave a int"),
        (
            (line(), torch.optim.SGD([nn.Parameter(torch.zeros(1))])),
            {},
            "of which 1 are not among the 2 that the Trainer trains",
        ),
        ((line(), "sgd", {"lr_scheduler": 3}), {}, "lr_scheduler is a int"),
        ((line(), "sgd"), {"reduction": "avg"}, "reduction='avg'; it must be one of 'sum', 'mean'"),
        ((line(), "sgd"), {"aggregate": "avg"}, "aggregate='avg'"),
        ((line(), "sgd"), {"clip_norm": 0.0}, "clip_norm=0.0"),
        ((line(), "sgd"), {"kvstore": 3}, "kvstore is a int"),
        ((line(), "sgd"), {"kvstore": "dist_asyn"}, "did you mean 'dist_async'"),
        (
            (line(), "sgd"),
            {"kvstore": None, "update_on_kvstore": True},
            "update_on_kvstore=True without a kvstore",
        ),
        (
            (line(), "sgd"),
            {"kvstore": None, "compression_params": {"type": "2bit"}},
            "compression_params without a kvstore",
        ),
        ((line(), "sgd"), {"compression_params": {"type": "3bit"}}, "there is no codec '3bit'"),
        (
            (line(), "sgd", {"multi_precision": True}),
            {},
            "multi_precision=True needs update_on_kvstore=True",
        ),
    ],
)
def test_what_a_trainer_refuses(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(*arguments, **options)


def test_what_a_step_refuses() -> None:
    with pytest.raises(UserError, match="the store has an optimizer already"):
        Trainer(line(), "sgd", kvstore=used_store())
    for size in (-1, float("nan"), "3", True):
        with pytest.raises(UserError, match="batch_size="):
            Trainer(line(), "sgd").step(size)  # type: ignore[arg-type]
    table = nn.Embedding(4, 2, sparse=True)
    trainer = Trainer(table, "sgd")
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match="the gradient of 'weight' is sparse"):
        trainer.step(1)
    used = line()
    theirs = torch.optim.Adam(used.parameters())
    backward(used, 1.0)
    theirs.step()
    with pytest.raises(UserError, match="has taken steps already"):
        Trainer(used, theirs, update_on_kvstore=True)


@pytest.mark.parametrize(("multi_precision", "after"), [(False, 1.0), (True, 1.0 - 2.0**-8)])
def test_half_precision_weights_with_a_float32_copy(multi_precision: bool, after: float) -> None:
    net = line().bfloat16()
    nn.init.ones_(net.weight)
    options = {"lr": 2.0**-10, "multi_precision": multi_precision}
    trainer = Trainer(net, "sgd", options, kvstore="device", update_on_kvstore=True)
    for _ in range(4):  # each step alone is lost in rounding
        net(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        trainer.step(1)
    assert net.weight.item() == after


def test_optimizer_is_the_module_that_makes_them() -> None:
    net = line()
    trainer = Trainer(net, optimizer.create("sgd", learning_rate=0.5))
    backward(net, 2.0)
    trainer.step(1)
    assert net.weight.item() == -1.0


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import allhands.kvstore, sys; assert 'torch' not in sys.modules; "
        "allhands.kvstore.Trainer; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
