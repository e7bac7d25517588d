"""Matrix products of linear layers in float8, by torchao.

Rows of the two factors of a product are scaled to the range of float8 (e4m3: 3 bits of fraction)
before they are rounded; sums are in float32. That holds for the product of the forward pass and for
the two of the backward pass (Micikevicius et al., FP8 Formats for Deep Learning, 2022).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from allhands.errors import UserError

#: "1" in the environment: products are rounded as on such a GPU, and computed in float32 anywhere.
EMULATION = "ALLHANDS_FP8_EMULATE"
#: What a size must be a multiple of.
MULTIPLE = 16
_LEAST_CAPABILITY = (8, 9)


def check_float8_installed() -> None:
    """Raise `UserError` where the library is not installed."""
    if find_spec("torchao") is None:
        raise UserError(
            "precision='fp8' needs torchao: pip install 'allhands[fp8]', or write "
            "precision='bf16-true'"
        )


def check_float8_device(device: torch.device) -> None:
    """Raise `UserError` for a device that has no products in float8."""
    if _emulated():
        return
    if device.type != "cuda":
        found = f"and this training is on '{device.type}'"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= _LEAST_CAPABILITY:
            return
        found = f"and {torch.cuda.get_device_name(device)} has {major}.{minor}"
    raise UserError(
        f"precision='fp8' needs a GPU of compute capability 8.9 or more, {found}; write "
        f"precision='bf16-true' (or set {EMULATION}=1 to see what it rounds, slowly)"
    )


@contextmanager
def float8_products(model: nn.Module, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Within, layers of the model that are `nn.Linear` and whose two sizes are multiples of 16
    multiply in float8. Their parameters, hooks and names are the same; afterwards the model has
    its own layers again.

    Args:
        model: any; a part of it that is converted already stays so.
        say: takes a line to print.

    Raises:
        UserError: there is no such layer.
    """
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
    before = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if _fits(layer)
    ]
    chosen = {id(layer) for _, _, layer in before}
    done = sum(isinstance(layer, Float8Linear) for layer in linear)
    if not chosen and not done:
        raise UserError(
            f"precision='fp8' is for nn.Linear layers inside of a model whose sizes are multiples "
            f"of {MULTIPLE}, and {type(model).__name__} has none; write precision='bf16-true'"
        )
    try:
        convert_to_float8_training(
            model, config=_rowwise(), module_filter_fn=lambda layer, _: id(layer) in chosen
        )
        for parent, name, layer in before:
            # Hooks and parameters are shared, so that who adds, removes or replaces one later need
            # not know of the two.
            vars(getattr(parent, name)).update(vars(layer))
        if say is not None:
            say(
                f"precision: {len(chosen) + done} of {len(linear)} linear layers multiply in fp8, "
                "all else is in bf16"
            )
        yield
    finally:
        for parent, name, layer in before:
            layer.training = getattr(parent, name).training
            setattr(parent, name, layer)


def _fits(layer: nn.Module) -> bool:
    """Whether a layer's products are those of `nn.Linear`, with sizes that float8 allows."""
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
    )


def _rowwise() -> Any:
    """The scaling; sums over samples whose number is no multiple of 16 are padded."""
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"), pad_inner_dim=True, emulate=_emulated()
    )


def _emulated() -> bool:
    return os.environ.get(EMULATION) == "1"
