"""One forward pass on a copy of the model, to see what it does that an executor must know."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from allhands.compat import TorchDispatchMode, pytree
from allhands.data import preserved_generators
from allhands.federated.algorithms.base import Server
from allhands.federated.executors.base import ExecutorContext
from allhands.federated.keyed_noise import KeyedNoise


@dataclass
class Look:
    """What a forward pass has shown.

    Attributes:
        draws: operations that take numbers from a generator, by name.
        couples: what a sample becomes depends on which others are in its batch, or buffers do.
    """

    draws: list[str]
    couples: bool


def look(work: ExecutorContext, server: Server) -> Look:
    """Run the model forward on a few real samples, and on the same ones with others behind them."""
    model = copy.deepcopy(work.model).to(server.device).train()
    server.layout.write(server.weights, model)
    noise = KeyedNoise(model, server.device)
    indices = some_samples(work)
    with preserved_generators(), torch.no_grad():
        outside = repr(random.getstate()), repr(np.random.get_state())
        with _Watch() as watch:
            alone, buffers = _forward(model, noise, work, indices)
        draws = sorted(set(watch.draws))
        if (repr(random.getstate()), repr(np.random.get_state())) != outside:
            draws.append("numbers of the modules random or numpy.random")
        draws += [
            f"dropout={m.dropout} of {name}"
            for name, m in model.named_modules()
            if isinstance(m, nn.RNNBase) and m.dropout > 0
        ]
        server.layout.write(server.weights, model)
        try:
            longer, _ = _forward(model, noise, work, torch.cat([indices, indices[:1], indices[:1]]))
        except (RuntimeError, ValueError):  # a model that takes batches of one size
            return Look(draws, True)
    return Look(draws, buffers or not _begins_with(longer, alone, len(indices)))


def some_samples(work: ExecutorContext) -> torch.Tensor:
    """The first batch of the first client that has samples: int64, at least 2 numbers."""
    client = next(client for client in range(len(work.clients)) if work.clients.size(client))
    indices = work.clients.samples(client)[: work.local.batch_size]
    return indices if len(indices) > 1 else indices.expand(2)


def _forward(
    model: nn.Module, noise: KeyedNoise, work: ExecutorContext, indices: torch.Tensor
) -> tuple[list[Any], bool]:
    """Output and target as a list of tensors, and whether floating-point buffers have changed."""
    before = {
        name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()
    }
    noise.begin()
    made = pytree.tree_leaves(
        work.local.forward(model, work.samples.take(indices, work.seed, "trial"))
    )
    noise.end()
    after = dict(model.named_buffers())
    return made, any(not torch.equal(after[name], buffer) for name, buffer in before.items())


def _begins_with(longer: list[Any], alone: list[Any], samples: int) -> bool:
    for more, less in zip(longer, alone, strict=True):
        if (
            not isinstance(less, torch.Tensor)
            or less.dim() == 0
            or len(less) != samples
            or len(more) != samples + 2
        ):
            return False
        scale = less.abs().amax().double() if less.is_floating_point() else 0.0
        if not torch.allclose(
            more[:samples].double(),
            less.double(),
            rtol=1e-4,
            atol=1e-4 * float(scale),
            equal_nan=True,
        ):
            return False
    return True


class _Watch(TorchDispatchMode):
    """Notes operations that draw from torch's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _no_dropout(func, args, kwargs):
            self.draws.append(func.overloadpacket.__name__)
        return func(*args, **kwargs)


def _no_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that can drop numbers (attention) was told to drop none."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            if place < len(args):
                value = args[place]
            else:
                value = kwargs.get(argument.name, argument.default_value)
            return value == 0
    return False


def why_not_fixed(work: ExecutorContext, server: Server) -> str | None:
    """Why a step cannot be one fixed sequence of operations on data that lie in memory; None when
    it can."""
    if work.samples.tensors is None:
        return (
            "the data set is read sample by sample, and it needs one in memory: pass a "
            "TensorDataset, or a tuple of tensors"
        )
    try:
        found = look(work, server)
    except Exception as error:
        return f"a forward pass on {len(some_samples(work))} samples failed ({error})"
    if found.draws:
        return (
            f"the model draws numbers that belong to no client ({', '.join(found.draws)}); write "
            "the dropout as nn.Dropout, nn.Dropout1d, nn.Dropout2d or nn.Dropout3d modules, and "
            "crops and flips as RandomCrop and RandomFlip of allhands.models, whose draws it can "
            "tell apart"
        )
    return None
