"""Many small trainings in one world: starting workers costs seconds, a tiny training costs milliseconds.

A function marked with `probe` is run on every rank of a world of 1, of 2 and of 3 workers, together with all other probes of
the modules that were collected. The fixture ``found`` (in conftest.py) gives what each one returned, by rank; a probe that
raises fails only the tests that ask for it. A probe must do the same collectives on all ranks, so one in which a single rank
fails needs a start of its own.
"""

from __future__ import annotations

import faulthandler
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import DDP, SupervisedRunner, UserError
from tests.reference import Slope, mean_output

PROBES: dict[str, Callable[[], Any]] = {}


def probe(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have `function` run in the shared worlds; it returns plain data (None, numbers, strings, tensors, lists, dicts)."""
    PROBES[f"{function.__module__}.{function.__name__}"] = function
    return function


class Found:
    """What the probes gave in a world of `workers`."""

    def __init__(self, workers: int, ranks: list[dict[str, Any]]) -> None:
        self.workers = workers
        self._ranks = ranks

    def __call__(self, function: Callable[[], Any]) -> list[Any]:
        """What `function` returned, by rank."""
        name = f"{function.__module__}.{function.__name__}"
        errors = [f"rank {rank}: {found[name]['error']}" for rank, found in enumerate(self._ranks) if "error" in found[name]]
        assert not errors, "\n".join(errors)
        return [found[name]["value"] for found in self._ranks]


def run_all(probes: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Every probe's result or traceback, on this rank."""
    results: dict[str, Any] = {}
    for name, function in probes.items():
        torch.manual_seed(0)
        faulthandler.dump_traceback_later(60, exit=True)  # a hang ends the world at once, and shows where
        try:
            results[name] = {"value": function()}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
    return results


def size() -> int:
    """Workers in this world."""
    world = allhands.current_world()
    assert world is not None
    return world.world_size


def a_share(samples: int) -> int:
    """The batch size with which one optimizer step takes all samples."""
    return -(-samples // size())


def train(model: nn.Module, tensors: tuple[torch.Tensor, ...], batch: int, criterion: Any = mean_output, lr: float = 1.0,
          epochs: int = 1, **options: Any) -> Any:  # fmt: skip
    """Train with SGD on tensors in their order; returns the history."""
    strategy = options.pop("strategy", None) or DDP()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    return options.pop("runner", SupervisedRunner(device="cpu")).train(
        model=model, criterion=criterion, optimizer=optimizer, num_epochs=epochs, distributed=strategy,
        loaders={"train": DataLoader(TensorDataset(*tensors), batch)}, **options,
    )  # fmt: skip


def slope_after(samples: int, batch: int, **options: Any) -> float:
    """-w after training on 1, 2, …, `samples`: the sum of the steps' mean samples."""
    model, x = Slope(), torch.arange(1.0, samples + 1)
    train(model, (x, x), batch, **options)
    return -float(model.w.detach())


def sum_of_means(samples: int, global_batch: int) -> float:
    """What `slope_after` must give: every global batch's mean, the last one's over as many samples as it has."""
    x = torch.arange(1.0, samples + 1, dtype=torch.float64)
    return float(sum(part.mean() for part in x.split(global_batch)))


def refusal(function: Callable[[], Any]) -> str:
    """The message of the `UserError` that all ranks get; "" when nothing is refused."""
    try:
        function()
    except UserError as error:
        return str(error)
    return ""
