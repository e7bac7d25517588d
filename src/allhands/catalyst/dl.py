"""What scripts import from ``catalyst.dl``."""

from __future__ import annotations

from typing import Any

from allhands.catalyst import utils
from allhands.catalyst.batch_callbacks import (
    BackwardCallback,
    BatchTransformCallback,
    CriterionCallback,
    MetricAggregationCallback,
    OptimizerCallback,
)
from allhands.catalyst.callback import Callback, CallbackOrder
from allhands.catalyst.engines import (
    CPUEngine,
    DataParallelEngine,
    DistributedDataParallelEngine,
    GPUEngine,
)
from allhands.catalyst.engines import EngineSettings as Engine
from allhands.catalyst.experiment_runner import IRunner
from allhands.catalyst.folder_loggers import ConsoleLogger, CSVLogger, TensorboardLogger
from allhands.catalyst.metric_callbacks import (
    AccuracyCallback,
    AUCCallback,
    DiceCallback,
    FunctionalMetricCallback,
    HitrateCallback,
    IOUCallback,
    LoaderMetricCallback,
    MAPCallback,
    MRRCallback,
    MultilabelAccuracyCallback,
    MultilabelPrecisionRecallF1SupportCallback,
    NDCGCallback,
    PrecisionRecallF1SupportCallback,
    R2SquaredCallback,
    TrevskyCallback,
)
from allhands.catalyst.own_runner import Runner
from allhands.catalyst.setting_callbacks import (
    BatchOverfitCallback,
    CheckpointCallback,
    CheckRunCallback,
    EarlyStoppingCallback,
    SchedulerCallback,
    TimerCallback,
    TqdmCallback,
)
from allhands.catalyst.supervised_runner import SupervisedRunner
from allhands.errors import refuse_name

# A metric of torchmetrics is computed over a loader in either case.
BatchMetricCallback = LoaderMetricCallback

_OWN = "class Own(allhands.Runner) with train_step(self, loop, batch): docs/loop.md"
_METRICS = "train(metrics={'name': a torchmetrics metric})"
_INSTEAD = {
    **dict.fromkeys(
        (
            "IBackwardCallback",
            "ICallback",
            "ICheckpointCallback",
            "ICriterionCallback",
            "IMetricCallback",
            "IOptimizerCallback",
            "ISchedulerCallback",
        ),
        "dl.Callback, or the callback of that kind",
    ),
    **dict.fromkeys(
        ("CallbackWrapper", "ControlFlowCallbackWrapper"),
        "a dl.Callback with the hooks that are wanted",
    ),
    "DistributedXLAEngine": "Runner(device=…) and train(distributed=…)",
    "FunctionalBatchMetricCallback": "FunctionalMetricCallback(…, metric_fn=…, metric_key=…)",
    "ILRUpdater": "train(scheduler=…), with SchedulerCallback(mode='batch')",
    "ILogger": "a Callback with on_row_end(self, training), which logs training.history",
    "IRunnerError": "allhands.UserError",
    "MixupCallback": "handle_batch(self, batch), which mixes the batch",
    "OptunaPruningCallback": "a Callback with on_row_end(self, training), which calls trial.report",
    "ProfilerCallback": "train(profile=20, logdir=…)",
    "SklearnModelCallback": _METRICS,
    "SoftUpdateCallaback": "a Callback with on_step_end(self, training); examples/own_loop/ema.py",
    "ISupervisedRunner": _OWN,
    "SelfSupervisedRunner": _OWN,
    "SiameseRunner": _OWN,
    "ControlFlowCallback": "an allhands.Callback with the hooks that are wanted",
    "PeriodicLoaderCallback": "train(evaluate_every=…)",
    "LRFinder": "torch.optim.lr_scheduler with train(scheduler=…)",
    **dict.fromkeys(
        ("CometLogger", "MLflowLogger", "NeptuneLogger", "WandbLogger"),
        "an allhands.Callback with on_row_end(self, training), which logs training.history",
    ),
    **dict.fromkeys(
        (
            "ConfusionMatrixCallback",
            "CMCScoreCallback",
            "ReidCMCScoreCallback",
            "SklearnBatchCallback",
            "SklearnLoaderCallback",
        ),
        _METRICS,
    ),
}


def __getattr__(name: str) -> Any:
    refuse_name(__name__, name, _INSTEAD)


__all__ = [
    "AUCCallback",
    "AccuracyCallback",
    "BackwardCallback",
    "BatchMetricCallback",
    "BatchOverfitCallback",
    "BatchTransformCallback",
    "CPUEngine",
    "CSVLogger",
    "Callback",
    "CallbackOrder",
    "CheckRunCallback",
    "CheckpointCallback",
    "ConsoleLogger",
    "CriterionCallback",
    "DataParallelEngine",
    "DiceCallback",
    "DistributedDataParallelEngine",
    "EarlyStoppingCallback",
    "Engine",
    "FunctionalMetricCallback",
    "GPUEngine",
    "HitrateCallback",
    "IOUCallback",
    "IRunner",
    "LoaderMetricCallback",
    "MAPCallback",
    "MRRCallback",
    "MetricAggregationCallback",
    "MultilabelAccuracyCallback",
    "MultilabelPrecisionRecallF1SupportCallback",
    "NDCGCallback",
    "OptimizerCallback",
    "PrecisionRecallF1SupportCallback",
    "R2SquaredCallback",
    "Runner",
    "SchedulerCallback",
    "SupervisedRunner",
    "TensorboardLogger",
    "TimerCallback",
    "TqdmCallback",
    "TrevskyCallback",
    "utils",
]
