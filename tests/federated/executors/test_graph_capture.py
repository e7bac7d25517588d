"""What executors with recorded steps do around the recording, on a processor: there a recording is
the function itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from allhands.federated.executors import ClientError, CohortMember, Graph, Stacked
from tests.federated import simulating as sim
from tests.federated.executors.comparing import SIZES, Pulled, images, network


class Replayed:
    """As `GraphCapture`: runs the function before it records, which overwrites what the executor
    has not yet loaded."""

    def __init__(self, device: torch.device) -> None:
        self.recorded = 0

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        function()
        return function


@pytest.fixture(autouse=True)
def _replayed(monkeypatch):
    monkeypatch.setattr("allhands.federated.executors.graph.GraphCapture", Replayed)
    monkeypatch.setattr("allhands.federated.executors.stacked.GraphCapture", Replayed)


class Keeping(Pulled):
    def keeps(self, model: nn.Module) -> list[str]:
        return ["1"]


def rounds(norm: str, **options):
    return sim.rounds(
        options.pop("algorithm", None),
        net=network(norm),
        given=images(),
        who=sim.clients(SIZES),
        criterion=nn.CrossEntropyLoss(),
        batch_size=4,
        drop_last=norm == "batch",
        **options,
    )


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("algorithm", [None, Pulled()], ids=["fedavg", "pulled"])
def test_steps_are_recorded_once_a_size_and_end_at_the_models_of_serial(norm, algorithm):
    given = {
        "optimizer": torch.optim.Adam,
        "options": {"lr": 0.01},
        "clip_norm": 1.0,
        "algorithm": algorithm,
    }
    expected = rounds(norm, **given)
    expected.run()

    made = rounds(norm, **given)
    made.executor = Graph(replace(made.work, model=copy.deepcopy(made.work.model)), made.server)
    made.run()
    assert (made.server.weights - expected.server.weights).abs().max() < 1e-12
    # 10, 25, 17, 3 and 8 samples in steps of 4; without short last ones 3 samples are still a step
    assert sorted(made.executor._recorded) == ([3, 4] if norm == "batch" else [1, 2, 3, 4])
    assert made.executor._recorder.recorded == len(made.executor._recorded)

    made = rounds(norm, **given)
    stacked = Stacked(
        replace(made.work, model=copy.deepcopy(made.work.model)), made.server, chunk=3
    )
    stacked.record, stacked._recorder = True, Replayed(sim.CPU)
    made.executor = stacked
    made.run()
    assert (made.server.weights - expected.server.weights).abs().max() < 1e-12
    # Chunks of 2 and 3 clients; or of 1 client, with steps of 3 and of 4 samples.
    assert stacked._recorder.recorded == 2


@pytest.mark.parametrize(
    "algorithm", [None, Pulled(), Keeping()], ids=["fedavg", "pulled", "keeping"]
)
def test_clients_that_are_handed_over_several_at_once(algorithm, monkeypatch):
    expected = rounds("batch", algorithm=algorithm)
    expected.run()
    monkeypatch.setattr("allhands.federated.executors.serial.AT_ONCE", {"cpu": 3})
    made, sizes = rounds("batch", algorithm=algorithm), []
    whole = made.algorithm.contribute
    monkeypatch.setattr(
        made.algorithm,
        "contribute",
        lambda trained, *rest: (sizes.append(len(trained.clients)), whole(trained, *rest)),
    )
    made.run()
    assert sizes == [3, 2] * 3
    assert torch.equal(made.server.weights, expected.server.weights)
    assert torch.equal(made.server.integers, expected.server.integers)
    assert made.history["train"] == expected.history["train"]


def test_clients_before_one_that_fails_are_handed_over_too(monkeypatch):
    monkeypatch.setattr("allhands.federated.executors.serial.AT_ONCE", {"cpu": 16})
    made, done = rounds("group"), []
    made.work.samples.tensors[1][40] = 7  # of client 2, beyond the classes
    with pytest.raises(ClientError, match="client 2"):
        made.executor.train(
            [CohortMember(client, client) for client in range(5)],
            made.states.get,
            lambda trained, seconds: done.extend(trained.clients),
        )
    assert done == [0, 1]


def test_many_sizes_of_chunks_reuse_the_recordings_of_larger_ones(monkeypatch):
    monkeypatch.setattr("allhands.federated.executors.stacked._GRAPHS", 1)
    expected, made = rounds("group"), rounds("group")
    stacked = Stacked(replace(made.work, model=copy.deepcopy(made.work.model)), made.server)
    stacked.record, stacked._recorder = True, Replayed(sim.CPU)
    made.executor = stacked
    for cohort in ([0, 1, 2, 3], [0, 1, 2], [3], [1, 2]):
        for one in (expected, made):
            one.select = lambda round_, cohort=cohort: cohort
            one.one_round()
    assert list(stacked._stacks) == [4]
    assert stacked._recorder.recorded == 1
    assert (made.server.weights - expected.server.weights).abs().max() < 1e-12
