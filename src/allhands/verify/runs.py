"""The runs that are compared: the user's training, distributed or alone, whole or with one thing
changed."""

from __future__ import annotations

import copy
import math
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allhands.compat import BatchNormBase, DropoutBase
from allhands.data import Feed, Source, map_tensors
from allhands.errors import AllhandsError
from allhands.launch import ship
from allhands.loop.settings import Data
from allhands.strategies import Strategy
from allhands.verify.noise import Difference, Noise
from allhands.verify.traces import Subject, Trace, Variation

# The noise is at least so many times the distance between 1 and the next number of the parameters'
# type.
_FLOOR = 4.0
_DROPOUTS = (DropoutBase, nn.MultiheadAttention)


def subject_of(model: nn.Module, precision: str, device: str | None) -> Subject:
    """What is known of the training of a model, on "cpu" or a GPU."""
    floor = floor_of(model)
    eps = floor / 4
    if precision != "fp32":
        eps = torch.finfo(torch.bfloat16).eps
    elif device != "cpu" and torch.cuda.is_available():
        eps = 2.0**-10  # TF32, which convolutions use without being asked
    return Subject(
        floor,
        min(0.05, 1000 * eps),
        precision != "fp16" and floor > 1e-12,
        sum(p.requires_grad for p in model.parameters()),
        {
            kind: [name or "the model" for name, _ in frozen_modules(model, kind)]
            for kind in ("batchnorm", "dropout")
        },
    )


def floor_of(model: nn.Module) -> float:
    """The least noise that is assumed, from the type of the first floating-point parameter."""
    kinds = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return _FLOOR * torch.finfo(kinds[0] if kinds else torch.float32).eps


class CannotVary(AllhandsError):
    """The training does not run with what a `Variation` changes; its first line says why."""


class GlobalBatches(Data):
    """The user's data in the global batches of `workers` workers, for one process.

    Batches of the user's own batch sampler cannot be made larger; they are accumulated instead (see
    `accumulate_for`).
    """

    def __init__(self, data: Data, variation: Variation, accumulate: int, evaluates: bool) -> None:
        super().__init__(data.loaders, data.datasets, data.same_everywhere, data.optional)
        self.variation, self.accumulate, self.evaluates = variation, accumulate, evaluates

    def sources(self, seed: int) -> dict[str, Source]:
        sources = super().sources(seed)
        variation = self.variation
        trained = [source for source in sources.values() if source.trains]
        if variation.drop_last:
            for source in trained:
                source.drop_last = True
        if variation.alone_for and not batches_are_made(trained):
            for source in trained:
                if source.batch_size is not None:  # what is wrong with None, the feed says
                    source.batch_size = (
                        source.batch_size * variation.alone_for * self.accumulate // variation.cut
                    )
        return sources if self.evaluates else {source.name: source for source in trained}


def accumulate_for(variation: Variation, accumulate: int, trained: list[Source]) -> int:
    """Micro-batches in one step of `GlobalBatches`."""
    if not variation.alone_for:
        return accumulate
    return variation.alone_for * accumulate if batches_are_made(trained) else variation.cut


