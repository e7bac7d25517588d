"""Clients stacked in one batched step end at the models of clients trained one by one."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from allhands.errors import UserError
from allhands.federated.executors import ClientError
from allhands.federated.executors.stack import Stack
from allhands.federated.local_training import LocalOptimizer, restart
from tests.federated import simulating as sim
from tests.federated.executors.comparing import (
    CHUNKS,
    SIZES,
    Pulled,
    difference,
    images,
    network,
    trained,
)

SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (SGD, {"lr": 0.1}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (ADAM, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_every_chunk_gives_the_models_of_serial_with_dropout_and_clients_of_unequal_size(
    norm, optimizer, options
):
    # batches of 4: clients of 3 samples have less than one, others have a last short one
    given = {"norm": norm, "optimizer": optimizer, "options": options, "batch_size": 4, "epochs": 2}
    if norm == "batch":
        # No batch of one sample among 10, 25, 17, 3 and 8 but of the first two clients.
        given["batch_size"] = 3
        given["drop_last"] = True
    assert difference(["serial", *CHUNKS], **given) < 1e-12
    assert difference(["serial", CHUNKS[1]], **given, dtype=torch.float32) < 1e-5


@pytest.mark.parametrize("name", LocalOptimizer.ELEMENTWISE)
def test_every_optimizer_that_treats_numbers_alike(name):
    optimizer = getattr(torch.optim, name)
    for local in ({}, {"clip_norm": 0.5}):  # per tensor, and on whole rows
        given = {
            "optimizer": optimizer,
            "options": {"lr": 0.01},
            "batch_size": 8,
            "number": 1,
            **local,
        }
        assert difference(["serial", CHUNKS[1]], **given) < 1e-12


def test_adagrad_begins_with_its_initial_accumulator_for_each_client():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.Adagrad([weight], lr=0.1, initial_accumulator_value=0.5)
    trained = []
    for _ in range(2):
        with torch.no_grad():
            weight.fill_(1.0)
        restart(optimizer)
        for _ in range(2):
            weight.grad = torch.tensor([1.0, 2.0, 3.0])
            optimizer.step()
        trained.append(weight.detach().clone())
    assert torch.equal(*trained)
    assert optimizer.state[weight]["sum"].tolist() == [2.5, 8.5, 18.5]


@pytest.mark.parametrize(
    "local",
    [
        {"batch_size": None},
        {"batch_size": None, "epochs": 3, "clip_norm": 0.1},
        {"batch_size": 7, "steps": 5},
        {"batch_size": 7, "drop_last": True, "clip_norm": 0.3},
        {"batch_size": 100},
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_local_options_mean_the_same(norm, local):
    assert (
        difference(
            ["serial", *CHUNKS[1:]], norm=norm, options={"lr": 0.1, "momentum": 0.9}, **local
        )
        < 1e-12
    )


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_an_algorithm_that_corrects_and_keeps_states_and_asks_for_the_loss_at_the_start(norm):
    given = {
        "norm": norm,
        "algorithm": Pulled(),
        "number": 3,
        "batch_size": 5,
        "drop_last": True,
        "epochs": 2,
    }
    assert difference(["serial", *CHUNKS], **given) < 1e-12


class Kept(Pulled):
    """Leaves the normalisation with the clients."""

    def keeps(self, model: nn.Module) -> list[str]:
        return ["1"]


def test_layers_that_clients_keep_and_integer_buffers():
    given = {
        "net": network("batch"),
        "given": images(),
        "who": sim.clients(SIZES),
        "criterion": nn.CrossEntropyLoss(),
        "batch_size": 4,
        "drop_last": True,
        "epochs": 2,
        "algorithm": Kept(),
    }
    made = [sim.rounds(executor=executor, **given) for executor in ("serial", *CHUNKS)]
    for one in made:
        one.run()
        assert (one.server.weights - made[0].server.weights).abs().max() < 1e-12
        assert torch.equal(one.server.integers, made[0].server.integers)
        for client in range(len(SIZES)):
            for name, vector in one.states.get([client]).items():
                assert (vector - made[0].states.get([client])[name]).abs().max() < 1e-11


WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
        F.cross_entropy,
        functools.partial(F.cross_entropy, ignore_index=2),
        lambda output, target: F.cross_entropy(output, target) + output.square().mean(),
    ],
    ids=["smoothing", "weighted", "sum", "function", "partial", "own"],
)
def test_criteria(criterion):
    assert (
        difference(["serial", "stacked"], criterion=criterion, batch_size=4, options={"lr": 0.02})
        < 1e-12
    )


@pytest.mark.parametrize(
    "criterion",
    [
        nn.MSELoss(),
        nn.L1Loss(),
        nn.HuberLoss(),
        nn.SmoothL1Loss(reduction="sum"),
        nn.BCEWithLogitsLoss(),
    ],
    ids=lambda c: type(c).__name__,
)
def test_elementwise_criteria(criterion):
    x, y = sim.data()
    weights = []
    for executor in ("serial", "stacked"):
        made = sim.rounds(
            given=(x, y.abs()),
            criterion=criterion,
            executor=executor,
            batch_size=4,
            options={"lr": 0.02},
        )
        made.run()
        weights.append(made.server.weights)
    assert (weights[0] - weights[1]).abs().max() < 1e-12


def test_parameters_in_groups_and_frozen_ones():
    def net() -> nn.Module:
        made = network("group")
        made[0].weight.requires_grad_(False)
        return made

    def optimizer(parameters, **options):
        first, *rest = [p for p in parameters if p.requires_grad]
        return SGD([{"params": rest}, {"params": [first], "lr": 0.01, "momentum": 0.5}], **options)

    assert difference(["serial", "stacked"], net=net, optimizer=optimizer, batch_size=4) < 1e-12


def test_short_batches_are_padded_unless_samples_of_a_batch_see_each_other():
    assert sim.rounds(executor="stacked").executor.pads
    kinds = {
        "own loss": {"criterion": lambda output, target: (output - target).square().mean()},
        "batch": {"net": nn.Sequential(nn.BatchNorm1d(5), sim.model()).double()},
        "softmax over the batch": {"net": nn.Sequential(sim.model(), nn.Softmax(0))},
    }
    for options in kinds.values():
        assert not sim.rounds(executor="stacked", **options).executor.pads


def test_clients_with_most_steps_begin_together_and_chunks_are_even():
    made = sim.rounds(executor={"name": "stacked", "chunk": 3}, batch_size=4)
    jobs = made.distribute([0, 1, 2, 3])
    assert [[job.client for job in chunk] for chunk in made.executor._chunks(jobs)] == [
        [1, 2],
        [0, 3],
    ]


class _Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training)


class _Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"net": nn.Sequential(sim.model(), _Draws())}, "nn.Dropout1d"),
        ({"net": nn.Sequential(sim.model(), nn.AlphaDropout(0.5))}, "draws numbers"),
        ({"net": nn.Sequential(_Branches(), sim.model())}, "cannot be batched"),
        ({"given": list(zip(*sim.data(), strict=True))}, "TensorDataset"),
    ],
    ids=["functional dropout", "alpha dropout", "branches", "data set"],
)
def test_what_cannot_be_stacked_is_refused_by_name(options, why):
    with pytest.raises(UserError, match=why):
        sim.rounds(executor="stacked", **options)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused():
    class Normed(SGD):
        pass

    with pytest.raises(UserError, match="Normed updates a number"):
        sim.rounds(executor="stacked", optimizer=Normed)


def test_the_client_whose_data_fail_is_named():
    x, y = images()
    y = y.clone()
    y[40] = 7  # of client 2, beyond the classes
    made = sim.rounds(
        executor="stacked",
        net=network(),
        given=(x, y),
        who=sim.clients((10, 25, 17, 3, 8)),
        criterion=nn.CrossEntropyLoss(),
        batch_size=4,
    )
    done: list[int] = []
    jobs = made.distribute(made.select(0))
    with pytest.raises(ClientError, match="client 2"):
        made.executor.train(
            jobs, made.states.get, lambda trained, seconds: done.extend(trained.clients)
        )
    assert done == [3, 1]  # one that had finished, and one with more steps than client 2


def test_a_chunk_for_which_memory_runs_out_is_halved_and_nobody_is_trained_twice(
    monkeypatch, capsys
):
    whole, calls = Stack.gradient, []

    def gradient(self, *given):
        calls.append(len(self.rows))
        # When clients of one and of two steps have finished.
        if len(self.rows) > 2 and calls.count(len(self.rows)) == 3:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return whole(self, *given)

    expected = trained("serial", batch_size=4, algorithm=Pulled())[0]
    monkeypatch.setattr(Stack, "gradient", gradient)
    made = sim.rounds(
        Pulled(),
        net=network(),
        given=images(),
        who=sim.clients(SIZES),
        criterion=nn.CrossEntropyLoss(),
        number=2,
        executor={"name": "stacked", "chunk": 5},
        batch_size=4,
    )
    made.run()
    assert made.executor.chunk < 5
    assert "going on with chunk=" in capsys.readouterr().out
    assert (made.server.weights - expected).abs().max() < 1e-12


def test_stacked_does_not_touch_global_generators_and_a_repeated_run_is_the_same_to_the_bit():
    net = network("group")
    before = torch.get_rng_state()
    first, again = (trained("stacked", net=net, batch_size=4) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert first[1] == again[1]
    assert torch.equal(torch.get_rng_state(), before)
