"""Exchanges with real parameter servers, for a plan."""

from __future__ import annotations

import multiprocessing
import os

from allhands import KVStore
from allhands.planning.real_servers import exchange_seconds
from tests.planning.test_dry_step import workload


def test_exchanges_with_servers_take_their_time_and_leave_nothing() -> None:
    given = workload(1)
    before = {name: one.clone() for name, one in given.model.named_parameters()}
    environ = dict(os.environ)
    for strategy in (
        KVStore(servers=2, compress="fp16"),
        KVStore("async", servers=1),
        KVStore(servers=1, update="worker"),
    ):
        for local in (True, False):
            two, many = (exchange_seconds(given, strategy, n, local) for n in (2, 100))
            assert two is not None
            assert many is not None
            assert 1e-5 < two < 10
            assert many > 1e-5
    assert not multiprocessing.active_children()
    assert environ == dict(os.environ)
    assert not given.optimizer.state
    assert all(bool((one == before[name]).all()) for name, one in given.model.named_parameters())
