"""What the workers exchange, and when: one class a strategy, all behind one small interface."""

from __future__ import annotations

import difflib

from allhands.errors import UserError
from allhands.strategies.base import Strategy
from allhands.strategies.ddp import DDP
from allhands.strategies.dp import DP
from allhands.strategies.kvstore import KVStore
from allhands.strategies.single import Single

STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (Single, DP, DDP, KVStore)}

__all__ = ["DDP", "DP", "STRATEGIES", "KVStore", "Single", "Strategy", "strategy_named"]


def strategy_named(name: str) -> Strategy:
    """The strategy of that name with its default settings.

    Raises:
        UserError: there is none; the message lists them and the nearest.
    """
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UserError(f"there is no strategy '{name}'{hint} Known are: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]()
