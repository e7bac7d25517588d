from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from allhands import MuonAdamW, UserError
from allhands.models import gpt, mlp

OPTIONS: dict[str, Any] = {
    "lr": 0.01,
    "muon_lr": 0.04,
    "betas": (0.8, 0.9),
    "momentum": 0.9,
    "weight_decay": 0.1,
}


def small(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = gpt(vocab_size=11, block_size=6, layers=2, heads=2, width=8, **options)
    return made


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    tokens = torch.arange(24).view(4, 6) % 11
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
    for optimizer in optimizers:
        optimizer.step()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_two_optimizers_of_torch(tied: bool) -> None:
    ours, theirs = small(tied=tied), small(tied=tied)
    inside = [
        p for name, p in theirs.named_parameters() if name.startswith("layers") and p.dim() == 2
    ]
    others = [p for p in theirs.parameters() if not any(p is matrix for matrix in inside)]
    assert len(inside) == 8, "qkv, out, up and down, but no embedding and no head"
    optimizer = MuonAdamW(ours, **OPTIONS)
    muon = torch.optim.Muon(inside, lr=0.04, momentum=0.9, weight_decay=0.1)
    adamw = torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (muon, adamw)]
    for _ in range(4):
        step(ours, optimizer)
        step(theirs, muon, adamw)
        for each in (schedule, *schedules):
            each.step()
    assert equal(ours, theirs)
    assert not equal(ours, small(tied=tied))


def test_state_that_is_loaded_copied_or_exchanged_is_gone_on_with() -> None:
    model = small()
    optimizer = MuonAdamW(model, **OPTIONS)
    step(model, optimizer)
    loaded = copy.deepcopy(model)
    again = MuonAdamW(loaded)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, its_own = copy.deepcopy((model, optimizer))
    exchanged = copy.deepcopy(model)
    other = MuonAdamW(exchanged, **OPTIONS)
    pairs = zip(model.parameters(), exchanged.parameters(), strict=True)
    state = {theirs: copy.deepcopy(optimizer.state[mine]) for mine, theirs in pairs}
    other.state = state  # type: ignore[assignment]  # as local_sgd does
    for each, its in ((model, optimizer), (loaded, again), (copied, its_own), (exchanged, other)):
        step(each, its)
    assert equal(model, loaded)
    assert equal(model, copied)
    assert equal(model, exchanged)
    assert other.state is state


def test_groups_choose_for_themselves() -> None:
    first, last = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)
    before = [first.weight.clone(), last.weight.clone()]
    groups = [
        {"params": [first.weight], "muon": True, "lr": 0.0},
        {"params": list(last.parameters()), "muon": False},
    ]
    optimizer = MuonAdamW(groups, lr=0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.01]
    last(first(torch.ones(1, 3))).sum().backward()
    assert optimizer.step(lambda: 3.0) == 3.0
    assert torch.equal(first.weight, before[0])
    assert not torch.equal(last.weight, before[1])


def test_what_it_cannot_train_is_refused() -> None:
    with pytest.raises(
        UserError, match="Linear has no linear layer before the last one.*write AdamW"
    ):
        MuonAdamW(nn.Linear(3, 2))
    model = mlp(in_features=4, out_features=2)
    with pytest.raises(UserError, match="pass the model itself, or groups"):
        MuonAdamW(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a group without it"):
        MuonAdamW([{"params": list(model.parameters())}])
    with pytest.raises(ValueError, match="2D"):
        MuonAdamW([{"params": list(model.parameters()), "muon": True}])
    with pytest.raises(ValueError, match="beta"):
        MuonAdamW(model, betas=(0.9, 1.5))
