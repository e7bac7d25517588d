"""An optimizer whose update can be captured: it never waits for the device, and reads the learning
rate there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from allhands.compat import step_hooks

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class Capturable:
    """Fused updates of SGD, Adam and AdamW, with each group's learning rate in a tensor.

    The optimizer's own options and learning rates stay as schedulers, callbacks and checkpoints
    know them; they are replaced only within `capturable`. Between two steps, `changed` carries a
    new learning rate over.

    Args:
        optimizer: of torch.optim.
        device: of its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self._rates: list[torch.Tensor] = []
        self._values: list[float] = []
        self._options: list[dict[str, Any]] = []

    def look(self) -> str | None:
        """Why this optimizer cannot be captured, as the end of a sentence; None when it can."""
        kind = type(self.optimizer)
        if kind not in _KINDS:
            return (
                f"the update of {kind.__name__} cannot be captured (that of SGD, Adam and AdamW "
                "can)"
            )
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                return "the optimizer's learning rate is a tensor; pass a number"
            named = next((name for name in ("foreach", "differentiable") if group.get(name)), None)
            if named is not None:
                return (
                    f"the optimizer was made with {named}=True, and its fused update is what "
                    "can be captured"
                )
        hooks = step_hooks(self.optimizer)
        return "the optimizer has step hooks, which a replay would not call" if hooks else None

    def begin(self) -> None:
        """The state is the one that the training goes on with; counts of steps are brought to the
        device."""
        groups = self.optimizer.param_groups
        self._values = [float(group["lr"]) for group in groups]
        self._rates = [
            torch.tensor(value, dtype=torch.float32, device=self.device) for value in self._values
        ]
        self._options = [_options(group) for group in groups]
        for _, state in self._counting():
            state["step"] = state["step"].to(self.device, torch.float32)

    def finish(self) -> None:
        """Bring counts of steps back to where PyTorch has them for the optimizer as it was made."""
        if self._rates:
            for group, state in self._counting():
                if not (group.get("capturable") or group.get("fused")):
                    state["step"] = state["step"].cpu()

    def _counting(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    yield group, state

    def changed(self) -> bool:
        """Whether an option that a graph holds by value has changed; learning rates are brought to
        the device."""
        groups = self.optimizer.param_groups
        for number, group in enumerate(groups):
            if group["lr"] != self._values[number]:
                self._values[number] = float(group["lr"])
                self._rates[number].fill_(self._values[number])
        options = [_options(group) for group in groups]
        if options == self._options:
            return False
        self._options = options
        return True

    @contextmanager
    def capturable(self) -> Iterator[None]:
        """Within, the optimizer updates in a way that can be captured."""
        groups = self.optimizer.param_groups
        names: list[str] = [
            name for name in ("lr", "fused", "foreach", "capturable") if name in groups[0]
        ]
        before = [{name: group[name] for name in names} for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group.update(lr=rate, fused=True, foreach=False)
                if "capturable" in names:
                    group["capturable"] = True
                if group.get("momentum"):
                    self._complete(group)
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)

    def _complete(self, group: dict[str, Any]) -> None:
        """Begin the momentum of parameters that were unused or frozen until now: fused SGD takes
        all or none."""
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        without = [
            p for p in trained if self.optimizer.state.get(p, {}).get("momentum_buffer") is None
        ]
        if len(without) < len(trained) and not group.get("dampening"):
            for parameter in without:
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")
    }
