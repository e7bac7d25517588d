"""What cannot be trained by several ranks together is refused; the training itself is in
test_processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated import Federated
from allhands.federated.executors.shared import Shared, _part
from allhands.federated.team import Team
from tests.federated import simulating as sim

TWO = Team(number=0, teams=1, place=0, size=2)


def shared(*layers: nn.Module, criterion=None, given=None, width: int = 1) -> Shared:
    net = nn.Sequential(nn.Linear(5, 4), *layers, nn.Linear(4, width)).double()
    made = sim.rounds(net=net, criterion=criterion, given=given)
    return Shared(made.work, made.server, TWO)


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (nn.Dropout(0.5), "draws numbers"),
        (nn.AlphaDropout(0.5), "draws numbers"),
        (nn.BatchNorm1d(4), "depends on the others"),
    ],
)
def test_models_whose_samples_are_not_apart_are_refused(layer, match):
    with pytest.raises(
        UserError, match=rf"devices_per_client=2: .*{match}.*write devices_per_client=1"
    ):
        shared(layer)


def test_a_mean_over_targets_is_refused_unless_it_is_one_over_samples():
    x, _ = sim.data()
    labels = torch.arange(len(x)) % 3
    shared(criterion=nn.CrossEntropyLoss(), given=(x, labels), width=3)
    with pytest.raises(UserError, match="mean over the targets"):
        shared(criterion=nn.CrossEntropyLoss(ignore_index=1), given=(x, labels), width=3)
    with pytest.raises(UserError, match="mean over the targets"):
        shared(
            criterion=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double()),
            given=(x, labels),
            width=3,
        )


def test_parts_of_a_batch_in_any_structure():
    batch = {"x": torch.arange(6).view(3, 2), "more": [torch.arange(3), (torch.tensor(7), "name")]}
    part = _part(batch, 3, 1, 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert part["more"][0].tolist() == [1, 2]
    assert part["more"][1][1] == "name"


def test_workers_that_make_no_teams_are_refused():
    with pytest.raises(
        UserError, match=r"devices_per_client=2 with 3 workers; write workers=2 or 4"
    ):
        Federated(devices_per_client=2).check(SimpleNamespace(world_size=3))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"devices_per_client=2 with 1 worker; write workers=2"):
        Federated(devices_per_client=2).check(SimpleNamespace(world_size=1))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="leave executor='stacked' out"):
        Federated(devices_per_client=2, executor="stacked")
