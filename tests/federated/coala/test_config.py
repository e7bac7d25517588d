"""COALA's configuration: every key is honoured, or refused by name with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from allhands.errors import UserError
from allhands.federated.coala.config import Config, check, load_config, table

# COALA's own file of defaults, where it differs from nothing that is refused: the data set (femnist
# is not here), the backend.
COALA = {
    "task_id": "",
    "data": {
        "dataset": "cifar10",
        "split_type": "iid",
        "fl_type": "supervised",
        "semi_scenario": "label_in_server",
        "num_labels_per_class": 100,
        "min_size": 10,
        "data_amount": 0.05,
        "iid_fraction": 0.1,
        "user": False,
        "train_test_split": 0.9,
        "class_per_client": 1,
        "num_of_clients": 100,
        "alpha": 0.5,
        "weights": None,
    },
    "model": "lenet",
    "test_mode": "test_in_client",
    "test_method": "average",
    "server": {
        "track": False,
        "visualize": False,
        "rounds": 10,
        "clients_per_round": 5,
        "test_every": 1,
        "save_model_every": 10,
        "save_model_path": "",
        "batch_size": 32,
        "test_all": False,
        "random_selection": True,
        "aggregation_strategy": "FedAvg",
        "aggregation_content": "all",
        "epoch": 5,
        "optimizer": {"type": "Adam", "lr": 0.001, "momentum": 0.5, "weight_decay": 0.0005},
    },
    "client": {
        "track": False,
        "batch_size": 32,
        "test_batch_size": 5,
        "local_epoch": 10,
        "optimizer": {"type": "Adam", "lr": 0.001, "momentum": 0.9, "weight_decay": 0.0005},
        "seed": 0,
        "local_test": False,
    },
    "gpu": 0,
    "distributed": {
        "backend": "nccl",
        "init_method": "",
        "world_size": 0,
        "rank": 0,
        "local_rank": 0,
    },
    "is_remote": False,
    "local_port": 22,
    "tracking": {
        "database": "",
        "log_level": "INFO",
        "log_file": "",
        "metric_file": "",
        "save_every": 1,
    },
    "resource_heterogeneous": {
        "simulate": False,
        "hetero_type": "real",
        "level": 3,
        "sleep_group_num": 1000,
        "total_time": 1000,
        "fraction": 1,
        "grouping_strategy": "greedy",
        "initial_default_time": 5,
        "default_time_momentum": 0.2,
    },
    "seed": 0,
    "checkpoint_path": "",
}


def test_coala_s_own_defaults_are_accepted_and_every_key_of_them_is_known():
    conf = check(COALA)
    assert conf.client.local_epoch == 10
    known = {line.split("`")[1] for line in table().splitlines()[2:]}

    def paths(values, above=""):
        for key, value in values.items():
            yield from paths(value, f"{above}{key}.") if isinstance(value, dict) else [above + key]

    assert known - set(paths(COALA)) == {
        "data.root",
        "client.rounds",
        "executor",
        "on_client_failure",
    }
    assert set(paths(COALA)) <= known


def test_the_tutorial_s_configuration_is_accepted():
    tutorial = {
        "client": {"rounds": 7},
        "server": {"rounds": 7},
        "is_remote": False,
        "local_port": 22,
        "gpu": 1,
        "distributed": {"world_size": 1},
    }
    assert check(tutorial).client.rounds == 7
    tutorial.update(
        {
            "gpu": 4,
            "distributed": {
                "rank": 3,
                "local_rank": 3,
                "world_size": 4,
                "init_method": "tcp://127.0.0.1:8123",
            },
        }
    )
    assert check(tutorial).distributed.rank == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sever": {}}, "sever: there is no such key; did you mean 'server'"),
        (
            {"client": {"local_epochs": 2}},
            "client.local_epochs: there is no such key; did you mean 'local_epoch'",
        ),
        ({"data": {"split_type": "dirichlet"}}, "data.split_type = 'dirichlet': it must be"),
        ({"server": {"rounds": 0}}, "server.rounds = 0: it must be"),
        ({"server": {"rounds": True}}, "server.rounds = True: it must be"),
        (
            {"data": {"fl_type": "semi_supervised"}},
            "fl_type = 'semi_supervised' cannot be honoured",
        ),
        (
            {"data": {"iid_fraction": 0.5}},
            "iid_fraction = 0.5 cannot be honoured, only 0.1: set num_of_clients",
        ),
        (
            {"data": {"alpha": 0.1}},
            "alpha = 0.1 has no effect on split_type 'iid'.*set split_type to 'dir'",
        ),
        (
            {"data": {"split_type": "dir", "weights": [1, 2]}},
            "weights = .* has no effect on split_type 'dir'",
        ),
        ({"data": {"train_test_split": 0.5}}, "train_test_split = 0.5 is for shakespeare"),
        (
            {"data": {"split_type": "niid", "num_of_clients": 10}},
            "num_of_clients is decided by the data set",
        ),
        ({"server": {"track": True}}, "track = True cannot be honoured"),
        (
            {"server": {"epoch": 3}},
            "epoch = 3 cannot be honoured, only 5: COALA never reads it; write client.local_epoch",
        ),
        (
            {"server": {"local_epoch": 3}},
            "server.local_epoch: it belongs to semi-supervised training",
        ),
        (
            {"server": {"optimizer": {"lr": 1.0}}},
            "lr = 1.0 cannot be honoured.*client.optimizer.lr",
        ),
        ({"client": {"rounds": 3}}, "client.rounds = 3, and server.rounds = 10"),
        (
            {"gpu": 2, "distributed": {"world_size": 3}},
            "gpu = 2 and distributed.world_size = 3.*set gpu to 3",
        ),
        (
            {"gpu": 2, "distributed": {"world_size": 2, "rank": 2}},
            "distributed.rank = 2 of 2 processes",
        ),
        ({"is_remote": True}, "is_remote = True cannot be honoured"),
        ({"local_port": 23}, "local_port = 23 cannot be honoured"),
        ({"index": 0}, "index: it picks a remote client"),
        (
            {"resource_heterogeneous": {"simulate": True}},
            "hetero_type = 'real'.*set hetero_type to 'dir' or 'iso'",
        ),
        ({"resource_heterogeneous": {"level": 2}}, "level = 2 has no effect.*set simulate to True"),
        ({"resource_heterogeneous": {"level": 6}}, "resource_heterogeneous.level = 6: it must be"),
        (
            {"tracking": {"log_file": "x"}},
            "log_file = 'x' cannot be honoured, only '': COALA never reads it",
        ),
        ({"checkpoint_path": "x"}, "checkpoint_path = 'x' cannot be honoured"),
        ([1], "the configuration is a list"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given, message):
    with pytest.raises(UserError, match=message):
        check(given)


def test_the_optimizer_s_options():
    def options(**given):
        return check({"client": {"optimizer": given}}).client.optimizer.options()

    assert options() == {"lr": 0.001}  # as COALA: Adam without weight decay
    assert options(weight_decay=0.1) == {"lr": 0.001, "weight_decay": 0.1}
    assert options(type="sgd", lr=0.1) == {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0005}
    with pytest.raises(UserError, match="momentum = 0.5: Adam has none; write type: SGD"):
        options(momentum=0.5)


def test_load_config_merges_key_by_key_and_names_the_file(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("data:\n  dataset: digits\n  num_of_clients: 4\nserver: {rounds: 3}\n")
    merged = load_config(file, {"data": {"num_of_clients": 8}, "gpu": 2})
    assert merged == {
        "data": {"dataset": "digits", "num_of_clients": 8},
        "server": {"rounds": 3},
        "gpu": 2,
    }
    file.write_text("sever: {rounds: 3}\n")
    with pytest.raises(UserError, match=r"config.yaml: sever: there is no such key"):
        load_config(file)
    file.write_text("- a\n")
    with pytest.raises(UserError, match="holds a list"):
        load_config(str(file))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_config(tmp_path / "other.yaml")


def test_the_page_has_the_table_of_keys_as_it_is():
    page = (Path(__file__).parents[3] / "docs" / "migrate_coala.md").read_text()
    assert table() in page, (
        "run: python -c 'from allhands.federated.coala.config import table; print(table())'"
    )


def test_an_empty_configuration_has_all_defaults():
    assert check(None) == Config()
