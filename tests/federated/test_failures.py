"""Clients that raise: fatal, tried again, or left out, and always named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.failures import ClientFailedError
from tests.federated import simulating as sim

pytestmark = pytest.mark.usefixtures("world")


class Broken:
    """A data set of which some samples cannot be read, the first `times` times."""

    def __init__(self, bad: range, times: int = 10**9) -> None:
        self.x, self.y = sim.data()
        self.bad, self.times = bad, times

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index in self.bad and self.times > 0:
            self.times -= 1
            raise OSError(f"sample {index} is on a bad disk")
        return self.x[index], self.y[index]


def made(dataset: Broken, action: str, **options):
    return sim.rounds(given=dataset, batch_size=4, stages={"on_client_failure": action, **options})


def test_a_client_that_raises_ends_the_run_with_its_name_and_traceback():
    with pytest.raises(
        ClientFailedError, match=r"(?s)round 0: client 1 failed.*bad disk.*on_client_failure"
    ) as caught:
        made(Broken(range(12, 13)), "stop").run()
    assert "__getitem__" in str(caught.value)


def test_a_client_that_is_skipped_counts_for_nothing_and_the_others_make_up_the_whole(capsys):
    found = made(Broken(range(12, 13)), "skip")
    history = found.run()
    assert history["failed"] == [[1]] * 3
    assert "client 1 is left out" in capsys.readouterr().out
    found = sim.rounds(given=Broken(range(12, 13)), stages={"on_client_failure": "skip"})
    found.run()
    parts = [found.clients.samples(client) for client in (0, 2, 3)]
    expected = sim.loop(sim.model(), parts, sim.data(), 3, 0.1)
    assert (found.server.layout.read(expected) - found.server.weights).abs().max() < 1e-12


def test_a_client_that_is_tried_again_gives_what_it_would_have_given(capsys):
    found, plain = made(Broken(range(12, 13), 2), "retry"), made(Broken(range(0)), "stop")
    history = found.run()
    plain.run()
    assert torch.equal(found.server.weights, plain.server.weights)
    assert history["retried"] == [[1], [], []]
    assert history["failed"] == [[], [], []]
    assert "client 1 is trained again, 2 of 2" in capsys.readouterr().out


def test_trying_again_has_an_end():
    with pytest.raises(ClientFailedError, match=r"client 1 failed \(4 times\)"):
        made(Broken(range(12, 13)), "retry", client_retries=3).run()


def test_a_round_in_which_all_failed_keeps_the_model_and_says_so(capsys):
    found = made(Broken(range(55)), "skip")
    before = found.server.weights.clone()
    history = found.run()
    assert torch.equal(found.server.weights, before)
    assert history["unchanged"] == [True] * 3
    assert history["failed"] == [[0, 1, 2, 3]] * 3
    assert "no client of 4 has brought an update" in capsys.readouterr().out


def test_a_loss_that_no_client_can_be_trained_with_is_no_failure_of_a_client():
    found = sim.rounds(
        criterion=lambda output, target: (output - target).squeeze(1),
        stages={"on_client_failure": "skip"},
    )
    with pytest.raises(UserError, match="client 0"):
        found.run()


def test_one_client_of_a_stack_is_left_out_and_the_others_are_trained():
    x, _ = sim.data(dtype=torch.float64)
    labels = torch.arange(len(x)) % 3
    labels[40] = 7  # of client 2, beyond the classes
    found = {}
    for executor in ("serial", "stacked"):
        net = nn.Sequential(nn.Linear(5, 3)).double()
        nn.init.constant_(net[0].weight, 0.1)
        nn.init.zeros_(net[0].bias)
        made = sim.rounds(
            net=net,
            given=(x, labels),
            criterion=nn.CrossEntropyLoss(),
            executor=executor,
            batch_size=4,
            stages={"on_client_failure": "skip"},
        )
        assert made.run()["failed"] == [[2]] * 3
        found[executor] = made.server.weights
    assert (found["serial"] - found["stacked"]).abs().max() < 1e-12


def test_what_breaks_outside_a_client_is_told_as_it_is():
    class Odd(sim.FedAvg):
        def contribute(self, trained, server, sums):
            raise ZeroDivisionError("in contribute")

    with pytest.raises(ClientFailedError, match=r"(?s)ZeroDivisionError: in contribute") as caught:
        sim.rounds(Odd()).run()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("options", [{"on_client_failure": "ignore"}, {"client_retries": 0}])
def test_unknown_ways_are_refused(options):
    with pytest.raises(UserError, match="on_client_failure|client_retries"):
        sim.rounds(stages=options)
