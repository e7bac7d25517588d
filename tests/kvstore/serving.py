"""Servers and workers as threads of one process, over the real connections; and the loop that they
are compared with."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import nn

from allhands.errors import UserError, WorldError
from allhands.kvstore import Trainer
from allhands.kvstore.parameter_server import ParameterServer
from allhands.kvstore.rules import rules_of
from allhands.kvstore.served import ServedStore
from allhands.kvstore.store_modes import mode_named
from tests.kvstore.training import OPTIMIZERS, SIZES, model, take_steps

TOKEN = "0123456789abcdef" * 4


class Job:
    """Some servers, and stores that are connected to them."""

    def __init__(self, workers: int, servers: int = 1, lease: float = 10.0) -> None:
        self.workers = workers
        self.servers = [
            ParameterServer(number, servers, workers, TOKEN.encode(), lease=lease)
            for number in range(servers)
        ]
        for server in self.servers:
            server.find = self.announced
            server.start()
        self.where = [server.where() for server in self.servers]
        self.stores: list[ServedStore] = []

    def announced(self, number: int) -> dict[str, Any]:
        """Where a server is now."""
        return self.where[number]

    def store(
        self,
        rank: int,
        kind: str = "dist",
        number: int = 0,
        life: str = "one",
        transport: str = "auto",
        **options: Any,
    ) -> ServedStore:
        mode = mode_named(kind)
        rules = rules_of(mode, options)
        made = ServedStore(mode, rank, self.workers, self.where, rules, number, life, transport)
        self.stores.append(made)
        return made

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(rank)` for all ranks at once; what each returned. When one raises, the others'
        stores end."""
        pool = ThreadPoolExecutor(self.workers)
        try:
            waiting = [pool.submit(work, rank) for rank in range(self.workers)]
            wait(waiting, 60.0, FIRST_EXCEPTION)
            raised = [one for one in waiting if one.done() and one.exception() is not None]
            if raised or not all(one.done() for one in waiting):
                for store in self.stores:
                    store._wait_state.fail(WorldError("another worker of the test has failed"))
                self.close()
            return [one.result(1.0) for one in (*raised, *waiting)][len(raised) :]
        finally:
            pool.shutdown(wait=False)

    def close(self) -> None:
        for store in self.stores:
            with contextlib.suppress(Exception):
                store.close()
            for link in store.links:  # of a store that was lost, or could not close
                link.abandon()
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def job(workers: int, servers: int = 1, lease: float = 10.0) -> Iterator[Job]:
    """A job that ends with the block."""
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLHANDS_TOKEN", TOKEN)
        made = Job(workers, servers, lease)
        try:
            yield made
        finally:
            made.close()
            # One that is in the midst of torch when the interpreter ends takes the process down
            # with it.
            end = time.monotonic() + 2.0
            for thread in set(threading.enumerate()) - before:
                if thread.name != "snapshots":  # which waits for more
                    with contextlib.suppress(RuntimeError):  # one that is about to start
                        thread.join(max(0.0, end - time.monotonic()))
            assert threading.active_count() < 400


Weights = dict[str, torch.Tensor]


def trained(
    made: Job,
    name: str,
    kind: str = "dist",
    number: int = 0,
    rules: dict[str, Any] | None = None,
    transport: str = "auto",
    **options: Any,
) -> list[Weights]:
    """The small training on all workers of a job; each one's weights in the end."""
    nets = [model(seed=rank) for rank in range(made.workers)]  # worker 0's weights are taken

    def work(rank: int) -> Weights:
        store = made.store(rank, kind, number, transport=transport, **(rules or {}))
        optimizer, optimizer_params, _ = OPTIMIZERS[name]
        trainer = Trainer(
            nets[rank].named_parameters(), optimizer, optimizer_params, kvstore=store, **options
        )
        take_steps(nets[rank], trainer, store, range(len(SIZES)))
        store.close()
        return weights_of(nets[rank])

    return made.run(work)


def weights_of(net: nn.Module) -> Weights:
    return {key: value.detach().clone() for key, value in net.state_dict().items()}


def same(ours: Weights, theirs: Weights) -> bool:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


def error_of(call: Callable[[], Any]) -> str:
    """The message of the `UserError` that the call ends with."""
    with pytest.raises(UserError) as raised:
        call()
    return str(raised.value)
