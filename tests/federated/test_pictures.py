"""Pictures of partitions."""

from __future__ import annotations

import numpy as np
import pytest

from allhands.federated import partitions
from allhands.federated.pictures import class_counts, picture

TARGETS = np.arange(1000) % 10


def test_counts_are_those_of_a_loop():
    clients = partitions.dirichlet(TARGETS, 7)
    counts, known = class_counts(clients, TARGETS)
    assert known.tolist() == list(range(10))
    for client in range(7):
        own = TARGETS[clients.samples(client).numpy()]
        assert counts[client].tolist() == [int((own == label).sum()) for label in range(10)]


@pytest.mark.parametrize("clients", [10, 200])
@pytest.mark.parametrize("targets", [TARGETS, None])
def test_a_picture_is_written(tmp_path, clients, targets):
    pytest.importorskip("matplotlib")
    picture(partitions.iid(1000, clients), targets, tmp_path / "who.png")
    assert (tmp_path / "who.png").read_bytes().startswith(b"\x89PNG")
