"""Layers that change images at random while a model trains, and leave them alone in evaluation
mode.

    model = nn.Sequential(RandomCrop(4, mode="reflect"), RandomFlip(), network)

They draw from torch's generator of the images' device. The executors of federated training give
every image numbers of its own instead, which depend on the seed, the round, the client, the step,
the layer and the image's place in the batch only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from allhands.checks import check_whole, is_number
from allhands.errors import UserError, kind_of

MODES = ("reflect", "constant")


class PerImage(nn.Module, ABC):
    """What such layers have in common: a few random numbers for each image, and a change that they
    decide.

    Input and output are N x C x H x W, of any type and device. Raises `UserError` for another
    shape.
    """

    #: Random numbers that an image needs.
    numbers: int = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return self.change(x, torch.randint(2**32, (len(x), self.numbers), device=x.device))

    @abstractmethod
    def change(self, x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """The changed images. `drawn`: int64, shape ``[N, numbers]``, each from 0 to 2**32 - 1."""


class RandomCrop(PerImage):
    """Each image moved by up to `padding` pixels along each side, as if it were padded and cropped
    to its size at random.

    Every one of the ``(2 * padding + 1) ** 2`` places is equally likely (to within 2**-32). On CUDA
    the gradient with respect to the images is summed in no fixed order, so a layer whose input is
    not the data does not repeat there to the bit.

    Args:
        padding: pixels that an image is padded by on all four sides.
        mode: what the padding holds: "reflect" (the image mirrored at its outermost pixels, which
            are not repeated; needs images larger than `padding`) or "constant" (zeros).
    """

    numbers = 2

    def __init__(self, padding: int, mode: str = "reflect") -> None:
        super().__init__()
        check_whole("RandomCrop: padding", padding, 0)
        if mode not in MODES:
            raise UserError(
                f"RandomCrop: mode={mode!r}; it must be "
                f"{' or '.join(repr(known) for known in MODES)}"
            )
        self.padding, self.mode = padding, mode

    def change(self, x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        high, wide = _sides(self, x)
        if self.mode == "reflect" and self.padding >= min(high, wide):
            raise UserError(
                f"RandomCrop: images of {high} x {wide} pixels cannot be mirrored over "
                f"{self.padding}; set "
                f"padding to at most {min(high, wide) - 1}, or mode to 'constant'"
            )
        moves = (drawn * (2 * self.padding + 1) >> 32) - self.padding
        rows = torch.arange(high, device=x.device) + moves[:, :1]
        columns = torch.arange(wide, device=x.device) + moves[:, 1:]
        if self.mode == "reflect":
            rows, columns = _mirror(rows, high), _mirror(columns, wide)
            return _gather(x, rows, columns)
        inside = ((rows >= 0) & (rows < high))[:, :, None] & ((columns >= 0) & (columns < wide))[
            :, None
        ]
        moved = _gather(x, rows.clamp(0, high - 1), columns.clamp(0, wide - 1))
        return torch.where(inside[:, None], moved, torch.zeros((), dtype=x.dtype, device=x.device))

    def extra_repr(self) -> str:
        return f"{self.padding}, mode={self.mode!r}"


class RandomFlip(PerImage):
    """Each image turned left to right with probability `p`, kept to within 2**-32."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not is_number(p):
            raise UserError(
                f"RandomFlip: p={p!r} is {kind_of(p)}; it must be a probability from 0 to 1"
            )
        if not 0 <= p <= 1:
            raise UserError(f"RandomFlip: p={p!r}; it must be a probability from 0 to 1")
        self.p = p

    def change(self, x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        _sides(self, x)
        return torch.where((drawn < round(self.p * 2**32))[:, :, None, None], x.flip(-1), x)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _sides(layer: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    if x.dim() != 4:
        raise UserError(
            f"{type(layer).__name__} takes batches of images, N x C x H x W, and was given the "
            f"shape {tuple(x.shape)}"
        )
    return x.shape[2], x.shape[3]


def _mirror(places: torch.Tensor, size: int) -> torch.Tensor:
    return size - 1 - (size - 1 - places.abs()).abs()


def _gather(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The pixels at `rows`, ``[N, H]``, and `columns`, ``[N, W]``: an index, as it must work
    recorded and under `vmap`."""
    places = (rows[:, :, None] * x.shape[3] + columns[:, None]).flatten(1)
    return x.flatten(2).gather(2, places[:, None].expand(-1, x.shape[1], -1)).view(x.shape)
