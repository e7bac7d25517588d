"""Servers whose stages a user writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import allhands.federated as coala
from allhands.errors import UserError
from tests.federated.coala.small_training import (
    flat,
    same,
    train,
)
from tests.federated.coala.small_training import fresh as _fresh  # noqa: F401
from tests.federated.coala.test_client import Writes


class Median(coala.BaseServer):
    def aggregate(self, models, weights):
        self.weights = weights
        rows = torch.stack([flat(model) for model in models]).median(0).values
        torch.nn.utils.vector_to_parameters(rows, models[0].parameters())
        return models[0]


class Mean(coala.BaseServer):
    def aggregate(self, models, weights):
        states, total = [model.state_dict() for model in models], sum(weights)
        return {
            name: sum(w / total * s[name] for w, s in zip(weights, states, strict=True))
            for name in states[0]
        }


def test_a_server_s_aggregate_gets_the_models_of_the_cohort():
    result = train(Median, Writes)
    assert torch.equal(flat(result.model), torch.full((83,), 1.0))
    ours, theirs = train(), train(Mean)
    assert (flat(ours.model) - flat(theirs.model)).abs().max() < 1e-6


def test_stages_are_called_in_coala_s_order_and_may_be_wrapped():
    said: list[str] = []

    def wrap(name):
        def method(self, *args, **kwargs):
            said.append(name)
            return getattr(coala.BaseServer, name)(self, *args, **kwargs)

        return method

    names = [
        "pre_train",
        "train",
        "selection",
        "grouping_for_distributed",
        "compression",
        "distribution_to_train",
        "aggregation",
        "post_train",
        "pre_test",
        "test",
        "test_in_client",
        "post_test",
        "save_model",
    ]
    kind = type("Wrapped", (coala.BaseServer,), {name: wrap(name) for name in names})
    result = train(kind)
    assert said[: names.index("pre_test")] == names[: names.index("pre_test")]
    assert said[-13:] == names
    assert same(result, train())


class Picks(coala.BaseServer):
    def selection(self, clients, clients_per_round):
        self.selected_clients = [clients[2], clients[0]]

    def should_terminate(self):
        return self._current_round == 2

    def test_in_client(self):
        return {"answer": 42.0}


def test_selection_termination_and_tests_of_a_server():
    result = train(Picks)
    assert result.history["cohort"] == [["site 2", "site 0"]] * 2
    assert train(Picks, server={"test_every": 1}).history["test"] == {
        "round": [0, 1],
        "answer": [42.0, 42.0],
    }


class Chooses(coala.BaseServer):
    def selection(self, clients, clients_per_round):
        return np.random.choice(clients, clients_per_round, replace=False)


def test_a_selection_that_draws_from_numpy_repeats_and_follows_the_seed():
    def cohorts(seed: int) -> list[list[str]]:
        return train(Chooses, seed=seed, server={"rounds": 5, "clients_per_round": 2}).history[
            "cohort"
        ]

    assert cohorts(0) == cohorts(0)
    assert cohorts(0) != cohorts(1)
    assert len({tuple(cohort) for cohort in cohorts(0)}) > 1


class Forgets(coala.BaseServer):
    def train(self):
        pass


class ForgetsToo(coala.BaseServer):
    def aggregation(self):
        pass


class Twice(coala.BaseServer):
    def selection(self, clients, clients_per_round):
        return [clients[1], clients[1]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgets, r"Forgets.train trained no round; call super\(\).train\(\)"),
        (
            ForgetsToo,
            r"ForgetsToo.aggregation left its work undone; call super\(\).aggregation\(\)",
        ),
        (Twice, "Twice.selection gave a client twice"),
    ],
)
def test_an_override_that_does_not_do_its_work_is_refused(kind, message):
    with pytest.raises(UserError, match=message):
        train(kind)
