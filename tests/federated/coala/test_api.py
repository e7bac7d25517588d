"""COALA's functions in one process: parity with a loop written by hand, refusals."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import allhands.federated as coala
from allhands.errors import UserError, WorldError
from allhands.federated.coala import api
from tests.federated.coala.small_training import (
    Net,
    by_hand,
    conf,
    flat,
    parts,
    prepare,
    same,
    train,
)
from tests.federated.coala.small_training import fresh as _fresh  # noqa: F401
from tests.federated.coala.test_client import Same
from tests.federated.coala.test_server import Mean


@pytest.mark.parametrize("strategy", ["FedAvg", "equal"])
def test_the_result_is_that_of_a_loop_by_hand(strategy):
    start = Net()
    before = copy.deepcopy(start.state_dict())
    result = train(model=start, server={"aggregation_strategy": strategy})
    expected = flat(by_hand(start, weighted=strategy == "FedAvg"))
    assert (flat(result.model) - expected).abs().max() < 1e-6
    assert all(torch.equal(before[name], value) for name, value in start.state_dict().items()), (
        "a copy is trained"
    )


def test_it_repeats_to_the_bit_leaves_global_generators_alone_and_follows_the_seed():
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    one, two = train(), train()
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1], states[2]) == (np.random.get_state()[1].tolist(), random.getstate())
    assert same(one, two)
    assert not same(one, train(seed=1))


def test_the_cohort_depends_on_the_seed_and_may_be_the_first_clients():
    def cohorts(seed: int = 0, **section: Any) -> list[list[str]]:
        return train(seed=seed, server={"rounds": 6, "clients_per_round": 2, **section}).history[
            "cohort"
        ]

    assert cohorts() == cohorts()
    assert cohorts() != cohorts(seed=5)
    assert cohorts(random_selection=False) == [["site 0", "site 1"]] * 6


# ---------------------------------------------------------------------- what is registered


def test_objects_of_the_wrong_kind_are_refused_when_they_are_registered():
    for function, given, message in (
        (coala.register_server, Same, "Same is not derived from BaseServer"),
        (coala.register_client, Mean, "Mean is not derived from BaseClient"),
        (coala.register_client, 3, "an object of the class int was passed"),
        (coala.register_model, "lenet", "a str is no model"),
        (coala.register_model, Same, "the class Same is no model"),
        (lambda given: coala.register_dataset(given, None), {"x": 1}, "train_data is a dict"),
        (
            lambda given: coala.register_dataset(given, None),
            {"s_train_data": 1, "u_train_data": 1},
            "semi-supervised",
        ),
    ):
        with pytest.raises(UserError, match=message):
            function(given)
    with pytest.raises(UserError, match="start_service would never be called"):
        coala.register_server(
            type("Remote", (coala.BaseServer,), {"start_service": lambda self: None})
        )
    with pytest.raises(UserError, match=r"upload would never be called.*override post_train"):
        coala.register_client(type("Remote", (coala.BaseClient,), {"upload": lambda self: None}))


def test_the_order_of_calls():
    with pytest.raises(UserError, match=r"run was called before init; call init\(config\) first"):
        coala.run()
    prepare()
    coala.init(conf(), init_all=False)
    coala.init_dataset()
    assert isinstance(coala.init_model(), Net)
    coala.run()
    with pytest.raises(UserError, match="run was called twice"):
        coala.run()
    coala.init(conf())
    with pytest.raises(UserError, match="register_model was called after init"):
        coala.register_model(Net)


def test_a_second_init_begins_afresh():
    one = train()
    coala.init(conf())
    assert same(one, coala.run())


def test_more_clients_than_there_are_and_a_client_without_samples_are_refused():
    with pytest.raises(
        UserError, match="server.clients_per_round = 5, and there are 4 clients; write at most 4"
    ):
        train(server={"clients_per_round": 5})
    empty = parts() | {"nobody": {"x": torch.zeros(0, 6), "y": torch.zeros(0, dtype=torch.int64)}}
    with pytest.raises(UserError, match="1 of 5 clients have no sample, such as 'nobody'"):
        train(data=empty)


def test_more_processes_than_are_told_are_refused():
    with pytest.raises(
        WorldError, match="gpu = 2, and nothing says which of the 2 processes this is"
    ):
        coala.init({"gpu": 2})
    with pytest.raises(UserError, match="distributed.init_method is not set"):
        coala.init({"gpu": 2, "distributed": {"world_size": 2}})


# ---------------------------------------------------------------------- tests, models, buffers


def test_tests_in_clients_are_means_over_clients_or_over_samples():
    model, data = Net(), parts()
    right = torch.tensor(
        [(model(part["x"]).argmax(1) == part["y"]).double().mean() for part in data.values()]
    )
    sizes = torch.tensor([5.0, 9, 3, 7], dtype=torch.float64)
    for method, expected in (("average", right.mean()), ("weighted", (right * sizes).sum() / 24)):
        section = {"test_all": True, "rounds": 1, "clients_per_round": 2}
        history = train(model=model, server=section, test_method=method).history["test"]
        assert history["round"] == [-1, 0]
        assert history["accuracy"][0] == pytest.approx(float(expected))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x))


def test_buffers_are_averaged_and_whole_numbers_stay_whole():
    result = train(model=Norm)
    assert int(result.model.norm.num_batches_tracked) == 3
    means = sum(len(p["y"]) / 24 * p["x"].mean(0) for p in parts().values())
    assert torch.allclose(result.model.norm.running_mean, means * (1 - 0.9**3), atol=1e-5)
    with pytest.raises(
        UserError,
        match="aggregation_content = 'parameters': the model has buffers, such as "
        "'norm.running_mean'",
    ):
        train(model=Norm, server={"aggregation_content": "parameters"})


def test_models_are_saved_every_so_many_rounds_and_load_safely(tmp_path):
    result = train(server={"save_model_every": 2}, task_id="mine")
    assert sorted(path.name for path in (tmp_path / "saved_models").iterdir()) == [
        "mine_global_model_r_2.pth",
        "mine_global_model_r_3.pth",
    ]
    loaded = torch.load(tmp_path / "saved_models" / "mine_global_model_r_3.pth", weights_only=True)
    assert all(
        torch.equal(loaded[name], value) for name, value in result.model.state_dict().items()
    )


def test_what_is_printed_and_that_it_can_be_silenced(capsys):
    train(task_id="mine")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "mine: 4 clients, 4 a round, 3 rounds, 1 process on cpu"
    assert said[3].startswith("mine: round 3/3: train loss ")
    assert ", test accuracy " in said[3]
    train(tracking={"log_level": "WARNING"})
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------- keys that ask for something


def test_the_clients_seed_changes_the_order_of_samples_and_not_the_cohorts():
    small = {"batch_size": 2, "local_epoch": 2}
    one, other = (
        train(client=small | {"seed": seed}, server={"clients_per_round": 2}) for seed in (0, 1)
    )
    assert one.history["cohort"] == other.history["cohort"]
    assert not torch.equal(flat(one.model), flat(other.model))


class Shows(coala.BaseServer):
    def init_visualization(self):
        self.shown: list[dict[str, float]] = []

    def tracking_visualization(self, results):
        self.shown.append(results)
        self._rounds.history["shown"] = self.shown


class LooksAgain(coala.BaseClient):
    def test_local(self):
        self.train_loss = [42.0]


def test_visualisation_and_local_tests_are_called_or_refused():
    assert train(Shows, server={"visualize": True}).history["shown"][0].keys() == {
        "loss",
        "accuracy",
    }
    assert (
        train(training=LooksAgain, client={"local_test": True}).history["train"]["loss"]
        == [42.0] * 3
    )
    assert train(training=LooksAgain).history["train"]["loss"] != [42.0] * 3
    with pytest.raises(UserError, match="server.visualize = True calls init_visualization"):
        train(server={"visualize": True})
    with pytest.raises(UserError, match="client.local_test = True calls test_local"):
        train(client={"local_test": True})


def test_a_training_of_its_own_has_no_executor_to_choose():
    with pytest.raises(
        UserError,
        match="executor = 'serial' trains all clients alike, and Same has a training of its own",
    ):
        train(training=Same, executor="serial")


def test_data_that_come_undivided_are_divided_as_the_configuration_says():
    api.unregister()
    x = torch.randn(40, 6)
    coala.register_dataset((x, x[:, :3].argmax(1)), (x, x[:, :3].argmax(1)))
    coala.init(
        conf(
            model="mlp",
            data={"num_of_clients": 8, "split_type": "dir", "alpha": 5.0, "min_size": 2},
        )
    )
    result = coala.run()
    assert len(result.history["test"]["accuracy"]) == 1
    assert max(max(cohort) for cohort in result.history["cohort"]) > "f0000003"
    with pytest.raises(UserError, match="there is no test set"):
        coala.register_dataset((x, x[:, :3].argmax(1)), None)
        coala.init(conf(model="mlp", data={"num_of_clients": 8}))


def test_slow_clients_are_slow_in_virtual_time_and_change_nothing_else():
    slow = {
        "simulate": True,
        "hetero_type": "iso",
        "level": 5,
        "total_time": 90.0,
        "sleep_group_num": 4,
    }
    plain, delayed = train(), train(resource_heterogeneous=slow)
    assert same(plain, delayed)
    # Evenly spaced: 0, 1, 2 and 3 parts of 90 seconds; all four clients are in each round.
    assert delayed.history["virtual_seconds"] == pytest.approx([45.0] * 3)
    assert delayed.history["virtual_time"] == pytest.approx([45.0, 90.0, 135.0])
