"""Optimizers arrive with their hooks and with what their classes keep, and come back with them."""

from __future__ import annotations

import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from allhands import SupervisedRunner, UserError
from allhands.launch import ship
from allhands.launch.unpicklable import explain
from tests.launch.test_handback import through_a_worker


def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.05)


class Scaled(torch.optim.SGD):
    """SGD whose rate is an attribute of the object; `factor` has a default in the class, too."""

    factor = 1.0

    def __init__(self, parameters: Any, lr: float, factor: float) -> None:
        super().__init__(parameters, lr=lr)
        self.factor, self.count = factor, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * self.factor)


class Chosen(Scaled):
    """Says itself what is sent."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"factor": 3.0}


def stepped_by_function(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = optimizer.step

    def step(closure: Any = None) -> Any:
        clip(optimizer)
        return plain(closure)

    optimizer.step = step  # type: ignore[method-assign, assignment]
    return optimizer


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def scaled(model: nn.Module) -> torch.optim.Optimizer:
    return Scaled(model.parameters(), 0.1, 0.5)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)


def arrived(value: Any, folder: Path) -> Any:
    return ship.load(ship.dump(value, str(folder)))


def test_hooks_and_the_handles_that_remove_them(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    calls: list[str] = []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"more": 1})
    got, got_calls, got_handle = arrived((optimizer, calls, handle), tmp_path)
    got.step()
    got_handle.remove()
    got.step()
    assert (calls, got_calls, got.state_dict()["more"]) == ([], ["step"], 1)


def test_what_a_class_says_is_sent_is_sent_and_its_hooks_too(tmp_path: Path) -> None:
    optimizer = Chosen([nn.Parameter(torch.ones(1))], 0.1, 2.0)
    optimizer.register_step_pre_hook(clip)
    got = arrived(optimizer, tmp_path)
    assert (got.factor, hasattr(got, "count")) == (3.0, False)
    assert list(got._optimizer_step_pre_hooks.values()) == [clip]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_step_that_a_schedule_has_wrapped(replaced: bool, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    if replaced:
        optimizer.step = types.MethodType(lambda self: "mine", optimizer)  # type: ignore[method-assign]
    got, _ = arrived((optimizer, StepLR(optimizer, 1)), tmp_path)
    assert ("step" in vars(got)) is replaced
    assert (got.step() == "mine") is replaced


def test_what_changed_comes_back_and_the_schedule_stays(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = Scaled([parameter], 0.1, 0.5)
    StepLR(optimizer, 1)
    step = vars(optimizer)["step"]

    def change(got: Any) -> None:
        got.param_groups[0]["params"][0].grad = torch.ones(1)
        got.step()
        got.more = got.param_groups
        got.register_step_pre_hook(clip)

    assert through_a_worker(optimizer, change, tmp_path) == ([], [])
    assert (optimizer.count, optimizer.more is optimizer.param_groups) == (1, True)  # type: ignore[attr-defined]
    assert list(optimizer._optimizer_step_pre_hooks.values()) == [clip]
    assert vars(optimizer)["step"] is step


def test_an_attribute_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    optimizer = Scaled([nn.Parameter(torch.ones(1))], 0.1, 0.5)
    optimizer.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="lock"):
        arrived(optimizer, tmp_path)
    assert "optimizer.lock" in str(explain(TypeError("no"), {"optimizer": optimizer}))


def trained(make: Any, **how: Any) -> nn.Module:
    torch.manual_seed(0)
    model, workers = nn.Linear(6, 2), how.get("workers", 1)
    inputs, targets = torch.randn(22, 6), torch.randn(22, 2)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=make(model),
        num_epochs=2,
        datasets={
            "train": torch.utils.data.TensorDataset(inputs, targets),
            "batch_size": 8 // workers,
        },
        **how,
    )
    return model


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("make", [hooked, scaled, stepped_by_function, lbfgs])
def test_workers_train_with_the_optimizer_of_the_caller(make: Any) -> None:
    one, two = trained(make), trained(make, distributed="ddp", workers=2)
    assert torch.allclose(one.weight, two.weight, atol=1e-5)


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("make", "what"), [(hooked, "step hooks"), (stepped_by_function, r"a step\(\) that replaces")]
)
def test_a_store_refuses_steps_that_it_would_not_take(make: Any, what: str) -> None:
    with pytest.raises(UserError, match=rf"the SGD has {what}.*KVStore\(update='worker'\)"):
        trained(make, distributed="kvstore", workers=2)
