"""Where each weight and buffer of a model lies in one flat vector, so that a client's model is one
row of numbers.

A row holds the trainable parameters first, one optimizer group after another, then the
floating-point buffers (BatchNorm's statistics). Loading a client is one copy, its update one
subtraction, and an aggregation one weighted sum of rows. Frozen parameters are the same for
everyone and stay in the model. Integer buffers are kept apart: see `Sums`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from allhands.comm.flat_layout import FlatLayout, Place
from allhands.errors import UserError

# Every tensor begins at a multiple of so many numbers: kernels for convolutions want aligned
# weights.
_ALIGN = 32


class RowLayout:
    """The places of a model's weights and buffers in a row.

    Args:
        model: any module; its trainable parameters and floating-point buffers must share one dtype.
        groups: names of parameters, one sequence an optimizer group, that must lie together; None:
            one group in the model's own order. Trainable parameters that no group names are not
            trained and count as frozen.

    Attributes:
        parameters, buffers: places, in the order of the row.
        groups: ``(start, stop)`` of each group.
        trained: numbers that are trained, the first ones of a row.
        length: numbers in a row, gaps for alignment (always 0) included.
        integers: names of integer buffers.

    Raises:
        UserError: mixed dtypes, or nothing to train.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[str]] | None = None) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if groups is None:
            groups = [list(named)]
        if not any(groups):
            raise UserError(
                "the model has no trainable parameter; set requires_grad=True on those that "
                "clients shall train"
            )
        buffers = dict(model.named_buffers())
        kept = _persistent(model)
        floating = {
            name: b for name, b in buffers.items() if b.is_floating_point() and name in kept
        }
        self.integers = [
            name for name, b in buffers.items() if not b.is_floating_point() and name in kept
        ]
        self.dtype = named[groups[0][0]].dtype if groups[0] else next(iter(named.values())).dtype
        others = {
            n: t.dtype
            for n, t in {**{n: named[n] for g in groups for n in g}, **floating}.items()
            if t.dtype != self.dtype
        }
        if others:
            name, dtype = next(iter(others.items()))
            raise UserError(
                f"'{name}' is {dtype} and other weights are {self.dtype}; federated training keeps "
                "a client's model in one flat "
                f"vector, so bring the model to one dtype, for example model.to({self.dtype})"
            )
        self.parameters: list[Place] = []
        self.groups: list[tuple[int, int]] = []
        self.trained = 0
        for group in groups:
            flat = FlatLayout({name: named[name] for name in group}, _ALIGN, self.trained)
            self.parameters += flat.places
            self.groups.append((self.trained, flat.length))
            self.trained = flat.length
        flat = FlatLayout(floating, _ALIGN, self.trained)
        self.buffers, self.length = flat.places, flat.length

    @property
    def places(self) -> list[Place]:
        return self.parameters + self.buffers

    def read(self, model: nn.Module) -> torch.Tensor:
        """A model's weights and buffers as a new row, shape ``[length]``, on the model's device."""
        tensors = _tensors(model)
        row = torch.zeros(
            self.length, dtype=self.dtype, device=tensors[self.parameters[0].name].device
        )
        for place in self.places:
            row[place.start : place.stop].copy_(tensors[place.name].detach().reshape(-1))
        return row

    def write(self, row: torch.Tensor, model: nn.Module) -> None:
        """Copy a row, shape ``[length]``, into a model's own tensors."""
        tensors = _tensors(model)
        with torch.no_grad():
            for place in self.places:
                tensors[place.name].copy_(row[place.start : place.stop].view(place.shape))

    def read_integers(self, model: nn.Module) -> torch.Tensor:
        """Integer buffers, flat: int64 of any length, in the order of `integers`."""
        buffers = dict(model.named_buffers())
        parts = [buffers[name].reshape(-1).to(torch.int64) for name in self.integers]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def write_integers(self, values: torch.Tensor, model: nn.Module) -> None:
        """Copy what `read_integers` gave into a model's buffers."""
        buffers, at = dict(model.named_buffers()), 0
        for name in self.integers:
            buffer = buffers[name]
            buffer.copy_(values[at : at + buffer.numel()].view(buffer.shape))
            at += buffer.numel()

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor by name as a view into rows of shape ``[clients, length]``: shape ``[clients,
        *shape]``."""
        return {
            place.name: rows[:, place.start : place.stop]
            .unflatten(1, place.shape or (1,))
            .reshape(len(rows), *place.shape)
            for place in self.places
        }

    def bind(self, model: nn.Module, row: torch.Tensor, gradient: torch.Tensor) -> None:
        """Let a model's weights and buffers be views into `row` (shape ``[length]``), and its
        gradients into `gradient` (shape ``[trained]``): what is copied into the row is in the
        model, and backward passes add to the vector.
        """
        parameters = dict(model.named_parameters())
        for place in self.parameters:
            parameter = parameters[place.name]
            parameter.data = row[place.start : place.stop].view(place.shape)
            parameter.grad = gradient[place.start : place.stop].view(place.shape)
        for place in self.buffers:
            owner, _, name = place.name.rpartition(".")
            model.get_submodule(owner)._buffers[name] = row[place.start : place.stop].view(
                place.shape
            )

    def mask(self, names: Sequence[str]) -> torch.Tensor:
        """True at the numbers of the named parameters and buffers: bool, shape ``[length]``."""
        wanted = set(names)
        mask = torch.zeros(self.length, dtype=torch.bool)
        for place in self.places:
            if place.name in wanted:
                mask[place.start : place.stop] = True
        return mask

    def state_dict(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """A row by the model's own names; views."""
        return {
            place.name: row[place.start : place.stop].view(place.shape) for place in self.places
        }


def _tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _persistent(model: nn.Module) -> set[str]:
    return set(model.state_dict())