def smallest_cut(trained: list[Source], shares: int, accumulate: int) -> int:
    """Into how many equal micro-batches every global batch can be cut, at least 2; 1 when it cannot
    be."""
    if batches_are_made(trained) or not trained:
        return 1
    common = math.gcd(*(int(source.batch_size or 1) * shares * accumulate for source in trained))
    # One sample in a micro-batch is more than another order of summation: BatchNorm refuses it.
    return next((number for number in range(2, common // 2 + 1) if common % number == 0), 1)


def batches_are_made(trained: list[Source]) -> bool:
    """Whether a batch sampler of the user's makes batches of one of the loaders."""
    return any(source.batch_sampler is not None for source in trained)


class Runs(ABC):
    """The runs of one training, and the folder through which references reach every process."""

    subject: Subject
    probe: Any

    def __init__(self) -> None:
        self._folders: list[str] = []

    def _folder(self, nbytes: int) -> str:
        self._folders.append(ship.make_directory(nbytes))
        return self._folders[-1]

    def close(self) -> None:
        """Remove the files."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def reference(self, variation: Variation) -> tuple[str, Trace]:
        """Run alone and keep every tensor; the path of the file that holds them, and the run."""
        trace = self.alone(variation, keep=True)
        path = ship.dump(trace.steps, self._folder)
        for step in trace.steps:
            for key in ("gradients", "parameters", "buffers"):
                del step[key]
        return path, trace

    def forget(self, path: str) -> None:
        """Remove a reference."""
        for folder in [folder for folder in self._folders if path.startswith(folder)]:
            shutil.rmtree(folder, ignore_errors=True)
            self._folders.remove(folder)

    @abstractmethod
    def cut(self, shares: int) -> int:
        """Into how many equal micro-batches every global batch can be cut, at least 2; 1 when it
        cannot be."""

    @abstractmethod
    def exact(self, strategy: Strategy) -> bool:
        """Whether the strategy is exact in this training."""

    @abstractmethod
    def alone(
        self, variation: Variation, reference: str | None = None, keep: bool = False
    ) -> Trace:
        """Run in one process.

        Raises:
            CannotVary: the training does not run with that variation.
        """

    @abstractmethod
    def distributed(
        self, strategy: Strategy, workers: int, wanted: list[tuple[Variation, str]]
    ) -> list[Trace]:
        """Run in `workers` new processes, each variation against its reference.

        Raises:
            UserError: the strategy cannot run so.
            WorkerError: a worker failed.
        """

    def causes(self, case: Case) -> list[str]:
        """Causes of a difference that only this kind of run knows, as sentences."""
        return []


@dataclass
class Case:
    """A difference, and what is known of it."""

    runs: Runs
    strategy: Strategy
    workers: int
    steps: int
    trace: Trace
    reference: Trace
    noise: Noise
    refused: dict[str, Difference]
    finding: Difference
    exact: bool

    @property
    def number(self) -> int:
        """Steps that an optimizer takes until the difference is seen."""
        return self.trace.number(self.finding.step - 1)

    @property
    def them(self) -> str:
        """The workers, in words."""
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}"


def frozen_modules(model: nn.Module, kind: str) -> list[tuple[str, nn.Module]]:
    """The modules that `Variation.frozen` = `kind` leaves in evaluation mode, by name."""
    found = []
    for name, module in model.named_modules():
        if kind == "dropout":
            drops = isinstance(module, _DROPOUTS) and bool(
                getattr(module, "p", getattr(module, "dropout", 0))
            )
            if drops:
                found.append((name, module))
        elif kind == "all" or isinstance(module, BatchNormBase):
            found.append((name, module))
    return found


def freeze(model: nn.Module, kind: str) -> None:
    """Leave modules in evaluation mode, see `Variation.frozen`."""
    for _, module in frozen_modules(model, kind) if kind else ():
        module.eval()
        module.train = _Stays(module)  # type: ignore[method-assign]


class _Stays:
    """In place of a module's ``train``: changes nothing."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, mode: bool = True) -> nn.Module:
        return self.module


def watch_order(feed: Feed, orders: dict[str, int], reverse: bool) -> None:
    """Note a checksum of each epoch's order; with `reverse`, turn round the samples of each global
    batch."""
    order = feed.order
    if order is None:
        return  # a stream has no order that could be looked at
    name = "batches" if hasattr(order, "batches") else "indices"
    draw: Callable[[int], Any] = getattr(order, name)

    def drawn(epoch: int) -> Any:
        items = draw(epoch)
        plain = items.tolist() if isinstance(items, torch.Tensor) else items
        orders.setdefault(f"{feed.name}/{epoch}", zlib.crc32(repr(plain).encode()))
        if not reverse:
            return items
        if name == "batches":
            return [batch[::-1] for batch in items]
        return torch.cat([block.flip(0) for block in items.split(feed.global_batch)])

    setattr(order, name, drawn)


def doubled(value: Any) -> Any:
    """The same with its floating-point tensors in float64."""

    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    def in_object(other: Any) -> Any:
        apply = getattr(copy.copy(other), "apply", None)  # of a batch of PyTorch Geometric
        return apply(double) if hasattr(other, "num_graphs") and apply is not None else other

    return map_tensors(value, double, in_object)


def bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
