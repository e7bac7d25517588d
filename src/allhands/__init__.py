"""allhands: train one PyTorch model with many workers, provably the same training.

Importing this package imports neither torch nor any other heavy library; each public name brings
what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from allhands import public_names, torch_hook
from allhands.version import __version__

# By the module that defines them, the public names.
_NAMES = {
    "allhands.data": "Mixup SplitByRank",
    "allhands.errors": "AllhandsError UserError WorkerError WorldError",
    "allhands.federated": "Federated",
    "allhands.loop.loop": "Loop",
    "allhands.loop.spawned": "spawn",
    "allhands.loop.trackers": "Logger MLflowLogger WandbLogger",
    "allhands.planning.plan": "plan",
    "allhands.runner": "AveragedWeights Callback EarlyStopping Freeze KeepBest Runner StopAfter "
    "SupervisedRunner find_learning_rate load_checkpoint",
    "allhands.step": "ModelLoss MuonAdamW OverBatch PerTarget clip_grad_value",
    "allhands.strategies": "DDP DP FSDP KVStore LocalSGD Mesh Pipeline Single Strategy Tensor",
    "allhands.world": "World current_world finalize init",
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}
_PACKAGES = (
    "catalyst",
    "comm",
    "config",
    "data",
    "errors",
    "federated",
    "horovod",
    "kvstore",
    "launch",
    "loop",
    "models",
    "planning",
    "runner",
    "step",
    "strategies",
    "verify",
    "world",
)
_SUBMODULES = {"slurm": "allhands.world.slurm", "utils": "allhands.runner.utils"}

__all__ = [
    "DDP",
    "DP",
    "FSDP",
    "AllhandsError",
    "AveragedWeights",
    "Callback",
    "EarlyStopping",
    "Federated",
    "Freeze",
    "KVStore",
    "KeepBest",
    "LocalSGD",
    "Logger",
    "Loop",
    "MLflowLogger",
    "Mesh",
    "Mixup",
    "ModelLoss",
    "MuonAdamW",
    "OverBatch",
    "PerTarget",
    "Pipeline",
    "Runner",
    "Single",
    "SplitByRank",
    "StopAfter",
    "Strategy",
    "SupervisedRunner",
    "Tensor",
    "UserError",
    "WandbLogger",
    "WorkerError",
    "World",
    "WorldError",
    "__version__",
    "clip_grad_value",
    "current_world",
    "finalize",
    "find_learning_rate",
    "init",
    "load_checkpoint",
    "plan",
    "spawn",
    "utils",
    "verify",
]

if TYPE_CHECKING:
    from allhands.data import Mixup, SplitByRank
    from allhands.errors import AllhandsError, UserError, WorkerError, WorldError
    from allhands.federated.strategy import Federated
    from allhands.loop.loop import Loop
    from allhands.loop.spawned import spawn
    from allhands.loop.trackers import Logger, MLflowLogger, WandbLogger
    from allhands.planning.plan import plan
    from allhands.runner import (
        AveragedWeights,
        Callback,
        EarlyStopping,
        Freeze,
        KeepBest,
        Runner,
        StopAfter,
        SupervisedRunner,
        find_learning_rate,
        load_checkpoint,
        utils,
    )
    from allhands.step import ModelLoss, MuonAdamW, OverBatch, PerTarget, clip_grad_value
    from allhands.strategies import (
        DDP,
        DP,
        FSDP,
        KVStore,
        LocalSGD,
        Mesh,
        Pipeline,
        Single,
        Strategy,
        Tensor,
    )
    from allhands.verify.compare import verify
    from allhands.world import World, current_world, finalize, init

torch_hook.install()


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(_SUBMODULES[name])
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    # `import allhands; allhands.data.…` works without naming the module in an import.
    if name in _PACKAGES:
        return importlib.import_module(f"allhands.{name}")
    raise AttributeError(f"module 'allhands' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


public_names.give_by(__getattr__)
