"""Catalyst's names for a training with one model: ``from allhands.catalyst import dl, utils``.

What is different from Catalyst, and why, is on the page docs/migrate_catalyst.md.
"""

from __future__ import annotations

from typing import Any

from allhands.catalyst import dl, metrics, utils


def __getattr__(name: str) -> Any:
    return getattr(dl, name)


__all__ = ["dl", "metrics", "utils"]
