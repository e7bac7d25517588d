"""A function and its arguments on their way to the workers of this host, and their results on the
way back."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from allhands.errors import UserError
from allhands.launch import caller, handback, ship
from allhands.launch.unpicklable import explain, name_arguments


class Shipment:
    """The files of one call. `folders` are to be removed in the end, by `close` or by the agent."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self._shipped = ""
        self._numbered = ship.Numbered()
        self._return_folder = ""

    def pack(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the caller's settings, the function and its arguments; returns the task that runs
        it.

        Raises:
            UserError: something in them cannot be pickled; names it.
        """
        try:
            self._shipped = ship.dump(
                (caller.sent(), fn, tuple(args), kwargs), self._make_folder, self._numbered
            )
        except UserError:
            raise
        except Exception as error:
            raise explain(error, {"fn": fn, **name_arguments(fn, args, kwargs)}) from error
        self._return_folder = self._make_folder(0)
        return {
            "function": self._shipped,
            "sys_path": [str(entry) for entry in sys.path],
            "argv": list(sys.argv),
        }

    def with_results(self, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tasks, those of workers with a file for the result."""
        return [
            {**task, "result": self._result_of(task["rank"])} if "function" in task else task
            for task in tasks
        ]

    def take_back(self, ranks: Iterable[int]) -> None:
        """Put what workers have handed back (`handback.write`) into the objects that were sent to
        them."""
        lost = []
        for rank in ranks:
            path = self._result_of(rank) + handback.SUFFIX
            if os.path.exists(path):
                lost += handback.apply(path, self._numbered)
        if lost:
            warnings.warn(
                f"not everything could be handed back from the workers: {'; '.join(lost)}",
                stacklevel=2,
            )

    def all_loaded(self) -> None:
        """Every worker has read the arguments."""
        os.unlink(self._shipped)

    def close(self) -> None:
        """Remove all files."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _result_of(self, rank: int) -> str:
        return os.path.join(self._return_folder, f"result-{rank}")

    def _make_folder(self, nbytes: int) -> str:
        self.folders.append(ship.make_directory(nbytes))
        return self.folders[-1]
