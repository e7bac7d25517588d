"""Number formats of the forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from allhands.checks import check_choice
from allhands.comm import all_reduce_sum
from allhands.step.cast_weights import cast_weights
from allhands.step.float8 import check_float8_device, float8_products
from allhands.world import World

PRECISIONS = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp16": torch.float16,
}
#: Those under which the model computes with weights that are cast at each call.
CASTS_WEIGHTS = ("bf16-true", "fp8")

_NOTHING = nullcontext()


class Precision:
    """Autocast to a number format, with loss scaling for fp16; weights stay in their own format.

    Args:
        name: "fp32", "bf16", "fp16", or "bf16-true", under which the model itself computes in
            bf16 with weights that are cast (`cast_weights`), and the criterion under autocast; or
            "fp8", which is that with products of linear layers in float8 (`float8_products`).
        device: where the model is.

    Raises:
        UserError: an unknown name, or one that the device has no products for.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        check_choice("precision", name, PRECISIONS)
        if name == "fp8":
            check_float8_device(device)
        self.name = name
        self._dtype = PRECISIONS[name]
        self._device_type = device.type
        self.scaler = Scaler(device) if name == "fp16" else None

    @property
    def casts(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self._dtype is not None

    @property
    def epsilon(self) -> float:
        """The distance of 1 to the next larger number of the format."""
        return torch.finfo(self._dtype or torch.float32).eps

    def of_calls(
        self, model: nn.Module, say: Callable[[str], None] | None = None
    ) -> AbstractContextManager[None]:
        """A context in which calls of a model compute with weights that are cast, where the name
        says so; `say` takes a line to print.

        Raises:
            UserError: on entering: "fp8" changes no layer of the model.
        """
        if self.name not in CASTS_WEIGHTS:
            return _NOTHING
        return self._casting(model, say)

    @contextmanager
    def _casting(self, model: nn.Module, say: Callable[[str], None] | None) -> Iterator[None]:
        products = float8_products(model, say) if self.name == "fp8" else _NOTHING
        with products, cast_weights(model, torch.bfloat16):
            yield

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which the model and the criterion are called."""
        if self._dtype is None:
            return _NOTHING
        return torch.autocast(self._device_type, dtype=self._dtype)


class Scaler(torch.amp.GradScaler):
    """The loss scale of a training, the same on all ranks.

    Where ranks are left with other gradients after the exchange, set `together` to their world: an
    overflow that one of them has found is one of all. Each calls `unscale_` in every step then.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self.together: World | None = None
        self._zero = torch.zeros((), device=device)
        self.scale(self._zero)  # makes the scale, also on a rank that never sees a loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.together is None:
            return
        state = self._per_optimizer_states[id(optimizer)]
        found = self._zero.clone()
        for flag in state["found_inf_per_device"].values():
            found += flag.to(found.device)
        all_reduce_sum([found], self.together)
        state["found_inf_per_device"] = {found.device: found}

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """After `unscale_`: whether the step is to be left out. Waits for the device."""
        flags = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(flag.item() for flag in flags.values())

    def unscale_others(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of parameters that this rank's optimizer does not hold."""
        inverse = 1.0 / self.get_scale()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse)

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """After `unscale_`: take the optimizer's step, unless a gradient has overflowed, and renew
        the scale."""
        self.step(optimizer)
        self.update()
