"""One optimizer step, exact and fast: loss weighting, accumulation, clipping, precision."""

from __future__ import annotations

from allhands.step.counted import ModelLoss, PerTarget, batch_loss
from allhands.step.loss import LossRule, NonFiniteLossError
from allhands.step.muon import MuonAdamW
from allhands.step.optimizer_step import OptimizerStep
from allhands.step.over_batch import OverBatch, WholeBatch
from allhands.step.precision import PRECISIONS, Precision
from allhands.step.recorded import STEPS, RecordedSteps, cannot_record

__all__ = [
    "PRECISIONS",
    "STEPS",
    "LossRule",
    "ModelLoss",
    "MuonAdamW",
    "NonFiniteLossError",
    "OptimizerStep",
    "OverBatch",
    "PerTarget",
    "Precision",
    "RecordedSteps",
    "WholeBatch",
    "batch_loss",
    "cannot_record",
]
