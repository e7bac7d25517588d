"""Gradients in fewer bits: how a chunk is written as bytes and read again, and the residual that carries what was lost.

All of it happens on the CPU, on one chunk: a 1-D tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from allhands.errors import UserError
from allhands.kvstore.specs import nearest


class Codec(ABC):
    """How numbers are written as bytes.

    Attributes:
        options: what makes the same codec with `codec_from`, as JSON has it.
    """

    options: dict[str, Any]

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """The exact size in bytes of `count` encoded numbers."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes of finite float32 numbers.

        Args:
            values: float32, 1-D, on the CPU.

        Returns:
            uint8, shape [nbytes(len(values))].
        """

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Read what `encode` wrote.

        Args:
            data: uint8, shape [nbytes(len(out))].
            out: of any floating type, 1-D; is overwritten.

        Raises:
            UserError: the data have another size, or hold what no encoder writes.
        """
        if data.dtype != torch.uint8 or data.shape != (self.nbytes(len(out)),):
            raise UserError(
                f"{len(out)} numbers are {self.nbytes(len(out))} bytes with {self.options}, but there are "
                f"{list(data.shape)} of {data.dtype}"
            )
        if len(out):
            self._decode(data, out)

    @abstractmethod
    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """`decode`, of at least one number and of the right size."""


class Rounded(Codec):
    """Each number by itself in another type. One beyond its range becomes its largest number; the residual keeps the rest."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.options = {"type": name}
        self._dtype = dtype
        self._most = torch.finfo(dtype).max

    def nbytes(self, count: int) -> int:
        return count * self._dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp(-self._most, self._most).to(self._dtype).view(torch.uint8)

    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(_numbers(data, self._dtype))


class TwoBit(Codec):
    """MXNet's: +threshold (written 11), -threshold (10) or 0 (00), whichever bound a number has reached.

    The first of four numbers is in the top bits of a byte, and 16 numbers are padded to 4 bytes. The threshold bounds what one
    step can carry of a number; choose it near the size of the larger gradients.
    """

    def __init__(self, threshold: float) -> None:
        self.options = {"type": "2bit", "threshold": threshold}
        self._threshold = threshold
        levels = torch.tensor([0.0, 0.0, -threshold, threshold])
        byte = torch.arange(256)
        self._table = torch.stack([levels[byte >> shift & 3] for shift in (6, 4, 2, 0)], 1)  # [256, 4]: a byte's four numbers

    def nbytes(self, count: int) -> int:
        return -(-count // 16) * 4

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        data = torch.zeros(self.nbytes(len(values)), dtype=torch.uint8)
        bits = torch.stack((values.abs() >= self._threshold, values >= self._threshold), 1)
        packed = np.packbits(bits.numpy().reshape(-1))
        data[: len(packed)] = torch.from_numpy(packed)
        return data

    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.nn.functional.embedding(data.int(), self._table).view(-1)[: len(out)])


class OneBit(Codec):
    """The sign of each number, and one scale for all: the mean of their sizes.

    The data are the float32 scale, then 8 signs a byte, the first in the top bit. One bit a number with error feedback is that of
    Seide et al., "1-bit stochastic gradient descent" (2014); that it converges with this scale is shown by Karimireddy et al.,
    "Error feedback fixes SignSGD" (2019). MXNet's 1bit sends +1 and -1 whatever the size of the gradients, so that the learning
    rate has to know it; here the numbers keep their size.
    """

    def __init__(self) -> None:
        self.options = {"type": "1bit"}

    def nbytes(self, count: int) -> int:
        return 4 + -(-count // 8) if count else 0

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        if not len(values):
            return torch.empty(0, dtype=torch.uint8)
        scale = values.abs().mean(dtype=torch.float64).float().view(1)
        signs = np.packbits((values >= 0).numpy())
        return torch.cat([scale.view(torch.uint8), torch.from_numpy(signs)])

    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        scale = float(_numbers(data[:4], torch.float32))
        signs = torch.from_numpy(np.unpackbits(data[4:].numpy(), count=len(out)))
        out.copy_(signs).sub_(0.5).mul_(2 * scale)


class TopK(Codec):
    """The k = max(1, ceil(ratio * count)) numbers of the largest size: k int32 places, then k float32 numbers.

    With error feedback: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory" (2018); Lin et al., "Deep gradient
    compression" (2018).
    """

    def __init__(self, ratio: float) -> None:
        self.options = {"type": "topk", "ratio": ratio}
        self._ratio = ratio

    def _kept(self, count: int) -> int:
        return min(count, max(1, math.ceil(self._ratio * count)))

    def nbytes(self, count: int) -> int:
        return 8 * self._kept(count)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        places = values.abs().topk(self._kept(len(values)), sorted=False).indices
        return torch.cat([places.int().view(torch.uint8), values[places].view(torch.uint8)])

    def _decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        places, numbers = data.view(2, -1)
        where = _numbers(places, torch.int32).long()
        if int(where.min()) < 0 or int(where.max()) >= len(out):
            raise UserError(f"top-k data have places {int(where.min())} to {int(where.max())}; there are {len(out)} numbers")
        out.zero_()
        out[where] = _numbers(numbers, torch.float32).to(out.dtype)


_OPTIONS: dict[str, dict[str, float]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "2bit": {"threshold": 0.5},
    "1bit": {},
    "topk": {"ratio": 0.01},
}


def codec_from(options: Mapping[str, Any]) -> Codec:
    """The codec of compression options.

    Args:
        options: ``{"type": "2bit", "threshold": 0.5}``. Types are none (float32), fp16, bf16, 2bit (threshold, 0.5), 1bit and
            topk (ratio, 0.01).

    Raises:
        UserError: no such type or option, or a value out of range.
    """
    known = list(_OPTIONS)
    kind = options.get("type")
    if kind is None:
        raise UserError(f"compression {dict(options)} has no type; write {{'type': …}} with one of {', '.join(known)}")
    if kind not in known:
        raise UserError(f"there is no compression {kind!r}{nearest(str(kind), known)}")
    given = {name: value for name, value in options.items() if name != "type"}
    if kind == "1bit" and given.get("threshold") == 0:
        del given["threshold"]  # MXNet's default
    for name in given:
        if kind == "1bit" and name == "threshold":
            raise UserError("1bit sends signs, so that its threshold is 0; leave it out")
        if name not in _OPTIONS[kind]:
            allowed = ", ".join(_OPTIONS[kind]) or "none"
            raise UserError(f"the compression '{kind}' has no option '{name}'; its options: {allowed}")
    values = {**_OPTIONS[kind], **given}
    for name, value in values.items():
        most = 1.0 if name == "ratio" else torch.finfo(torch.float32).max
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
            bound = "a number above 0, at most 1" if name == "ratio" else "a number above 0"
            raise UserError(f"the compression '{kind}' cannot have {name}={value!r}; it must be {bound}")
    if kind == "2bit":
        return TwoBit(float(values["threshold"]))
    if kind == "topk":
        return TopK(float(values["ratio"]))
    if kind == "1bit":
        return OneBit()
    return Rounded(kind, {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[kind])


def both_ways(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options for gradients, and for the weights that come back: ``{"type": …, "pull": …}`` taken apart, and checked.

    Raises:
        UserError: as `codec_from`.
    """
    push = {name: value for name, value in options.items() if name != "pull"}
    codec_from(push)
    pull = options.get("pull")
    if pull is None:  # the threshold of 2bit is one for gradients, and not for changes of weights
        pull = {"type": "none"} if push["type"] == "2bit" else push
    elif isinstance(pull, str):
        pull = {"type": pull}
    codec_from(pull)
    return push, dict(pull)


