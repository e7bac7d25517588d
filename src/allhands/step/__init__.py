"""One optimizer step, exact and fast: loss weighting, accumulation, clipping, precision."""

from __future__ import annotations

from allhands.step.loss import LossRule, NonFiniteLossError
from allhands.step.optimizer_step import OptimizerStep
from allhands.step.precision import PRECISIONS, Precision

__all__ = ["PRECISIONS", "LossRule", "NonFiniteLossError", "OptimizerStep", "Precision"]
