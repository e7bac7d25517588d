"""Captured optimizer steps: what is looked for before a step is captured, and that a replay is the
step. On a processor a graph is the function itself; what is of CUDA graphs alone is in
`test_captured_gpu`."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from allhands import UserError
from allhands.step.cuda_graphs import Graphs
from tests.function_graphs import FunctionGraphs
from tests.step.captured_steps import (
    MOMENTUM,
    OPTIMIZERS,
    Trained,
    apart,
    data,
    network,
    without_dropout,
)


def test_a_layer_that_is_unfrozen_later_begins_its_momentum() -> None:
    """Fused SGD takes momentum of all parameters or of none."""
    batches = data(16)
    captured, plain = (
        Trained(without_dropout(), torch.optim.SGD, MOMENTUM, captured=r) for r in (True, False)
    )
    for one in (captured, plain):
        one.model[0].requires_grad_(False)  # type: ignore[index, union-attr]
        one.take = one.make()
        one.steps(batches[:6])
        one.model[0].requires_grad_(True)  # type: ignore[index, union-attr]
        one.take = one.make()
        one.steps(batches[6:])
    assert apart(captured.model, plain.model) < 1e-6


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_a_replay_is_the_step(kind: Any, options: dict[str, Any]) -> None:
    batches = data(12, (8, 5)) + data(1, (3,)) + data(6, (8, 5), seed=1)
    captured, plain = (Trained(without_dropout(), kind, options, captured=r) for r in (True, False))
    for one in (captured, plain):
        one.steps(batches[:10])
        for group in one.optimizer.param_groups:
            group["lr"] = 0.01
        one.steps(batches[10:])
    assert captured.graphs.captures == 1
    assert captured.said == ["step: captured in a CUDA graph, and replayed from here on"]
    assert apart(captured.model, plain.model) < 1e-6
    assert captured.losses == pytest.approx(plain.losses, rel=1e-5)
    assert len(captured.outputs) == len(plain.outputs)
    assert all(
        (a - b).abs().max() < 1e-5 for a, b in zip(captured.outputs, plain.outputs, strict=True)
    )


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_what_comes_before_the_update_is_done_between_two_graphs(device: str) -> None:
    """It sees the losses and whole gradients of the step, and weights of before it."""
    seen: list[list[tuple[int, float, float]]] = [[], []]
    made = [
        Trained(without_dropout(), torch.optim.SGD, MOMENTUM, torch.device(device), captured=own)
        for own in (True, False)
    ]
    for one, found in zip(made, seen, strict=True):
        first = next(one.model.parameters())

        def note(one: Trained = one, found: Any = found, first: Any = first) -> None:
            found.append((len(one.losses), float(first.grad.sum()), float(first.detach().sum())))

        one.take.before_update = note
        one.steps(data(9))
    assert apart(made[0].model, made[1].model) < 1e-6
    assert len(seen[0]) == 9
    assert torch.allclose(torch.tensor(seen[0]), torch.tensor(seen[1]), atol=1e-5)
    if device == "cpu":
        assert made[0].graphs.replays == 6
    assert made[0].said == ["step: captured in a CUDA graph, and replayed from here on"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_fails_before_its_update_leaves_the_weights(device: str) -> None:
    trained = Trained(without_dropout(), torch.optim.SGD, MOMENTUM, torch.device(device))
    trained.take.before_update = lambda: None
    trained.steps(data(6))
    before = [parameter.detach().clone() for parameter in trained.model.parameters()]

    def fail() -> None:
        raise RuntimeError("a worker is lost")

    trained.take.before_update = fail
    with pytest.raises(RuntimeError, match="a worker is lost"):
        trained.steps(data(1))
    assert all(map(torch.equal, trained.model.parameters(), before))


def test_the_optimizer_stays_as_its_owner_knows_it() -> None:
    trained = Trained(without_dropout(), torch.optim.AdamW, {"lr": 1e-3})
    trained.steps(data(8))
    assert trained.captured is not None
    trained.captured.finish()
    group = trained.optimizer.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"]) == (1e-3, None, None)
    assert all(
        state["step"].device.type == "cpu" and float(state["step"]) == 8
        for state in trained.optimizer.state.values()
    )


def test_a_changed_option_or_a_frozen_weight_is_captured_anew() -> None:
    trained, plain = (
        Trained(without_dropout(), torch.optim.SGD, MOMENTUM, captured=r) for r in (True, False)
    )
    for one in (trained, plain):
        one.steps(data(6))
        one.optimizer.param_groups[0]["momentum"] = 0.5
        one.steps(data(6, seed=1))
        one.model[0].weight.requires_grad_(False)
        one.take = one.make()
        one.steps(data(6, seed=2))
    assert trained.graphs.captures == 3
    assert apart(trained.model, plain.model) < 1e-6


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Draws(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + 0.01 * random.random())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (
            Counts,
            "the forward pass of Sequential.0 changes its attribute 'calls', which a replay would "
            "not",
        ),
        (Draws, "it draws from random on the processor, which a replay would not"),
    ],
)
def test_what_a_step_does_on_the_host_keeps_it_eager(layer: Any, reason: str) -> None:
    made = []
    for captured in (True, False):
        torch.manual_seed(3)
        random.seed(3)
        one = Trained(nn.Sequential(layer(6, 3)), torch.optim.SGD, MOMENTUM, captured=captured)
        one.steps(data(8))
        made.append(one)
    assert made[0].said == [f"step: eager, since {reason}"]
    assert made[0].graphs.captures == 0
    assert apart(made[0].model, made[1].model) < 1e-6
    assert made[0].losses == pytest.approx(made[1].losses, rel=1e-6)
    with pytest.raises(
        UserError,
        match="step='graph': the step cannot be captured, since .*; change that, or write "
        "step='auto'",
    ):
        Trained(nn.Sequential(layer(6, 3)), torch.optim.SGD, MOMENTUM, insist=True).steps(data(8))


def test_hooks_keep_it_eager_unless_it_is_asked_for() -> None:
    seen: list[int] = []
    model = without_dropout()
    model[0].register_forward_hook(lambda *_: seen.append(1))
    trained = Trained(model, torch.optim.SGD, MOMENTUM)
    trained.steps(data(6))
    assert trained.said == [
        "step: eager, since Sequential.0 has hooks, which a replay would not call"
    ]
    assert len(seen) == 6
    asked = Trained(model, torch.optim.SGD, MOMENTUM, insist=True)
    computes = Trained(
        nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 3))), torch.optim.SGD, MOMENTUM
    )
    for captured in (asked, computes):
        captured.steps(data(6))
        assert captured.graphs.captures == 1


def test_too_many_shapes() -> None:
    trained = Trained(without_dropout(), torch.optim.SGD, MOMENTUM)
    for size in range(2, 12):
        trained.steps(data(4, (size,)))
    assert trained.said[-1] == "step: eager, since its micro-batches have more than 8 shapes"
    assert len(trained.losses) == 40


def test_too_little_memory_for_a_graph() -> None:
    class HasNoMemory(FunctionGraphs):
        def __call__(self, *_: Any) -> Graphs:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    trained, plain = (
        Trained(without_dropout(), torch.optim.SGD, MOMENTUM, captured=r, graphs=HasNoMemory())
        for r in (True, False)
    )
    for one in (trained, plain):
        one.steps(data(8))
    assert trained.said[0].startswith(
        "step: eager, since the GPU's memory is too small for it, at "
    )
    assert apart(trained.model, plain.model) < 1e-6
    with pytest.raises(
        UserError,
        match="step='graph': the step cannot be captured, since the GPU's memory is too small",
    ):
        Trained(
            without_dropout(), torch.optim.SGD, MOMENTUM, insist=True, graphs=HasNoMemory()
        ).steps(data(8))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.Adagrad, "the update of Adagrad cannot be captured"),
        (
            lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)),
            "the optimizer's learning rate is a tensor; pass a number",
        ),
        (lambda p: torch.optim.Adam(p, foreach=True), "made with foreach=True"),
    ],
)
def test_optimizers_that_cannot_be_captured(make: Any, reason: str) -> None:
    trained = Trained(network(), make, {})
    trained.steps(data(5))
    assert reason in trained.said[0]
    assert trained.graphs.captures == 0
    assert len(trained.losses) == 5


# ---------------------------------------------------------------------- on a GPU


class Watched(nn.Module):
    """Notes in each backward pass whether its output is still there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.there: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        output = self.head(hidden)
        known = weakref.ref(output)
        hidden.register_hook(lambda _: self.there.append(known() is not None))
        return output


