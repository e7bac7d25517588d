"""What makes a row and a column of the conformance table, and the loop by hand that each cell must
equal."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from allhands import Callback, SupervisedRunner
from allhands.data.order import Dealer, share_of
from allhands.step.closure import takes_closure

GLOBAL_BATCH = 12  # what 2, 3 and 4 divide
SAMPLES = 22  # the last batch of an epoch is short
TOLERANCE = 1e-5  # relative to the largest value of a tensor


def nothing(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The hook of a training that changes nothing between its epochs."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def features(samples: int = SAMPLES) -> torch.Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(0))


def labels(samples: int = SAMPLES) -> torch.Tensor:
    return torch.randint(0, 3, (samples,), generator=torch.Generator().manual_seed(1))


def values(samples: int = SAMPLES) -> torch.Tensor:
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(2))


def classes() -> TensorDataset:
    return TensorDataset(features(), labels())


def regression() -> TensorDataset:
    return TensorDataset(features(), values())


@dataclass(frozen=True)
class Row:
    """One training, as its user would write it, and what differs in its loop by hand.

    Attributes:
        name: as it stands in the table.
        model, optimizer, criterion, data: make the objects; called anew for each cell.
        runner: trains it.
        options: further arguments of `SupervisedRunner.train`.
        collate: the loader's function.
        epoch_start: is called before each epoch, in a callback and in the loop by hand.
        scheduler: makes one from the optimizer; steps once an epoch.
        loss: in the loop by hand, in place of the criterion.
        epochs: how many.
        plan: of `Tensor`; None leaves the strategy to find one.
        parts: how the loop by hand takes a global batch: "whole"; in "calls", one forward pass for
            each that a worker makes, over the samples of all workers, since the model counts its
            calls; in "shares", a forward pass for each worker's, since the model computes with the
            statistics of a share (BatchNorm).
        compared: which entries of the model's state are compared; None takes all.
        tolerance: largest relative difference.
        counted: what a batch counts in the reported loss.
        cell: trains and compares in its own way, ``(row, arguments) -> the worst difference``.
    """

    name: str
    model: Callable[[], nn.Module]
    criterion: Callable[[], Any] = nn.CrossEntropyLoss
    data: Callable[[], Any] = classes
    optimizer: Callable[[nn.Module], Any] = sgd
    runner: type[SupervisedRunner] = SupervisedRunner
    options: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] = default_collate
    epoch_start: Callable[[int, nn.Module, Any], None] = nothing
    scheduler: Callable[[Any], Any] | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    epochs: int = 2
    plan: Mapping[str, Any] | None = None
    parts: str = "whole"
    compared: Callable[[str], bool] | None = None
    tolerance: float = TOLERANCE
    counted: Callable[[Any, Any], float] = lambda output, target: float(len(target))
    cell: Callable[[Row, dict[str, Any]], float] | None = None


@dataclass(frozen=True)
class Column:
    """One way to train: a strategy on some workers.

    Attributes:
        name: as it stands in the table.
        strategy: ``(row) -> distributed=``.
        workers, servers: processes of the world.
        shares: parts into which the samples of a micro-batch are dealt out.
        accumulate: micro-batches of a step.
        pieces: into which a strategy cuts each micro-batch.
        covers: name of the registered strategy that this column tries.
    """

    name: str
    strategy: Callable[[Row], Any]
    workers: int = 2
    servers: int = 0
    shares: int = 2
    accumulate: int = 1
    pieces: int = 1
    covers: str = ""

    @property
    def batch_size(self) -> int:
        return GLOBAL_BATCH // (self.shares * self.accumulate)


class Steps(Callback):
    """Counts optimizer steps, and runs the row's hook between epochs."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.begun, self.taken = False, 0
        #: Steps of the first epoch, after which the row's hook may change the model.
        self.before_change = 0 if row.epoch_start is nothing else -(-SAMPLES // GLOBAL_BATCH)

    def on_train_start(self, training: Any) -> None:
        self.begun = True

    def on_epoch_start(self, training: Any) -> None:
        self.row.epoch_start(training.epoch, training.model, training.optimizer)

    def on_step_end(self, training: Any) -> None:
        self.taken += 1


def by_hand(row: Row, column: Column) -> tuple[dict[str, torch.Tensor], float]:
    """Train as a plain PyTorch loop in one process; returns the model's state and the mean loss of
    the last epoch."""
    model = row.model()
    optimizer, criterion, runner = row.optimizer(model), row.loss or row.criterion(), row.runner()
    schedule = row.scheduler(optimizer) if row.scheduler is not None else None
    data, clip = row.data(), row.options.get("clip_norm")
    model.train()
    for epoch in range(row.epochs):
        row.epoch_start(epoch, model, optimizer)
        _mode(optimizer, "train")
        total, count = 0.0, 0
        for first in range(0, len(data), GLOBAL_BATCH):
            samples = [data[i] for i in range(first, min(first + GLOBAL_BATCH, len(data)))]
            seen: list[tuple[float, float]] = []

            def compute(
                samples: list[Any] = samples, seen: list[tuple[float, float]] = seen
            ) -> torch.Tensor:
                optimizer.zero_grad()
                whole = torch.zeros(())
                for part in parts_of(samples, column, row.parts):
                    output, target = runner.handle_batch(model, row.collate(part))
                    loss = criterion(output, target)
                    share = loss * (len(part) / len(samples))
                    share.backward()
                    whole = whole + share.detach()
                    seen.append((loss.item(), row.counted(output, target)))
                return whole

            if takes_closure(optimizer):
                optimizer.step(compute)
                del seen[1:]  # the loss with which the step began
            else:
                compute()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            total, count = (
                total + sum(loss * weight for loss, weight in seen),
                count + sum(weight for _, weight in seen),
            )
        if schedule is not None:
            schedule.step()
    _mode(optimizer, "eval")
    return model.state_dict(), total / count


def _mode(optimizer: Any, name: str) -> None:
    """Schedule-free optimizers have modes, as modules have."""
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


def parts_of(samples: list[Any], column: Column, parts: str) -> list[list[Any]]:
    """What the loop by hand passes through the model one after another; see `Row.parts`."""
    if parts == "whole":
        return [samples]
    dealer = Dealer(len(samples), column.batch_size, column.shares, column.accumulate)
    by_rank = []
    for rank in range(column.shares):
        share = dealer.share(0, len(samples), rank)
        rest = iter(samples[share.start :])
        batches = [[next(rest) for _ in range(size)] for size in share.sizes]
        by_rank.append([piece for batch in batches for piece in _pieces(batch, column.pieces)])
    if parts == "shares":
        return [part for rank in by_rank for part in rank if part]
    calls = [
        [rank[call] for rank in by_rank if call < len(rank)]
        for call in range(max(map(len, by_rank)))
    ]
    return [list(itertools.chain.from_iterable(call)) for call in calls]


def _pieces(batch: list[Any], count: int) -> list[list[Any]]:
    bounds = [share_of(len(batch), piece, count) for piece in range(count)]
    return [batch[first:stop] for first, stop in bounds if stop > first]


def difference(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    compared: Callable[[str], bool] | None = None,
) -> float:
    """The largest difference of any entry, relative to its largest value; infinite where a name or
    shape differs."""
    if ours.keys() != theirs.keys():
        raise AssertionError(f"names differ: {sorted(ours.keys() ^ theirs.keys())}")
    worst = 0.0
    for name, right in theirs.items():
        if (compared is not None and not compared(name)) or not isinstance(right, torch.Tensor):
            continue
        mine = ours[name]
        if mine.shape != right.shape or mine.dtype != right.dtype:
            raise AssertionError(
                f"{name}: {mine.dtype} {list(mine.shape)}, right is {right.dtype} "
                f"{list(right.shape)}"
            )
        wide = torch.complex128 if right.is_complex() else torch.float64
        if right.numel():
            size = float(right.to(wide).abs().max())
            apart = float((mine.to(wide) - right.to(wide)).abs().max())
            worst = max(worst, float("inf") if math.isnan(apart) else apart / max(size, 1e-30))
    return worst


def arguments(row: Row, column: Column, folder: Path, steps: Steps) -> dict[str, Any]:
    """What `SupervisedRunner.train` is called with in this cell."""
    from torch.utils.data import DataLoader

    model = row.model()
    optimizer = row.optimizer(model)
    options: dict[str, Any] = {} if row.collate is default_collate else {"collate_fn": row.collate}
    given: dict[str, Any] = {
        "model": model,
        "criterion": row.criterion(),
        "optimizer": optimizer,
        "loaders": {"train": DataLoader(row.data(), batch_size=column.batch_size, **options)},
        "num_epochs": row.epochs,
        "callbacks": [steps],
        "distributed": column.strategy(row),
        "accumulate": column.accumulate,
        **row.options,
    }
    if row.scheduler is not None:
        given["scheduler"] = row.scheduler(optimizer)
    if given.get("logdir") is not None:
        given["logdir"] = folder / given["logdir"]
    return given


def right_of(row: Row, column: Column, folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """What `by_hand` returns. A loop that is the same for all columns runs once for them: `folder`
    keeps what it gave."""
    if row.parts != "whole":
        return by_hand(row, column)
    path = folder / f"{row.name.replace('/', ' ')}.pt"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(by_hand(row, column), unfinished)
        unfinished.replace(path)
    right: tuple[dict[str, torch.Tensor], float] = torch.load(path, weights_only=False)
    return right


def train_and_compare(row: Row, column: Column, given: dict[str, Any], folder: Path) -> float:
    """Train in this world; the largest difference from the loop by hand, of weights, buffers and
    the reported loss. `folder`: of `right_of`."""
    history = row.runner(device="cpu").train(**given)
    right, loss = right_of(row, column, folder)
    apart = difference(given["model"].state_dict(), right, row.compared)
    return max(apart, abs(history["train"]["loss"][-1] - loss) / max(abs(loss), 1e-30))


@contextlib.contextmanager
def quiet() -> Any:
    """Without what a training prints."""
    import io

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
