"""Clients one after another: gradients where the parameters have them, or in one row."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import allhands
from allhands.federated import samples
from allhands.federated.algorithms import FedAvg
from allhands.federated.executors.serial import Serial
from tests.federated import simulating as sim


@pytest.fixture(autouse=True)
def _world():
    yield
    allhands.finalize()


class _Uneven(nn.Module):
    """A table with sparse gradients, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(4)
        self.table = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(3, 1, dtype=torch.float64)
        self.unused = nn.Linear(2, 2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(2)
    ids = torch.randint(6, (sum(sim.SIZES), 2), generator=drawn)
    return ids, torch.randn(len(ids), 1, generator=drawn, dtype=torch.float64)


class _Corrects(FedAvg):
    """Changes nothing, but may: gradients lie in the row then."""

    corrects = True


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_gradients_of_parameters_and_those_in_the_row_train_to_the_same_bits(optimizer):
    options = {"lr": 0.05, "weight_decay": 0.1}
    weights = []
    for algorithm in (FedAvg(), _Corrects()):
        made = sim.rounds(
            algorithm,
            net=_Uneven(),
            given=_data(),
            optimizer=optimizer,
            options=options,
            batch_size=4,
            epochs=2,
        )
        executor = made.executor.chosen if hasattr(made.executor, "chosen") else made.executor
        assert isinstance(executor, Serial)
        made.run()
        weights.append(made.server.weights)
    assert torch.equal(*weights)


def test_a_parameter_without_a_gradient_decays_like_the_others():
    # as when clients are trained together, where its gradient is zeros
    net = _Uneven()
    made = sim.rounds(
        net=net, given=_data(), options={"lr": 0.1, "weight_decay": 0.5}, batch_size=None, number=1
    )
    made.run()
    place = next(p for p in made.server.layout.parameters if p.name == "unused.weight")
    left = made.server.weights[place.start : place.stop].view(place.shape)
    assert torch.allclose(left, net.unused.weight.detach() * 0.95, rtol=1e-9, atol=0.0)


def test_the_loss_of_a_round_is_the_mean_over_samples_also_with_a_short_batch():
    who, given = sim.clients((10,)), sim.data(10)
    made = sim.rounds(given=given, who=who, batch_size=4, options={"lr": 0.0}, number=1)
    with torch.no_grad():
        loss = nn.functional.mse_loss(sim.model()(given[0]), given[1])
    assert made.run()["train"]["loss"] == [pytest.approx(float(loss), rel=1e-12)]


@pytest.mark.parametrize("algorithm", [FedAvg(), _Corrects()])
def test_a_step_of_plain_sgd_gives_the_bits_of_the_optimizers_own(algorithm):
    weights, calls = [], []
    for watched in (False, True):
        made = sim.rounds(algorithm, net=_Uneven(), given=_data(), batch_size=4, epochs=2)
        handle = None
        if watched:  # by the optimizer's own function, which calls this
            handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
        try:
            made.run()
        finally:
            if handle is not None:
                handle.remove()
        weights.append(made.server.weights)
    assert calls
    assert torch.equal(*weights)


@pytest.mark.parametrize("sizes", [(3, 3, 2), (8,)])
def test_samples_of_several_steps_are_read_at_once(sizes, monkeypatch):
    given = torch.randn(20, 4), torch.arange(20)
    held = samples.Samples(given, torch.device("cpu"))
    order = torch.randperm(20)[:8]
    every = held.take_all(order, sizes)
    for batch, one in zip(order.split(sizes), every, strict=True):
        assert all(map(torch.equal, one, held.take(batch)))
    monkeypatch.setattr(samples, "_AT_ONCE", 8 * 24 - 1)
    assert held.take_all(order, sizes) is None
    monkeypatch.setattr(samples, "_AT_ONCE", 8 * 24)
    assert held.take_all(order, sizes) is not None
    by_one = samples.Samples([1.0, 2.0, 3.0], torch.device("cpu"))
    assert by_one.take_all(torch.tensor([0, 1]), (1, 1)) is None
