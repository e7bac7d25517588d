"""Codecs: how numbers are written in fewer bits and read again.

A codec is a pair of functions, `Codec.encode` and `Codec.decode`. What an encoding loses is the
residual, which whoever encodes adds to the next numbers (error feedback: Seide et al., 1-Bit
Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD,
ICML 2019). PowerSGD, which sees whole matrices and needs all ranks, is
`allhands.strategies.powersgd`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from allhands.errors import UserError

#: Numbers that share one scale in int8 and 1bit.
BLOCK = 1024


class Codec(ABC):
    """How numbers are written as bytes, on any device.

    Attributes:
        options: what makes the same codec with `codec_from`, as JSON has it.
    """

    options: dict[str, Any]

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """The exact size in bytes of `count` encoded numbers."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes of numbers.

        Args:
            values: of any floating type, 1-D.

        Returns:
            uint8, shape [nbytes(len(values))], on the device of `values`.
        """

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Read what `encode` wrote.

        Args:
            data: uint8, shape [nbytes(len(out))].
            out: of any floating type, 1-D, on the device of `data`; is overwritten.

        Raises:
            UserError: the data have another size, or hold what no encoder writes.
        """
        if data.dtype != torch.uint8 or data.shape != (self.nbytes(len(out)),):
            raise UserError(
                f"{len(out)} numbers are {self.nbytes(len(out))} bytes with {self.options}, but "
                f"there are {list(data.shape)} of {data.dtype}"
            )
        if len(out):
            self._decode(data, out)

    @abstractmethod
    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """`decode`, of at least one number and of the right size."""


