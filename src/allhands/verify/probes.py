"""Small looks at the user's model, loss and data in this process, each of which settles one
question."""

from __future__ import annotations

import functools
import pickle
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from allhands.data import build_feeds, preserved_generators, seed_everything, tensors_in
from allhands.data.agree import checksum
from allhands.errors import UserError
from allhands.launch import ship
from allhands.runner.evaluation import Forward, loss_rule
from allhands.step import LossRule
from allhands.world import World, current_world, finalize, init

# Relative differences above this are no rounding.
_CLEAR = 1e-3
# Samples of a data set that are read to see whether it draws random numbers.
_READ = 4


def refuse_strangers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `UserError` with the names of tensors that the optimizer trains and the model holds
    without showing them."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, tensor in unregistered(model) if id(tensor) in held]
    if names:
        raise UserError(
            f"the optimizer holds {listed(names)}, which the model keeps in a plain attribute, "
            "list or dict, so that model.parameters() does not show it and no strategy exchanges "
            "its gradient. Assign an nn.Parameter, or use nn.ModuleList, nn.ModuleDict or "
            "nn.ParameterList"
        )


def unregistered(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors that take gradients and that the model holds, but does not show as parameters, by
    path."""
    known = {id(tensor) for tensor in model.parameters()} | {
        id(module) for module in model.modules()
    }
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            for path, tensor in _held(value, f"{prefix}.{key}" if prefix else key, known, 3):
                found.setdefault(id(tensor), (path, tensor))
    return list(found.values())


def _held(value: Any, path: str, known: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if id(value) in known or not depth:
        return
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_leaf:
            yield path, value
    elif isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            if id(parameter) not in known and parameter.requires_grad:
                yield f"{path}.{name}", parameter
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _held(item, f"{path}[{key!r}]", known, depth - 1)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _held(item, f"{path}[{number}]", known, depth - 1)


class Probe:
    """Answers about one training, each found once, when it is first asked for.

    Args:
        path: the file of the user's objects, see `Runs`.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @functools.cached_property
    def unregistered(self) -> list[str]:
        """Names of unregistered tensors that get a gradient from the loss of one batch."""
        objects = self._objects()
        if not unregistered(objects["model"]):
            return []
        with preserved_generators():
            seed_everything(0)
            forward, batch, rule = self._ready(objects)
            output, target = forward(batch)
            loss: Any = rule.call(output, target)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
        return [name for name, tensor in unregistered(objects["model"]) if tensor.grad is not None]

    @functools.cached_property
    def untrained(self) -> list[str]:
        """Names of the model's parameters that take gradients and that the optimizer does not
        hold."""
        objects = self._objects()
        held = {id(p) for group in objects["optimizer"].param_groups for p in group["params"]}
        return [
            name
            for name, p in objects["model"].named_parameters()
            if p.requires_grad and id(p) not in held
        ]

    def notes(self) -> list[str]:
        """What is worth knowing whatever the verdict."""
        notes = []
        if self.unregistered:
            notes.append(
                f"the loss depends on {listed(self.unregistered)}, which the model keeps in a "
                "plain attribute, list or dict: model.parameters() does not show it, so it is "
                "neither trained nor made equal on the ranks. Assign an nn.Parameter, or use "
                "nn.ModuleList, nn.ModuleDict or nn.ParameterList"
            )
        if self.untrained:
            notes.append(
                f"the optimizer does not hold {listed(self.untrained)}: it gets gradients and is "
                "never updated. Pass model.parameters() to the optimizer, or set "
                "requires_grad=False where that is meant"
            )
        return notes

    @functools.cached_property
    def random_data(self) -> str:
        """Which loader draws random numbers that depend on the number of workers, and how; "" when
        none is seen to.

        What a data set draws from the global generators for one sample does not: they are seeded
        for each sample.
        """
        objects = self._objects()
        for name, source in objects["data"].sources(objects["seed"]).items():
            if not source.trains:
                continue
            fetches = functools.partial(_read, source.dataset)
            with preserved_generators():
                if fetches(1) != fetches(1):
                    return (
                        f"the data set of loader '{name}' gives another sample when it is read "
                        "again under the same seed: it draws from a generator of its own, whose "
                        "state depends on what this process has read before. Draw from the global "
                        "generators of torch, numpy or random, which are seeded for each sample"
                    )
                collate = source.options.get("collate_fn")
                if hasattr(source.dataset, "__getitems__") and fetches(1) != fetches(2):
                    return (
                        f"the data set of loader '{name}' draws random numbers in __getitems__, "
                        "for a whole batch at once, and each number of workers cuts other batches. "
                        "Draw them in __getitem__, which is seeded for each sample"
                    )
                if collate is not None and _collated(source.dataset, collate, 1) != _collated(
                    source.dataset, collate, 2
                ):
                    return (
                        f"the collate_fn of loader '{name}' draws random numbers for a whole "
                        "batch, and each number of workers cuts other batches. Draw them in the "
                        "data set's __getitem__, which is seeded for each sample"
                    )
        return ""

    @functools.cached_property
    def draws(self) -> bool:
        """In training mode, the model gives other outputs when it is called on the same batch
        again."""
        objects = self._objects()
        with preserved_generators(), torch.no_grad():
            seed_everything(0)
            forward, batch, _ = self._ready(objects)
            outputs = [
                [tensor.double() for tensor in tensors_in(forward(batch)[0])] for _ in range(2)
            ]
        return any(
            float((a - b).norm()) > _CLEAR * float(a.norm()) for a, b in zip(*outputs, strict=True)
        )

    def _objects(self) -> dict[str, Any]:
        objects: dict[str, Any] = ship.load(self.path)
        return objects

    @staticmethod
    def _ready(objects: dict[str, Any]) -> tuple[Forward, Any, LossRule]:
        """How to call the model, a batch, and how the criterion counts."""
        with _world(objects["runner"].device) as world:
            return Probe._ready_in(world, objects)

    @staticmethod
    def _ready_in(world: World, objects: dict[str, Any]) -> tuple[Forward, Any, LossRule]:
        sources = objects["data"].sources(objects["seed"])
        source = next(source for source in sources.values() if source.trains)
        if source.batch_sampler is None and source.batch_size is not None:
            # Enough for two parts that are not alike.
            source.batch_size = max(source.batch_size, 12)
        (feed,) = build_feeds({source.name: source}, world, objects["seed"]).values()
        model, criterion = objects["model"].to(world.device).train(), objects["criterion"]
        if isinstance(criterion, nn.Module):
            criterion.to(world.device)
        batches = next(iter(feed.epoch(0)))[0]
        return (
            Forward(objects["runner"], model, world.device, criterion),
            batches[0],
            loss_rule(criterion, feed, objects["runner"]),
        )


class NoProbe:
    """In place of a `Probe` of objects that cannot be looked at."""

    unregistered: ClassVar[list[str]] = []
    random_data = ""
    draws = False

    def notes(self) -> list[str]:
        """Nothing."""
        return []


@contextmanager
def _world(device: str | None) -> Iterator[World]:
    """The world of this process; where it is in none, one that is left again."""
    before = current_world()
    try:
        yield before or init(device=device)
    finally:
        if before is None:
            finalize()


def _samples(dataset: Any, seed: int) -> list[Any]:
    """The first samples of a data set, with the global generators seeded before."""
    seed_everything(seed)
    if isinstance(dataset, IterableDataset):
        return [sample for _, sample in zip(range(_READ), dataset, strict=False)]
    indices = list(range(min(_READ, len(dataset))))
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


def _read(dataset: Any, seed: int) -> list[int]:
    return [_content(sample) for sample in _samples(dataset, seed)]


def _collated(dataset: Any, collate: Any, seed: int) -> int:
    samples = _samples(dataset, 1)
    seed_everything(seed)
    return _content(collate(samples))


def _content(sample: Any) -> int:
    """A 32-bit checksum of a sample."""
    if isinstance(sample, torch.Tensor):
        return checksum(sample)
    if isinstance(sample, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(sample).tobytes())
    if isinstance(sample, Mapping):
        sample = list(sample.items())
    if isinstance(sample, (list, tuple)):
        return zlib.crc32(repr([_content(item) for item in sample]).encode())
    try:
        return zlib.crc32(pickle.dumps(sample))
    except Exception:
        return 0  # what cannot be looked at is not accused


def listed(names: list[str]) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
