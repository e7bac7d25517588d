"""Batches and outputs that are trees of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A tree of dicts, lists and tuples with each of its tensors changed; what is no tensor
    stays."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """A batch with all its tensors on `device`."""
    return map_tensors(
        value, lambda t: t if t.device == device else t.to(device, non_blocking=True)
    )
