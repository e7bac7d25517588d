"""States that a Trainer saves, and goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.kvstore import Trainer, create, optimizer
from tests.kvstore.training import (
    OPTIMIZERS,
    backward,
    by_hand,
    largest_difference,
    line,
    model,
    take_steps,
)


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize(
    ("saved_on", "loaded_on"), [(True, True), (False, False), (True, False), (False, True)]
)
def test_states_go_on_in_any_mode(
    tmp_path: Path, name: str, saved_on: bool, loaded_on: bool
) -> None:
    optimizer_name, options, _ = OPTIMIZERS[name]
    net, store = model(), create("device")
    trainer = Trainer(net, optimizer_name, options, update_on_kvstore=saved_on)
    take_steps(net, trainer, store, range(13))
    trainer.save_states(tmp_path / "states")
    later = model(seed=1)
    later.load_state_dict(net.state_dict())
    trainer = Trainer(later, optimizer_name, options, update_on_kvstore=loaded_on)
    trainer.load_states(tmp_path / "states")
    # As it was when the states were saved.
    assert trainer.learning_rate == options["learning_rate"] / 10
    take_steps(later, trainer, store, range(13, 20))
    assert largest_difference(dict(later.state_dict()), by_hand(name)) <= 1e-6


class OneNumber(nn.Module):
    """Parameters whose states are hard to tell from numbers: one without dimensions, and an empty
    one."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.number = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.ones(2, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.matrix).tanh().sum() * self.number + self.empty.sum()


def test_states_of_every_optimizer_go_on_bit_for_bit(tmp_path: Path) -> None:
    def take(net: nn.Module, trainer: Trainer, steps: range) -> None:
        for step in steps:
            net(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).backward()
            trainer.step(4)

    for name in optimizer.known_optimizers():
        whole = OneNumber()
        take(whole, Trainer(whole, name, {"lr": 0.01}), range(6))
        for saved_on in (False, True):
            net = OneNumber()
            trainer = Trainer(net, name, {"lr": 0.01}, update_on_kvstore=saved_on)
            trainer.save_states(tmp_path / "first")
            trainer.load_states(tmp_path / "first")  # before any step
            take(net, trainer, range(3))
            trainer.save_states(tmp_path / "states")
            later = OneNumber()
            later.load_state_dict(net.state_dict())
            trainer = Trainer(later, name, {"lr": 0.01}, update_on_kvstore=not saved_on)
            trainer.load_states(tmp_path / "states")
            take(later, trainer, range(3, 6))
            for ours, theirs in zip(later.parameters(), whole.parameters(), strict=True):
                assert torch.equal(ours, theirs), name


def test_states_of_another_training_are_refused(tmp_path: Path) -> None:
    net = line()
    trainer = Trainer(net, "adam")
    backward(net, 1.0)
    trainer.step(1)
    trainer.save_states(tmp_path / "states")
    with pytest.raises(
        UserError,
        match="has the state of 'adam' with 1 groups, and this Trainer's optimizer is 'sgd'",
    ):
        Trainer(line(), "sgd").load_states(tmp_path / "states")
    for on_store, what in (
        (True, "a key 'bias', which is not in the store"),
        (False, "a parameter 'bias'"),
    ):
        with pytest.raises(UserError, match=what):
            Trainer(nn.Linear(1, 1, bias=False), "adam", update_on_kvstore=on_store).load_states(
                tmp_path / "states"
            )
    with pytest.raises(UserError, match="has shape"):
        Trainer(nn.Linear(2, 1), "adam", update_on_kvstore=True).load_states(tmp_path / "states")
    with pytest.raises(UserError, match="there is no file"):
        trainer.load_states(tmp_path / "nothing")
