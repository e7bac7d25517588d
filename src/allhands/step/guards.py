"""What a step does on the host, which a replay of what it asked the device for would not do again."""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (bool, int, float, str, bytes, type(None))
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class HostState:
    """Plain attributes of all modules, and the random generators of the processor, as they are now."""

    def __init__(self, *given: Any) -> None:
        self._modules = [
            (type(root).__name__ + (f".{name}" if name else ""), module)
            for root in given
            if isinstance(root, nn.Module)
            for name, module in root.named_modules()
        ]
        self._attributes = [_plain(module) for _, module in self._modules]
        self._generators = _generators()

    def changed(self) -> str | None:
        """What has changed since, as the end of a sentence; None where nothing has."""
        for (name, module), before in zip(self._modules, self._attributes, strict=True):
            now = _plain(module)
            for attribute in [*now, *before]:
                if now.get(attribute) != before.get(attribute):
                    return f"the forward pass of {name} changes its attribute '{attribute}', which a replay would not"
        for name, state in _generators().items():
            if state != self._generators[name]:
                return f"it draws from {name} on the processor, which a replay would not"
        return None

    def restore(self) -> None:
        """Put everything back."""
        for (_, module), before in zip(self._modules, self._attributes, strict=True):
            for attribute in set(_plain(module)) - set(before):
                del module.__dict__[attribute]
            module.__dict__.update(before)
        random.setstate(self._generators["random"])
        kind, keys, place, has_gauss, cached = self._generators["numpy.random"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
        torch.set_rng_state(torch.frombuffer(bytearray(self._generators["torch's generator"]), dtype=torch.uint8))


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def _generators() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "random": random.getstate(),
        "numpy.random": (kind, tuple(np.asarray(keys).tolist()), *rest),
        "torch's generator": bytes(torch.get_rng_state().numpy()),
    }


def hooked(model: nn.Module) -> str | None:
    """Which hook of a model a replay would not call, as the end of a sentence; None where there is none but PyTorch's own, which
    compute (weight and spectral normalisation)."""
    for name, module in model.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            if any(not _of_torch(hook) for hook in getattr(module, kind).values()):
                return f"{type(model).__name__}{f'.{name}' if name else ''} has hooks, which a replay would not call"
    for name, parameter in model.named_parameters():
        kinds = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if any(kinds):
            return f"the parameter '{name}' has hooks, which a replay would not call"
    return None


def _of_torch(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")


def where_raised(error: BaseException) -> str:
    """The line of the user's that led to an error, or the innermost where there is none: ``file:line (source)``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
