"""The training loop: `SupervisedRunner`, its callbacks, metrics, checkpoints and logs."""

from __future__ import annotations

from allhands.loop.checkpoint import load as load_checkpoint
from allhands.runner.callbacks import Callback, EarlyStopping
from allhands.runner.keep_best import KeepBest
from allhands.runner.runner import Runner
from allhands.runner.supervised import SupervisedRunner

__all__ = ["Callback", "EarlyStopping", "KeepBest", "Runner", "SupervisedRunner", "load_checkpoint"]
