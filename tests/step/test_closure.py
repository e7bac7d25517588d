"""Optimizers that compute the loss again within a step, as in a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner, UserError
from allhands.step.closure import takes_closure
from tests.conformance.table import difference
from tests.worlds import in_world

SAMPLES, BATCH = 20, 8
WEIGHT = [nn.Parameter(torch.zeros(2))]


class Sharp(torch.optim.SGD):
    """SAM as it is published: the gradients are there when its step is called. It changes weights
    past autograd."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.data = p.data + 0.05 * p.grad
        with torch.enable_grad():
            closure()
        for p, value in zip(parameters, before, strict=True):
            p.data = value
        super().step()


class Published(Sharp):
    """As many are published: the signature says that the closure may be left out."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM requires closure, but it was not provided"
        super().step(closure)


class Own(Published):
    """As the message says."""

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        return super().step(closure)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 6, generator=generator).double(), torch.randint(
        0, 3, (SAMPLES,), generator=generator
    )


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "sharp": lambda model: Sharp(model.parameters(), lr=0.1, momentum=0.9),
    "own": lambda model: Own(model.parameters(), lr=0.1, momentum=0.9),
    "line search": lambda model: torch.optim.LBFGS(
        model.parameters(), max_iter=3, line_search_fn="strong_wolfe"
    ),
}


def trained(name: str, strategy: Any, **options: Any) -> Any:
    model = network()
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=MAKERS[name](model),
        num_epochs=2,
        distributed=strategy,
        loaders={"train": DataLoader(TensorDataset(*samples()), BATCH // (2 if strategy else 1))},
        **options,
    )
    return model.state_dict(), history["train"]["loss"]


def by_hand(name: str) -> Any:
    model, (x, y), losses = network(), samples(), []
    optimizer = MAKERS[name](model)
    for _ in range(2):
        total = 0.0
        for first in range(0, SAMPLES, BATCH):
            batch, target = x[first : first + BATCH], y[first : first + BATCH]

            def closure(batch: torch.Tensor = batch, target: torch.Tensor = target) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch), target)
                loss.backward()
                return loss

            total += closure().item() * len(batch)
            optimizer.step(closure)
        losses.append(total / SAMPLES)
    return model.state_dict(), losses


def of_two() -> dict[str, Any]:
    return {name: trained(name, "ddp") for name in MAKERS}


@pytest.mark.parametrize("name", MAKERS)
def test_one_process_takes_the_steps_of_the_loop(name: str) -> None:
    (weights, losses), right = trained(name, False), by_hand(name)
    assert difference(weights, right[0]) < 1e-10
    assert losses == pytest.approx(right[1], rel=1e-10)


@pytest.mark.serial
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("preloaded")
def test_two_workers_take_the_same() -> None:
    for found in in_world(2, of_two):
        for name, (weights, losses) in found.items():
            right = by_hand(name)
            assert difference(weights, right[0]) < 1e-8, name
            assert losses == pytest.approx(right[1], rel=1e-8), name


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("fsdp", {}, "which strategy 'fsdp' does not; write distributed='ddp'"),
        ("local_sgd", {}, "which strategy 'local_sgd.* does not"),
        (False, {"clip_norm": 1.0}, "clip_norm=1.0 bounds one gradient; leave it out"),
        (False, {"precision": "fp16"}, "write precision='bf16'"),
    ],
)
def test_where_there_is_no_place_for_it_is_refused(
    strategy: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match="LBFGS computes the loss several times.*" + message):
        trained("line search", strategy, **options)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optional_closure_is_none_of_the_steps_business(kind: Any) -> None:
    assert not takes_closure(kind(WEIGHT, lr=0.1))


def test_a_closure_that_is_needed_although_it_is_optional_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MAKERS, "published", lambda model: Published(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match=r"closure.*write `class Own\(Published\)` with `def step"):
        trained("published", False)
