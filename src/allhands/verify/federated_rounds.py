"""Whether federated training gives the same model on any number of workers: a few rounds on one,
and again on others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from allhands.errors import UserError
from allhands.federated.strategy import Federated
from allhands.report.page import as_written
from allhands.runner import SupervisedRunner

# relative to the largest change of a weight: where devices differ, kernels round differently
_TOLERANCE = 1e-5


@dataclass
class RoundsReport:
    """What `verify_rounds` has found.

    Attributes:
        ok: whether all numbers of workers trained the same.
        text: the table, which is printed already.
    """

    ok: bool
    text: str = ""

    def section(self) -> str:
        """A part of a page: the table."""
        return as_written(self.text)

    def save_plot(self, path: Path) -> None:
        """Refused: rounds have no steps to draw."""
        raise UserError(
            "a comparison of federated rounds is a table without a plot; leave --plot out"
        )


def verify_rounds(
    make: Callable[[], dict[str, Any]],
    strategy: Federated,
    workers: Sequence[int],
    rounds: int,
    device: str | None = None,
) -> RoundsReport:
    """Train some rounds on one worker and on each other number of workers, from the same start, and
    compare who took part, what clients lost, and the model.

    Args:
        make: gives new objects for `SupervisedRunner.train` at each call, alike.
        strategy: what is trained; its own `rounds` are the most.
        workers: numbers of workers.
        rounds: how many.
        device: as for `SupervisedRunner`.
    """
    strategy = copy.deepcopy(strategy)
    strategy.rounds = min(rounds, strategy.rounds)
    size = strategy.devices_per_client
    print(
        f"{strategy.rounds} federated rounds on {size} worker{'s' if size > 1 else ''}, and on "
        "others"
    )
    history, start, end = _trained(make, strategy, size, device)
    scale, ok = float((end - start).abs().max()), True
    lines = [
        "workers  cohorts    losses     weights    largest difference, relative to the largest "
        "change"
    ]
    for count in workers:
        other, _, weights = _trained(make, strategy, count, device)
        if scale:
            far = float((weights - end).abs().max()) / scale
        else:
            far = float((weights - end).abs().max())
        same = [
            other["cohort"] == history["cohort"],
            torch.allclose(
                torch.tensor(other["train"]["loss"]),
                torch.tensor(history["train"]["loss"]),
                rtol=_TOLERANCE,
                equal_nan=True,
            ),
            far <= _TOLERANCE,
        ]
        ok &= all(same)
        lines.append(
            f"{count:7}  "
            + "  ".join(f"{'same' if one else 'DIFFERENT':9}" for one in same)
            + f"  {far:.1e}"
        )
    lines.append(
        "the same training"
        if ok
        else "not the same training: does something depend on the worker that runs it?"
    )
    print("\n".join(lines))
    return RoundsReport(ok, "\n".join(lines))


def _trained(
    make: Callable[[], dict[str, Any]], strategy: Federated, count: int, device: str | None
) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """The history, and all weights and buffers before and after, in float64."""
    objects = make()
    before = _numbers(objects["model"])
    history: dict[str, Any] = SupervisedRunner(device=device).train(
        **objects, distributed=copy.deepcopy(strategy), workers=count
    )
    return history, before, _numbers(objects["model"])


def _numbers(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat(
        [value.detach().cpu().double().reshape(-1) for value in model.state_dict().values()]
    )
