"""What the workers exchange, and when: one class a strategy, all behind one small interface."""

from __future__ import annotations

import importlib

from allhands.errors import UserError, did_you_mean
from allhands.strategies.base import Strategy
from allhands.strategies.ddp import DDP
from allhands.strategies.dp import DP
from allhands.strategies.fsdp import FSDP
from allhands.strategies.kvstore import KVStore
from allhands.strategies.local_sgd import LocalSGD
from allhands.strategies.mesh import Mesh
from allhands.strategies.pipeline import Pipeline
from allhands.strategies.single import Single
from allhands.strategies.tensor import Tensor

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (Single, DP, DDP, KVStore, LocalSGD, FSDP, Tensor, Pipeline)
}
# Strategies that stand on layers above this one, imported when they are asked for: name -> (module,
# class).
_ABOVE = {"federated": ("allhands.federated", "Federated")}

__all__ = [
    "DDP",
    "DP",
    "FSDP",
    "STRATEGIES",
    "KVStore",
    "LocalSGD",
    "Mesh",
    "Pipeline",
    "Single",
    "Strategy",
    "Tensor",
    "strategy_named",
]


def strategy_named(name: str) -> Strategy:
    """The strategy of that name with its default settings."""
    if name in _ABOVE:
        module, kind = _ABOVE[name]
        made: Strategy = getattr(importlib.import_module(module), kind)()
        return made
    if name not in STRATEGIES:
        known = [*STRATEGIES, *_ABOVE]
        raise UserError(
            f"there is no strategy '{name}'{did_you_mean(name, known)} Known are: "
            f"{', '.join(known)}"
        )
    return STRATEGIES[name]()
