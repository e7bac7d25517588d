"""Partitions: exact, seeded, as their papers say, and refused with the numbers where they cannot
be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allhands.errors import UserError
from allhands.federated import partitions
from allhands.federated.clients import Clients
from allhands.federated.samples import Samples

TARGETS = np.random.default_rng(0).integers(0, 10, 2000)
SAMPLES = Samples((torch.arange(2000.0), torch.from_numpy(TARGETS)), torch.device("cpu"))


def histogram(made: Clients) -> np.ndarray:
    """Samples by client and class: ``[clients, classes]``."""
    return np.stack(
        [np.bincount(TARGETS[made.samples(i).numpy()], minlength=10) for i in range(len(made))]
    )


@pytest.mark.parametrize(
    "given",
    [
        "iid",
        {"name": "classes", "per_client": 2},
        {"name": "dirichlet", "alpha": 0.5},
        {"name": "quantity", "alpha": 0.5},
        {"name": "quantity", "weights": [1, 3]},
    ],
)
def test_every_sample_has_one_client_and_the_seed_decides_which(given):
    made, again, other = (partitions.partition_of(given, SAMPLES, 20, seed) for seed in (1, 1, 2))
    made.check_exact(2000)
    assert torch.equal(made.indices, again.indices)
    assert not torch.equal(made.indices, other.indices)


def test_iid_clients_are_of_one_size_and_see_all_classes():
    made = partitions.iid(2003, 20)
    assert set(made.sizes) == {100, 101}
    assert (histogram(partitions.iid(2000, 20)) > 0).all()


@pytest.mark.parametrize("per_client", [1, 2, 3, 10])
def test_by_class_every_client_sees_as_many_classes_as_asked(per_client):
    seen = histogram(partitions.classes(TARGETS, 20, per_client)) > 0
    assert (seen.sum(1) == per_client).all()
    assert seen.any(0).all()


def test_dirichlet_keeps_the_minimum_and_small_alphas_give_few_classes():
    few, all_alike = (
        histogram(partitions.dirichlet(TARGETS, 10, alpha)) for alpha in (0.1, 1000.0)
    )
    assert few.sum(1).min() >= 10
    share = few.max(1) / few.sum(1)
    even = all_alike.max(1) / all_alike.sum(1)
    assert share.mean() > 2 * even.mean()


def test_quantity_keeps_the_minimum_and_weights_are_proportions():
    assert partitions.quantity(2000, 50, alpha=0.05, min_size=5).sizes.min() >= 5
    assert partitions.quantity(2000, 4, weights=[1, 3], min_size=0).sizes.tolist() == [
        250,
        750,
        250,
        750,
    ]


def test_natural_clients_are_the_values_of_a_column(tmp_path):
    writers = np.array(["b", "a", "b", "c", "a", "b"])
    made = partitions.natural(writers)
    assert made.names == ["a", "b", "c"]
    assert made.samples(1).tolist() == [0, 2, 5]
    merged = partitions.natural(writers, min_size=2, small="merge")
    assert merged.names == ["a", "b", "others"]
    assert merged.sizes.tolist() == [2, 3, 1]
    np.savez(tmp_path / "digits.npz", writer=writers)
    assert partitions.natural(f"{tmp_path}/digits.npz:writer").names == made.names
    with pytest.raises(UserError, match="no array 'speaker'; it has writer"):
        partitions.natural(f"{tmp_path}/digits.npz:speaker")
    with pytest.raises(
        UserError, match="such as 'c' with 1; write a smaller min_size, or small='merge'"
    ):
        partitions.natural(writers, min_size=2)


def test_folders_are_clients(tmp_path):
    for name in (
        "hospital_a/x/1.png",
        "hospital_a/2.png",
        "hospital_b/3.png",
        "hospital_b/notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files, made = partitions.folders(tmp_path)
    assert [file.name for file in files] == ["2.png", "1.png", "3.png"]
    assert made.names == ["hospital_a", "hospital_b"]
    assert made.sizes.tolist() == [2, 1]
    (tmp_path / "hospital_c").mkdir()
    with pytest.raises(UserError, match="the client 'hospital_c' has no file"):
        partitions.folders(tmp_path)


def test_a_function_of_the_users_is_called_with_targets_clients_and_seed():
    made = partitions.partition_of(
        lambda targets, clients, seed: [np.flatnonzero(targets == c) for c in range(clients)],
        SAMPLES,
        10,
        3,
    )
    assert (histogram(made) > 0).sum() == 10


def test_a_hundred_thousand_clients_are_two_arrays():
    made = partitions.dirichlet(np.random.default_rng(0).integers(0, 10, 1_000_000), 50, 1.0)
    assert len(made) == 50
    many = partitions.iid(1_000_000, 100_000)
    assert len(many) == 100_000
    assert many.size(99_999) == 10
    many.check_exact(1_000_000)


@pytest.mark.parametrize(
    ("given", "clients", "message"),
    [
        ("dirichlett", 10, "there is no partition 'dirichlett'; did you mean 'dirichlet'"),
        ({"name": "dirichlet", "alfa": 1}, 10, "no option 'alfa'; did you mean 'alpha'"),
        (
            {"name": "dirichlet", "alpha": 0.5, "min_size": 300},
            10,
            "need 3,000, and the data set has 2,000; write at most",
        ),
        (
            {"name": "dirichlet", "alpha": 0.01, "min_size": 190},
            10,
            "write a larger alpha, fewer clients, or min_size=",
        ),
        ({"name": "classes", "per_client": 11}, 20, "the data set has 10 classes: write 1 to 10"),
        ({"name": "classes"}, 5, "would leave a class without a client; write clients=10 or more"),
        ({"name": "quantity"}, 5, "needs either alpha="),
        (
            {"name": "quantity", "weights": [1, 2, 3]},
            5,
            "as many as clients=5, or a number that divides it",
        ),
        ("iid", None, "needs the number of clients; write clients=10"),
        ("iid", 3000, "3000 clients with at least min_size=1 samples each need 3,000"),
        (
            [range(1000), range(1000, 2000), []],
            None,
            "1 of 3 clients have no sample, such as client 2",
        ),
        ([range(1000), range(999, 2000)], None, "sample 999 belongs to 2 clients"),
        ([range(1000), range(1000, 1999)], None, "sample 1999 belongs to 0 clients"),
        ([range(2001)], None, "names sample 2000, and the data set has 2000"),
        ([range(1000), range(1000, 2000)], 3, "clients=3, and the partition has 2"),
        (7, 3, "partition=7 is not known"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(given, clients, message):
    with pytest.raises(UserError, match=message):
        partitions.partition_of(given, SAMPLES, clients, 0)


def test_classes_need_targets():
    hidden = Samples([(torch.zeros(1), 0)] * 20, torch.device("cpu"))
    with pytest.raises(
        UserError, match="does not show its targets; give it an attribute `targets`"
    ):
        partitions.partition_of({"name": "dirichlet"}, hidden, 2, 0)
