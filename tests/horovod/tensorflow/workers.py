"""Two processes with TensorFlow that call what tests ask them to, so that each of them imports it
once and not once a test."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from allhands.launch import spawn
from tests.worlds import ONE_THREAD

# The process that forks the workers imports these once; what computes begins in each of them.
PRELOAD = ("tensorflow", "allhands.horovod.tensorflow.keras")
STARTED_S = 90
ANSWERED_S = 60


class Workers:
    """The processes, in the order of their ranks."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def __len__(self) -> int:
        return len(self._connections)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returns on each rank; fails with the traceback of the first rank
        where it raises."""
        for connection in self._connections:
            connection.send((function, args))
        answers = []
        for rank, connection in enumerate(self._connections):
            assert connection.poll(ANSWERED_S), (
                f"{function.__name__}: no answer of rank {rank} within {ANSWERED_S} s"
            )
            answers.append(connection.recv())
        for rank, (failed, answer) in enumerate(answers):
            assert not failed, f"{function.__name__} on rank {rank}: {answer}"
        return [answer for _, answer in answers]


@contextmanager
def started(
    folder: Path, number: int = 2, env: Mapping[str, str] | None = None
) -> Iterator[Workers]:
    """`number` workers that have called ``hvd.init()``, with these variables."""
    failures: list[BaseException] = []
    address = str(folder / "workers")

    def run() -> None:
        try:
            own = {**ONE_THREAD, "TF_CPP_MIN_LOG_LEVEL": "2", **(env or {})}
            spawn(_serve, (address,), workers=number, env=own, preload=PRELOAD)
        except BaseException as error:
            failures.append(error)
            with Client(address) as connection:  # whoever waits in accept() need not wait longer
                connection.send(-1)

    with Listener(address) as listener:
        thread = threading.Thread(target=run, name="workers")
        thread.start()
        connections: dict[int, Connection] = {}
        while len(connections) < number:
            connection = listener.accept()
            rank = connection.recv()
            if rank < 0:
                raise failures[0]
            connections[rank] = connection
        try:
            yield Workers([connections[rank] for rank in range(number)])
        finally:
            for connection in connections.values():
                connection.close()
            thread.join(STARTED_S)
            assert not thread.is_alive(), "the workers did not end"


def _serve(address: str) -> None:
    import allhands.horovod.tensorflow as hvd

    hvd.init()
    with Client(address) as connection:
        connection.send(hvd.rank())
        while True:
            try:
                function, args = connection.recv()
            except EOFError:
                break
            try:
                connection.send((False, function(*args)))
            except BaseException:
                connection.send((True, traceback.format_exc()))
    hvd.shutdown()
