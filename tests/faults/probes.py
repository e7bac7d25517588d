"""Many small trainings in one world: starting workers costs seconds, a tiny training costs
milliseconds.

A function marked with `probe` is run on every rank of a world of 1, of 2 and of 3 workers, together
with all other probes of the modules that were collected. The fixture ``found`` (in conftest.py)
gives what each one returned, by rank; a probe that raises, or ends its world, fails only the tests
that ask for it. A probe must do the same collectives on all ranks, so one in which a single rank
fails needs a start of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import DDP, SupervisedRunner, WorkerError
from tests.reference import Slope, mean_output
from tests.worlds import in_world

PROBES: dict[str, Callable[[], Any]] = {}
#: Names of those that only tests marked as rare ask for.
RARE: set[str] = set()


LIMIT = 60  # seconds for a probe; after them its world ends, and shows where it was


def probe(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have `function` run in the shared worlds; it returns plain data (None, numbers, strings,
    tensors, lists, dicts)."""
    PROBES[_name(function)] = function
    return function


def probe_each(
    cases: Iterable[str], rare: Iterable[str] = ()
) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Have `function(case)` run in the shared worlds for each case, as a probe of its own; tests of
    `rare` ones are marked so."""

    def register(function: Callable[[str], Any]) -> Callable[[str], Any]:
        PROBES.update({_name(function, case): functools.partial(function, case) for case in cases})
        RARE.update(_name(function, case) for case in rare)
        return function

    return register


def _name(function: Callable[..., Any], *case: str) -> str:
    return ".".join((function.__module__, function.__name__, *case))


class Found:
    """What the probes gave in a world of `workers`."""

    def __init__(self, workers: int, ranks: list[dict[str, Any]]) -> None:
        self.workers = workers
        self._ranks = ranks

    def __call__(self, function: Callable[..., Any], *case: str) -> list[Any]:
        """What `function` returned, by rank."""
        name = _name(function, *case)
        errors = [
            f"rank {rank}: {found[name]['error']}"
            for rank, found in enumerate(self._ranks)
            if "error" in found[name]
        ]
        assert not errors, "\n".join(errors)
        return [found[name]["value"] for found in self._ranks]


def run_in_world(workers: int, rare: bool) -> Found:
    """Every probe's result or error, by rank, of rare ones if asked. Where one ends its world,
    those after it run in another."""
    ranks: list[dict[str, Any]] = [{} for _ in range(workers)]
    left = [name for name in PROBES if rare or name not in RARE]
    while left:
        failure = None
        with tempfile.TemporaryDirectory() as folder:
            try:
                probes = {name: PROBES[name] for name in left}
                in_world(workers, _run_all, probes, folder, preload=("torchmetrics",))
            except WorkerError as error:
                failure = error
            for rank, results in enumerate(ranks):
                results.update(_read(Path(folder) / str(rank)))
        left = [name for name in left if not all(name in results for results in ranks)]
        if failure is not None:
            if not left:
                raise failure
            for results in ranks:
                results[left[0]] = {"error": str(failure)}
            del left[0]
    return Found(workers, ranks)


def _run_all(probes: dict[str, Callable[[], Any]], folder: str) -> None:
    """Write every probe's result or traceback on this rank, as soon as it is there."""
    world = allhands.current_world()
    assert world is not None
    with (Path(folder) / str(world.rank)).open("wb") as file:
        for name, function in probes.items():
            torch.default_generator.manual_seed(0)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                result = {"value": function()}
            except Exception:
                result = {"error": traceback.format_exc()}
            faulthandler.cancel_dump_traceback_later()
            pickle.dump((name, result), file)
            file.flush()


def _read(path: Path) -> dict[str, Any]:
    """What a rank has written; the last entry may be cut short where it was killed."""
    results = {}
    with (
        contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError),
        path.open("rb") as file,
    ):
        while True:
            name, result = pickle.load(file)
            results[name] = result
    return results


def size() -> int:
    """Workers in this world."""
    world = allhands.current_world()
    assert world is not None
    return world.world_size


def a_share(samples: int) -> int:
    """The batch size with which one optimizer step takes all samples."""
    return -(-samples // size())


def train(
    model: nn.Module,
    tensors: tuple[torch.Tensor, ...],
    batch: int,
    criterion: Any = mean_output,
    lr: float = 1.0,
    epochs: int = 1,
    **options: Any,
) -> Any:
    """Train with SGD on tensors in their order; returns the history."""
    strategy = options.pop("strategy", None) or DDP()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    return options.pop("runner", SupervisedRunner(device="cpu")).train(
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        num_epochs=epochs,
        distributed=strategy,
        loaders={"train": DataLoader(TensorDataset(*tensors), batch)},
        **options,
    )


def slope_after(samples: int, batch: int, **options: Any) -> float:
    """-w after training on 1, 2, …, `samples`: the sum of the steps' mean samples."""
    model, x = Slope(), torch.arange(1.0, samples + 1)
    train(model, (x, x), batch, **options)
    return -float(model.w.detach())


def sum_of_means(samples: int, global_batch: int) -> float:
    """What `slope_after` must give: every global batch's mean, the last one's over as many samples
    as it has."""
    x = torch.arange(1.0, samples + 1, dtype=torch.float64)
    return float(sum(part.mean() for part in x.split(global_batch)))
