"""COALA's functions in one process: parity with a loop written by hand, override points,
refusals."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import allhands
import allhands.federated as coala
from allhands.errors import UserError, WorldError
from allhands.federated.coala import api
from allhands.federated.failures import ClientFailedError


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    api.unregister()
    api._joined = None
    allhands.finalize()


def parts(sizes=(5, 9, 3, 7), features=6, classes=3) -> dict[str, dict[str, Any]]:
    drawn = torch.Generator().manual_seed(1)
    made = {}
    for number, size in enumerate(sizes):
        x = torch.randn(size, features, generator=drawn)
        made[f"site {number}"] = {"x": x, "y": x[:, :classes].argmax(1)}
    return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def conf(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "server": {"rounds": 3, "clients_per_round": 4, "test_every": 3},
        "client": {
            "local_epoch": 1,
            "batch_size": 100,
            "optimizer": {"type": "SGD", "lr": 0.5, "momentum": 0, "weight_decay": 0},
        },
    }
    for key, value in changes.items():
        made[key] = made.get(key, {}) | value if isinstance(value, dict) else value
    return made


def train(
    serving: Any = None, training: Any = None, data: Any = None, model: Any = Net, **changes: Any
) -> api.Result:
    """Run with these classes registered; `changes` are keys of the configuration."""
    prepare(serving, training, data, model)
    coala.init(conf(**changes))
    return coala.run()


def prepare(serving: Any = None, training: Any = None, data: Any = None, model: Any = Net) -> None:
    api.unregister()
    given = coala.FederatedTensorDataset(parts() if data is None else data, simulated=True)
    coala.register_dataset(given, given)
    coala.register_model(model)
    if serving is not None:
        coala.register_server(serving)
    if training is not None:
        coala.register_client(training)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same(one: api.Result, other: api.Result) -> bool:
    return (
        torch.equal(flat(one.model), flat(other.model))
        and one.history["train"] == other.history["train"]
    )


def by_hand(start: nn.Module, rounds: int = 3, weighted: bool = True) -> nn.Module:
    net, data = copy.deepcopy(start).double(), parts()
    for _ in range(rounds):
        states, weights = [], []
        for part in data.values():
            own = copy.deepcopy(net)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
            nn.functional.cross_entropy(own(part["x"].double()), part["y"]).backward()
            optimizer.step()
            states.append(own.state_dict())
            weights.append(len(part["y"]) if weighted else 1)
        net.load_state_dict(
            {
                n: sum(w / sum(weights) * s[n] for w, s in zip(weights, states, strict=True))
                for n in states[0]
            }
        )
    return net


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


# ---------------------------------------------------------------------- override points


class Same(coala.BaseClient):
    """Trains by itself what the configuration says."""

    def train(self, conf, device):
        super().train(conf, device)


def test_a_client_that_trains_by_itself_gives_what_the_executor_gives():
    small = {"local_epoch": 3, "batch_size": 2, "optimizer": {"type": "Adam", "lr": 0.01}}
    ours, theirs = train(client=small), train(training=Same, client=small)
    assert (flat(ours.model) - flat(theirs.model)).abs().max() < 1e-6
    assert theirs.history["train"]["loss"] == pytest.approx(ours.history["train"]["loss"], rel=1e-5)


class Writes(coala.BaseClient):
    """Learns its own number, whatever it gets."""

    calls: list[Any] = []  # noqa: RUF012

    def __init__(self, cid, conf, train_data, test_data, device, **kwargs):
        super().__init__(cid, conf, train_data, test_data, device, **kwargs)
        self.seen = 0

    def pre_train(self):
        self.calls.append(("pre", self.cid))

    def train(self, conf, device):
        self.seen += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(self.number))

    def post_train(self):
        self.calls.append(("post", self.cid, self.seen))

    def test(self, conf, device):
        return {"seen": float(self.seen)}


def test_arbitrary_code_of_a_client_is_averaged_by_samples_and_its_attributes_last():
    Writes.calls.clear()
    result = train(training=Writes)
    expected = (0 * 5 + 1 * 9 + 2 * 3 + 3 * 7) / 24
    assert torch.allclose(flat(result.model), torch.full((83,), expected), atol=1e-6)
    assert result.history["test"] == {"round": [2], "seen": [3.0]}
    assert Writes.calls.count(("pre", "site 2")) == 3
    assert ("post", "site 2", 3) in Writes.calls
    assert all(np.isnan(result.history["train"]["loss"])), "it told no loss"


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


class Fails(coala.BaseClient):
    def train(self, conf, device):
        if self.cid == "site 1":
            raise ValueError("planted fault")


def test_a_client_that_fails_is_named():
    with pytest.raises(
        ClientFailedError, match="client site 1 failed:(.|\\n)*ValueError: planted fault"
    ):
        train(training=Fails)
    assert train(training=Fails, on_client_failure="skip").history["failed"] == [["site 1"]] * 3


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
