"""The training loop: `SupervisedRunner`, its callbacks, metrics, checkpoints and logs."""

from __future__ import annotations

from allhands.loop.checkpoint import load as load_checkpoint
from allhands.runner.averaged_weights import AveragedWeights
from allhands.runner.callbacks import Callback, EarlyStopping
from allhands.runner.freeze import Freeze
from allhands.runner.keep_best import KeepBest
from allhands.runner.learning_rate_finder import find_learning_rate
from allhands.runner.runner import Runner
from allhands.runner.stop_after import StopAfter
from allhands.runner.supervised import SupervisedRunner

__all__ = [
    "AveragedWeights",
    "Callback",
    "EarlyStopping",
    "Freeze",
    "KeepBest",
    "Runner",
    "StopAfter",
    "SupervisedRunner",
    "find_learning_rate",
    "load_checkpoint",
]
