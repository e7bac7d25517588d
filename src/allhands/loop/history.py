"""What is kept of each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

History = dict[str, Any]
Values = dict[str, dict[str, float]]


def new_history() -> History:
    """A history without an epoch."""
    return {"epoch": [], "step": [], "lr": [], "seconds": []}


def record(history: History, row: Mapping[str, float], values: Values) -> None:
    """Add an epoch: its `row` (epoch, step, lr, seconds), and its values by loader and name."""
    for key, value in row.items():
        history[key].append(value)
    for loader, metrics in values.items():
        for name, number in metrics.items():
            history.setdefault(loader, {}).setdefault(name, []).append(number)
