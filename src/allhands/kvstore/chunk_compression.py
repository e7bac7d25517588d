"""Gradients of a store in fewer bits: the residual that carries what an encoding of a chunk has
lost.

All of it happens on the CPU, on one chunk: a 1-D tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from allhands.comm.codecs import NO_CODEC, Codec, way_back
from allhands.comm.compress import NO_MATRICES, checked_compress
from allhands.errors import UserError


def both_ways(given: Any, what: str = "compress=") -> tuple[dict[str, Any], dict[str, Any]]:
    """In which codecs gradients travel, and the weights that come back, each with all its options.

    Args:
        given: a codec's name or ``{"name": …, option: …}``, or MXNet's ``{"type": "2bit",
            "threshold": 0.5}``. "none" sends float32. "pull" says how weights come back, in the
            same words; without it as gradients travel, with 2bit whole.
        what: the option in its call, for messages.

    Raises:
        UserError: there is no such codec or option, or a value is out of range.
    """
    wanted = dict(given) if isinstance(given, Mapping) else {"name": given}
    pull = wanted.pop("pull", None)
    push = _one_way(wanted, what)
    return push, way_back(push) if pull is None else _one_way(pull, what)


def _one_way(given: Any, what: str) -> dict[str, Any]:
    wanted = dict(given) if isinstance(given, Mapping) else {"name": given}
    if "type" in wanted:
        wanted.setdefault("name", wanted.pop("type"))
    if wanted == NO_CODEC:
        return wanted
    if wanted.get("name") == "1bit" and wanted.get("threshold") == 0:
        del wanted["threshold"]  # MXNet's default
    checked = checked_compress(
        wanted["name"] if list(wanted) == ["name"] else wanted, what, {"powersgd": NO_MATRICES}
    )
    assert checked is not None
    return checked


def compressible(dtype: torch.dtype) -> bool:
    """Whether values of this type are compressed. Whole numbers and float64 go as they are: they
    are chosen to be exact."""
    return dtype in (torch.float32, torch.float16, torch.bfloat16)


def check_finite(name: str, values: torch.Tensor) -> None:
    """Raise `UserError` where values of the key `name` cannot be compressed."""
    # One pass without a mask: the largest size is NaN or infinite when any number is.
    if values.numel() and not math.isfinite(torch.linalg.vector_norm(values, ord=math.inf)):
        raise UserError(
            f"{int((~values.isfinite()).sum())} of {values.numel()} values{_for(name)} are NaN or "
            "infinite and cannot be compressed; lower the learning rate, clip, or look for the "
            "layer with torch.autograd.detect_anomaly()"
        )


def take_values(codec: Codec, data: torch.Tensor, base: torch.Tensor, changes: bool) -> None:
    """Bring `base` to what `ChunkCompressor.values` has written, in place."""
    moved = torch.empty(len(base), dtype=base.dtype)  # rounded alike on both sides
    codec.decode(data, moved)
    if changes:
        base.add_(moved.to(base.device))
    else:
        base.copy_(moved)


class ChunkCompressor:
    """Encodes one chunk again and again; what one encoding loses is added to the next (error
    feedback).

    After any number of calls, the sum of what was given is the sum of what is decoded plus the
    residual, but for rounding.

    The residual is in the units of gradients: what is pushed is the gradient before the learning
    rate, which travels beside it with each step. So a change of the rate needs no rescaling; what
    is left of earlier steps is applied with the rate of the step that sends it.
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
        key = _for(name)
        if values.shape != self._residual.shape:
            raise UserError(
                f"a chunk{key} of shape {list(values.shape)}; it has {len(self._residual)} numbers"
            )
        if not len(values):
            return torch.empty(self.codec.nbytes(0), dtype=torch.uint8)
        given = values.detach().to("cpu", torch.float32)
        total = torch.add(self._residual, given, out=self._total)
        # One pass without a mask: the largest size is NaN or infinite when any number is.
        if not math.isfinite(torch.linalg.vector_norm(total, ord=math.inf)):
            check_finite(name, given)
            raise UserError(
                f"what compression left over{key} grew beyond float32; gradients are too large for "
                f"{self.codec.options}"
            )
        data = self.codec.encode(total)
        self.codec.decode(data, self._residual)
        torch.sub(total, self._residual, out=self._residual)
        return data

    def values(
        self, new: torch.Tensor, had: torch.Tensor, changes: bool, name: str = ""
    ) -> torch.Tensor:
        """The bytes of values that come back: by how much they have changed, or whole.

        Args:
            new: the values, shape [count].
            had: what the other side has, which `take_values` brings nearer to them.
            changes: send the difference. What it loses is in the next one already, and no residual
                is kept.
            name: of the key, for messages.
        """
        if not changes:
            return self.compress(new, name)
        self._residual.zero_()
        data = self.compress(new - had, name)
        self._residual.zero_()
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
            raise UserError(
                f"a residual of shape {list(residual.shape)} for a chunk of {len(self._residual)} "
                "numbers"
            )
        self._residual.copy_(residual)


def _for(key: str) -> str:
    return f" for '{key}'" if key else ""
