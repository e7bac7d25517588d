"""Exchanges with real parameter servers on this machine, by which a plan knows what they take
beside the link."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from allhands.environ import variables
from allhands.kvstore.optimizers import hyper, spec_of_torch
from allhands.kvstore.parameter_server import ParameterServer
from allhands.kvstore.rules import rules_of
from allhands.kvstore.served import ServedStore
from allhands.kvstore.store import Share
from allhands.kvstore.store_modes import mode_named
from allhands.planning.dry_step import Workload
from allhands.strategies import KVStore, Strategy
from allhands.strategies.stored_model import slots_of_optimizer
from allhands.wire import TOKEN

_WARM, _TURNS = 3, 12
_SPREAD = 0.02


def exchange_seconds(
    workload: Workload, strategy: Strategy, workers: int, local: bool
) -> float | None:
    """Seconds in which workers push gradients and have all new weights, without a link between
    them: by exchanges of one worker and of two with servers in processes of their own.

    Args:
        workload: what is trained.
        strategy: `KVStore` with servers.
        workers: how many there would be; each beyond the first takes equally long.
        local: they share memory with the servers.

    Returns:
        None where this process has used a GPU and cannot be forked.
    """
    assert isinstance(strategy, KVStore)
    if torch.cuda.is_initialized():
        return None
    transport = "auto" if local else "tcp"
    one, two = (_exchange(workload, strategy, count, transport) for count in (1, 2))
    return one + (workers - 1) * max(0.0, two - one)


def _exchange(workload: Workload, strategy: KVStore, workers: int, transport: str) -> float:
    """The median of a few, of workers that are threads of this process."""
    mode = mode_named(f"dist_{strategy.mode}")
    rules = rules_of(mode, strategy.options)
    slots, numbers = slots_of_optimizer(workload.model, workload.optimizer)
    options = [hyper(group) for group in workload.optimizer.param_groups]
    together, share = threading.Barrier(workers), Share(1.0, float(workers))

    def work(rank: int, where: list[dict[str, Any]]) -> list[tuple[float, float]]:
        weights, gradients = (
            {one.name: torch.randn(one.first.shape) * _SPREAD for one in slots} for _ in range(2)
        )
        store = ServedStore(mode, rank, workers, where, rules, 0, transport=transport)
        times = []
        try:
            if strategy.takes_step:
                store.set_optimizer(spec_of_torch(workload.optimizer)[0])
            if strategy.compress is not None:
                store.set_gradient_compression(strategy.compress)
            store.declare(weights, complete=True, groups=numbers if strategy.takes_step else None)
            for _ in range(_WARM + _TURNS):
                together.wait()
                began = time.perf_counter()
                if strategy.takes_step:
                    store.update(gradients, weights, share, options)
                else:
                    store.reduce(gradients, share)
                times.append((began, time.perf_counter()))
        except BaseException:
            together.abort()
            raise
        finally:
            store.close()
        return times

    with _servers(strategy.servers or 1, workers) as where, ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda rank: work(rank, where), range(workers)))
    turns = list(zip(*found, strict=True))[_WARM:]
    return statistics.median(
        max(end for _, end in turn) - min(began for began, _ in turn) for turn in turns
    )


@contextmanager
def _servers(count: int, workers: int) -> Iterator[list[dict[str, Any]]]:
    """Within, there are servers, each in a process of its own: where they listen."""
    context = multiprocessing.get_context("fork")
    with variables({TOKEN: secrets.token_hex(32)}):
        processes = []
        try:
            where = []
            for number in range(count):
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve, args=(number, count, workers, there), daemon=True
                )
                process.start()
                processes.append(process)
                where.append(here.recv())
            yield where
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(number: int, servers: int, workers: int, pipe: Any) -> None:
    torch.set_num_threads(1)  # the threads of the parent are not there
    server = ParameterServer(number, servers, workers, os.environ[TOKEN].encode())
    server.start()
    pipe.send(server.where())
    threading.Event().wait()
