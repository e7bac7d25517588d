"""One optimizer step, exact and fast: loss weighting, accumulation, clipping, precision."""

from __future__ import annotations

from allhands.step.captured import STEPS, CapturedSteps, cannot_capture
from allhands.step.clip_value import clip_grad_value
from allhands.step.counted import ModelLoss, PerTarget, batch_loss
from allhands.step.loss import LossRule, NonFiniteLossError
from allhands.step.muon import MuonAdamW
from allhands.step.optimizer_step import OptimizerStep
from allhands.step.over_batch import OverBatch, WholeBatch
from allhands.step.precision import PRECISIONS, Precision

__all__ = [
    "PRECISIONS",
    "STEPS",
    "CapturedSteps",
    "LossRule",
    "ModelLoss",
    "MuonAdamW",
    "NonFiniteLossError",
    "OptimizerStep",
    "OverBatch",
    "PerTarget",
    "Precision",
    "WholeBatch",
    "batch_loss",
    "cannot_capture",
    "clip_grad_value",
]
