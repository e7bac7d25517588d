"""A few small reference models: enough for the examples, the tests and the benchmarks.

    model = allhands.models.build("simple_cnn", in_channels=1, num_classes=10, image_size=8)

layers that crop and flip images at random while a model trains, and the criterion `NextToken` for
the GPT. Weights are drawn from torch's global generator: call `torch.manual_seed` first to get the
same ones again.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from allhands.errors import UserError, did_you_mean
from allhands.models.augment import RandomCrop, RandomFlip
from allhands.models.images import MLP, SimpleCNN
from allhands.models.resnet import ResNet18
from allhands.models.transformer import GPT, NextToken

_MODELS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "simple_cnn": SimpleCNN,
    "resnet18": ResNet18,
    "gpt": GPT,
}

# The plain names of the run files work as constructors too.
mlp, simple_cnn, resnet18, gpt = MLP, SimpleCNN, ResNet18, GPT

__all__ = [
    "GPT",
    "MLP",
    "NextToken",
    "RandomCrop",
    "RandomFlip",
    "ResNet18",
    "SimpleCNN",
    "build",
    "gpt",
    "mlp",
    "names",
    "resnet18",
    "simple_cnn",
]


def names() -> tuple[str, ...]:
    """The names that `build` takes."""
    return tuple(_MODELS)


def build(name: str, **options: Any) -> nn.Module:
    """The model of that name; `options` are the arguments of its class. Raises `UserError`, with
    the nearest name, for an unknown name or option.
    """
    if name not in _MODELS:
        raise UserError(
            f"no model {name!r}; there are {', '.join(_MODELS)}{did_you_mean(name, _MODELS)}"
        )
    model = _MODELS[name]
    known = list(inspect.signature(model).parameters)
    for option in options:
        if option not in known:
            raise UserError(
                f"the model {name!r} has no option {option!r}; it takes "
                f"{', '.join(known)}{did_you_mean(option, known)}"
            )
    required = [
        key
        for key, p in inspect.signature(model).parameters.items()
        if p.default is p.empty and key not in options
    ]
    if required:
        raise UserError(f"the model {name!r} needs {' and '.join(f'{key}=' for key in required)}.")
    return model(**options)
