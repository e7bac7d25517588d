"""Number formats of the forward and backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from allhands.errors import UserError

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


_NOTHING = nullcontext()


class Precision:
    """Autocast to a number format, with loss scaling for fp16; weights stay in their own format.

    Args:
        name: "fp32", "bf16" or "fp16".
        device: where the model is.

    Raises:
        UserError: an unknown name.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in PRECISIONS:
            raise UserError(f"precision={name!r} is not known; write one of {', '.join(map(repr, PRECISIONS))}")
        self.name = name
        self._dtype = PRECISIONS[name]
        self._device_type = device.type
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    @property
    def casts(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self._dtype is not None

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which the model and the criterion are called."""
        if self._dtype is None:
            return _NOTHING
        return torch.autocast(self._device_type, dtype=self._dtype)
