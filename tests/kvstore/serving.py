"""Servers and workers as threads of one process, over the real connections; and the loop that they are compared with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from allhands.kvstore.modes import mode_named
from allhands.kvstore.rules import rules_of
from allhands.kvstore.served import ServedStore
from allhands.kvstore.server import Server

TOKEN = "0123456789abcdef" * 4


class Job:
    """Some servers, and stores that are connected to them."""

    def __init__(self, workers: int, servers: int = 1, lease: float = 10.0) -> None:
        self.workers = workers
        self.servers = [Server(number, servers, workers, TOKEN.encode(), lease=lease) for number in range(servers)]
        for server in self.servers:
            server.start()
        self.where = [server.where() for server in self.servers]
        self.stores: list[ServedStore] = []

    def store(self, rank: int, kind: str = "dist", number: int = 0, life: str = "one", transport: str = "auto",
              **options: Any) -> ServedStore:  # fmt: skip
        mode = mode_named(kind)
        rules = rules_of(mode, options)
        made = ServedStore(mode, rank, self.workers, self.where, rules, number, life, transport)
        self.stores.append(made)
        return made

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(rank)` for all ranks at once; what each returned."""
        with ThreadPoolExecutor(self.workers) as pool:
            waiting = [pool.submit(work, rank) for rank in range(self.workers)]
            return [one.result(60.0) for one in waiting]

    def close(self) -> None:
        for store in self.stores:
            with contextlib.suppress(Exception):
                store.close()
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def job(workers: int, servers: int = 1, lease: float = 10.0) -> Iterator[Job]:
    """A job that ends with the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLHANDS_KVSTORE_TOKEN", TOKEN)
        made = Job(workers, servers, lease)
        try:
            yield made
        finally:
            made.close()
            assert threading.active_count() < 400