class Cast(Codec):
    """Each number by itself in another type. One beyond its range becomes its largest number."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.options = {"name": name}
        self.dtype = dtype
        self._most = torch.finfo(dtype).max

    def nbytes(self, count: int) -> int:
        return count * self.dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return self.arrives(values).view(torch.uint8)

    def arrives(self, values: torch.Tensor) -> torch.Tensor:
        """What is read of numbers of any shape, in the type in which they travel."""
        return values.clamp(-self._most, self._most).to(self.dtype)

    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(_numbers(data, self.dtype))


class Scaled(Codec):
    """Numbers of a few levels, and a float32 scale for each block of numbers, which come first.

    Args:
        name: of the codec.
        block: numbers that share one scale; None: all numbers of an encoding.
    """

    def __init__(self, name: str, block: int | None) -> None:
        self.options, self.block = {"name": name}, block

    @abstractmethod
    def levels(
        self, values: torch.Tensor, chance: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales, shape ``[…, blocks, 1]``, and levels, shape ``[…, blocks, block]``, of
        numbers ``[…, count]``.

        Args:
            values: the numbers.
            chance: for each number one from 0 to below 1, by which it is rounded up; None: to the
                nearest.
        """

    def arrives(self, values: torch.Tensor, chance: torch.Tensor | None = None) -> torch.Tensor:
        """What is read of numbers, shape ``[…, count]``, in their own type."""
        scales, levels = self.levels(values, chance)
        return (levels.to(values.dtype) * scales.to(values.dtype)).flatten(-2)[
            ..., : values.shape[-1]
        ]

    def blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers ``[…, count]`` in rows of one scale, filled up with zeros."""
        block = self.block or max(values.shape[-1], 1)
        return nn.functional.pad(values, (0, -values.shape[-1] % block)).unflatten(-1, (-1, block))

    def scales(self, count: int) -> int:
        """How many scales so many numbers have."""
        return -(-count // self.block) if self.block else min(count, 1)

    def nbytes(self, count: int) -> int:
        return 4 * self.scales(count) + self._level_bytes(count)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        if not len(values):
            return torch.empty(0, dtype=torch.uint8, device=values.device)
        scales, levels = self.levels(values)
        packed = self._pack(levels.flatten()[: len(values)])
        return torch.cat([scales.flatten().float().view(torch.uint8), packed])

    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        begin = 4 * self.scales(len(out))
        wide = torch.promote_types(out.dtype, torch.float32)
        scales = _numbers(data[:begin], torch.float32).to(wide)
        levels = self.blocks(self._unpack(data[begin:], len(out)).to(wide))
        out.copy_((levels * scales[:, None]).flatten()[: len(out)])

    @abstractmethod
    def _level_bytes(self, count: int) -> int: ...

    @abstractmethod
    def _pack(self, levels: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _unpack(self, data: torch.Tensor, count: int) -> torch.Tensor: ...


class Int8(Scaled):
    """Integers from -127 to 127; a scale is the largest size in its block, divided by 127.

    With `chance`, rounded at random so that the mean is right (Alistarh et al., QSGD, NeurIPS
    2017).
    """

    def __init__(self, block: int | None = BLOCK) -> None:
        super().__init__("int8", block)

    def levels(
        self, values: torch.Tensor, chance: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.blocks(values)
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).float()
        # A scale that is not a number is sent as it is, so that what arrives is none either.
        steps = blocks / torch.where(scales > 0, scales, 1.0)
        steps = steps.round_() if chance is None else (steps + self.blocks(chance)).floor_()
        return scales, steps.clamp_(-127, 127)

    def _level_bytes(self, count: int) -> int:
        return count

    def _pack(self, levels: torch.Tensor) -> torch.Tensor:
        return levels.to(torch.int8).view(torch.uint8)

    def _unpack(self, data: torch.Tensor, count: int) -> torch.Tensor:
        return data.view(torch.int8)


class OneBit(Scaled):
    """The sign of each number; a scale is the mean of the sizes in its block.

    8 signs are a byte, the first in the top bit (Bernstein et al., signSGD, ICML 2018; with the
    residual, Karimireddy et al., ICML 2019). MXNet's 1bit sends +1 and -1 whatever the size of the
    gradients, so that the learning rate has to know it; here the numbers keep their size.
    """

    def __init__(self, block: int | None = BLOCK) -> None:
        super().__init__("1bit", block)

    def levels(
        self, values: torch.Tensor, chance: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.blocks(values)
        width, count = blocks.shape[-1], values.shape[-1]
        counts = torch.full(
            (blocks.shape[-2], 1), float(width), dtype=torch.float64, device=values.device
        )
        counts[-1] = count - (len(counts) - 1) * width
        scales = (blocks.abs().sum(-1, keepdim=True, dtype=torch.float64) / counts).float()
        return scales, torch.where(blocks >= 0, 1.0, -1.0)

    def _level_bytes(self, count: int) -> int:
        return -(-count // 8)

    def _pack(self, levels: torch.Tensor) -> torch.Tensor:
        return _pack_bits(levels > 0)

    def _unpack(self, data: torch.Tensor, count: int) -> torch.Tensor:
        return _unpack_bits(data, count).float().sub_(0.5).mul_(2)


class TwoBit(Codec):
    """MXNet's: +threshold (written 11), -threshold (10) or 0 (00), whichever bound a number has
    reached.

    The first of four numbers is in the top bits of a byte, and 16 numbers are padded to 4 bytes.
    The threshold bounds what one step can carry of a number; choose it near the size of the larger
    gradients.
    """

    def __init__(self, threshold: float) -> None:
        self.options = {"name": "2bit", "threshold": threshold}
        self._threshold = threshold
        levels = torch.tensor([0.0, 0.0, -threshold, threshold])
        byte = torch.arange(256)
        # [256, 4]: a byte's four numbers.
        self._table = torch.stack([levels[byte >> shift & 3] for shift in (6, 4, 2, 0)], 1)

    def nbytes(self, count: int) -> int:
        return -(-count // 16) * 4

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        bits = torch.stack((values.abs() >= self._threshold, values >= self._threshold), 1)
        packed = _pack_bits(bits.flatten())
        return nn.functional.pad(packed, (0, self.nbytes(len(values)) - len(packed)))

    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        table = self._table.to(data.device)
        out.copy_(nn.functional.embedding(data.int(), table).view(-1)[: len(out)])


class TopK(Codec):
    """The k = max(1, ceil(keep * count)) numbers of the largest size: k int32 places, then k
    float32 numbers.

    With the residual: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory" (2018); Lin et al.,
    "Deep gradient compression" (2018).
    """

    def __init__(self, keep: float) -> None:
        self.options = {"name": "topk", "keep": keep}
        self._keep = keep

    def count(self, numbers: int) -> int:
        """How many of so many numbers travel."""
        return min(numbers, max(1, math.ceil(self._keep * numbers)))

    def nbytes(self, count: int) -> int:
        return 8 * self.count(count)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        places = values.abs().topk(self.count(len(values)), sorted=False).indices
        return torch.cat([places.int().view(torch.uint8), values[places].float().view(torch.uint8)])

    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        places, numbers = data.view(2, -1)
        where = _numbers(places, torch.int32).long()
        # On a GPU they come from ranks of one training, and to look would wait for the device.
        if not data.is_cuda and (int(where.min()) < 0 or int(where.max()) >= len(out)):
            raise UserError(
                f"top-k data have places {int(where.min())} to {int(where.max())}; there are "
                f"{len(out)} numbers"
            )
        out.zero_()
        out[where] = _numbers(numbers, torch.float32).to(out.dtype)


NO_CODEC = {"name": "none"}


def codec_from(compress: Mapping[str, Any] | None, block: int | None = BLOCK) -> Codec:
    """The codec of what `checked_compress` gave; ``None`` and ``{"name": "none"}`` are float32.

    Args:
        compress: the name and the options.
        block: numbers that share one scale, where the codec has scales; None: all of an encoding.
    """
    name = "none" if compress is None else compress["name"]
    if name in _CASTS:
        return Cast(name, _CASTS[name])
    if name in ("int8", "1bit"):
        return Int8(block) if name == "int8" else OneBit(block)
    assert compress is not None
    return TwoBit(float(compress["threshold"])) if name == "2bit" else TopK(float(compress["keep"]))


_CASTS = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cast_dtype(compress: Mapping[str, Any] | None) -> torch.dtype | None:
    """The type of fp16 and bf16; None for other codecs."""
    return None if compress is None else _CASTS.get(compress["name"])


def way_back(compress: Mapping[str, Any]) -> dict[str, Any]:
    """In which codec sums and weights come back: in the same, but for 2bit, whose threshold is one
    for gradients."""
    return dict(NO_CODEC) if compress["name"] == "2bit" else dict(compress)


def _numbers(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers; copied when they begin where such a number cannot."""
    return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)


def _pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Booleans as bytes, the first of eight in the top bit."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy()))
    rows = nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (rows << torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)).sum(
        1, dtype=torch.uint8
    )


def _unpack_bits(data: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` bits of bytes as 0 and 1."""
    if data.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(data.numpy(), count=count))
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=data.device)
    return (data[:, None] >> shifts & 1).flatten()[:count]
