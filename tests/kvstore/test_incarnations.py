"""What a worker sends that was started again in the meantime does not count."""

from __future__ import annotations

import pytest
import torch

from allhands.errors import WorldError
from tests.kvstore.serving import job


@pytest.mark.parametrize("transport", ["tcp", "shared"])
def test_pushes_of_an_old_incarnation_are_not_counted(transport: str) -> None:
    with job(2) as made:

        def begin(rank: int) -> None:
            store = made.store(rank, on_worker_loss="continue", transport=transport)
            store.init("a", torch.zeros(3))
            store.pushpull("a", torch.ones(3), out := torch.empty(3))
            assert out.tolist() == [2.0] * 3

        made.run(begin)
        zero, old = sorted(made.stores, key=lambda store: store.rank)
        made.store(1, life="two", on_worker_loss="continue", transport=transport)
        with pytest.raises(WorldError):
            old.pushpull("a", torch.full((3,), 100.0), torch.empty(3))
        with pytest.raises(WorldError):  # for good
            old.push("a", torch.full((3,), 100.0))
        zero.pushpull("a", torch.ones(3), out := torch.empty(3))
        assert out.tolist() == [1.0] * 3