@pytest.mark.parametrize("outputs", ["read", "unread"])
def test_an_output_that_nobody_reads_is_freed_before_the_backward_pass(outputs: str) -> None:
    """That of a language model is among its largest tensors."""
    one = Trained(Watched(), torch.optim.SGD, MOMENTUM, outputs=outputs)
    other = Trained(Watched(), torch.optim.SGD, MOMENTUM, captured=False)
    for trained in (one, other):
        trained.steps(data(8))
    assert one.graphs.captures == 1
    assert one.model.there[2:] == [outputs == "read"] * 6  # the first two steps are eager
    assert one.losses == pytest.approx(other.losses, rel=1e-6)
    assert [output is None for output in one.outputs[2:]] == [outputs == "unread"] * 6


@pytest.mark.parametrize("steps", [2, 3, 5], ids=lambda steps: f"{steps} steps an epoch")
def test_short_epochs_are_captured(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch takes its steps by a new object, which sends nothing to the device when its second
    step is captured."""

    def sends(*_: Any, **__: Any) -> None:
        raise RuntimeError("a number is sent to the device while a step is captured")

    class SendsNothing(FunctionGraphs):
        def replayed(self, function: Callable[[], None]) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(torch, "tensor", sends)
                super().replayed(function)

    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    trained = Trained(
        model,
        torch.optim.SGD,
        MOMENTUM,
        graphs=SendsNothing(),
        criterion=nn.MultiMarginLoss(),
    )
    for _ in range(4):
        trained.take = trained.make()
        trained.steps(data(steps))
    assert trained.graphs.captures == 1
    assert trained.said == ["step: captured in a CUDA graph, and replayed from here on"]
