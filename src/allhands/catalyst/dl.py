"""What scripts import from ``catalyst.dl``."""

from __future__ import annotations

from typing import Any

from allhands.catalyst.metric_callbacks import (
    AccuracyCallback,
    AUCCallback,
    PrecisionRecallF1SupportCallback,
)
from allhands.catalyst.setting_callbacks import (
    BackwardCallback,
    BatchOverfitCallback,
    CheckpointCallback,
    CheckRunCallback,
    CriterionCallback,
    EarlyStoppingCallback,
    OptimizerCallback,
    SchedulerCallback,
    TimerCallback,
    TqdmCallback,
)
from allhands.catalyst.supervised_runner import SupervisedRunner
from allhands.catalyst.translation import refuse_name
from allhands.runner import Callback

_OWN = "class Own(allhands.Runner) with train_step(self, loop, batch): docs/loop.md"
_METRICS = "train(metrics={'name': a torchmetrics metric})"
_INSTEAD = {
    "Runner": _OWN,
    "IRunner": _OWN,
    "ISupervisedRunner": _OWN,
    "SelfSupervisedRunner": _OWN,
    "SiameseRunner": _OWN,
    "CallbackOrder": "callbacks in the order in which they are to be called",
    "CPUEngine": "SupervisedRunner(device='cpu')",
    "GPUEngine": "SupervisedRunner(device='cuda')",
    "DataParallelEngine": "train(distributed='dp')",
    "DistributedDataParallelEngine": "train(distributed=True)",
    "MetricAggregationCallback": "criterion=a function (output, target) of the whole loss",
    "ControlFlowCallback": "an allhands.Callback with the hooks that are wanted",
    "PeriodicLoaderCallback": "train(evaluate_every=…)",
    "LRFinder": "torch.optim.lr_scheduler with train(scheduler=…)",
    "BatchTransformCallback": "handle_batch(self, model, batch) of a runner of your own",
    "TensorboardLogger": "train(logdir=…), which writes TensorBoard files",
    "CSVLogger": "train(logdir=…), which writes metrics.csv",
    **dict.fromkeys(
        (
            "ConfusionMatrixCallback",
            "CMCScoreCallback",
            "DiceCallback",
            "FunctionalMetricCallback",
            "HitrateCallback",
            "IOUCallback",
            "LoaderMetricCallback",
            "MAPCallback",
            "MRRCallback",
            "MultilabelAccuracyCallback",
            "MultilabelPrecisionRecallF1SupportCallback",
            "NDCGCallback",
            "R2SquaredCallback",
            "SklearnBatchCallback",
            "SklearnLoaderCallback",
            "TrevskyCallback",
        ),
        _METRICS,
    ),
}


def __getattr__(name: str) -> Any:
    refuse_name("dl", name, _INSTEAD)


__all__ = [
    "AUCCallback",
    "AccuracyCallback",
    "BackwardCallback",
    "BatchOverfitCallback",
    "Callback",
    "CheckRunCallback",
    "CheckpointCallback",
    "CriterionCallback",
    "EarlyStoppingCallback",
    "OptimizerCallback",
    "PrecisionRecallF1SupportCallback",
    "SchedulerCallback",
    "SupervisedRunner",
    "TimerCallback",
    "TqdmCallback",
]