def compressible(dtype: torch.dtype) -> bool:
    """Whether values of this type are compressed. Whole numbers and float64 go as they are: they are chosen to be exact."""
    return dtype in (torch.float32, torch.float16, torch.bfloat16)


def check_finite(name: str, values: torch.Tensor) -> None:
    """Raise `UserError` where values of the key `name` cannot be compressed."""
    # One pass without a mask: the largest size is NaN or infinite when any number is.
    if values.numel() and not math.isfinite(torch.linalg.vector_norm(values, ord=math.inf)):
        raise UserError(
            f"{int((~values.isfinite()).sum())} of {values.numel()} values for '{name}' are NaN or infinite and cannot be "
            "compressed; lower the learning rate, clip, or look for the layer with torch.autograd.detect_anomaly()"
        )


class Compressor:
    """Encodes one chunk again and again; what one encoding loses is added to the next (error feedback).

    After any number of calls, the sum of what was given is the sum of what is decoded plus the residual, but for rounding.

    The residual is in the units of gradients: what is pushed is the gradient before the learning rate, which travels beside it
    with each step. So a change of the rate needs no rescaling; what is left of earlier steps is applied with the rate of the step
    that sends it.

    Args:
        codec: how.
        count: numbers in the chunk.
    """

    def __init__(self, codec: Codec, count: int) -> None:
        self.codec = codec
        self._residual = torch.zeros(count)
        self._total = torch.empty(count)

    def compress(self, values: torch.Tensor, name: str = "") -> torch.Tensor:
        """The bytes of `values` and of what is left from before.

        Args:
            values: of any floating type, shape [count].
            name: of the key, for messages.

        Returns:
            uint8, shape [codec.nbytes(count)].

        Raises:
            UserError: another shape, or a NaN or an infinity; the residual is then as before.
        """
        key = f" for '{name}'" if name else ""
        if values.shape != self._residual.shape:
            raise UserError(f"a chunk{key} of shape {list(values.shape)}; it has {len(self._residual)} numbers")
        if not len(values):
            return torch.empty(self.codec.nbytes(0), dtype=torch.uint8)
        given = values.detach().to("cpu", torch.float32)
        total = torch.add(self._residual, given, out=self._total)
        # One pass without a mask: the largest size is NaN or infinite when any number is.
        if not math.isfinite(torch.linalg.vector_norm(total, ord=math.inf)):
            wrong = int((~given.isfinite()).sum())
            if wrong:
                raise UserError(
                    f"{wrong} of {len(given)} values{key} are NaN or infinite and cannot be compressed; lower the learning rate, "
                    "clip, or look for the layer with torch.autograd.detect_anomaly()"
                )
            raise UserError(
                f"what compression left over{key} grew beyond float32; gradients are too large for {self.codec.options}"
            )
        data = self.codec.encode(total)
        self.codec.decode(data, self._residual)
        torch.sub(total, self._residual, out=self._residual)
        return data

    def state(self) -> torch.Tensor:
        """The residual: float32, shape [count]; not a copy."""
        return self._residual

    def load(self, residual: torch.Tensor) -> None:
        """Go on with a residual that `state` gave; it is copied.

        Raises:
            UserError: it has another shape.
        """
        if residual.shape != self._residual.shape:
            raise UserError(f"a residual of shape {list(residual.shape)} for a chunk of {len(self._residual)} numbers")
        self._residual.copy_(residual)


def _numbers(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers; copied when they begin where such a number cannot."""
    return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)
