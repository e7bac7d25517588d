"""The rows: trainings that have come out different somewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from allhands import ModelLoss, OverBatch, PerTarget
from tests.conformance import models, optimizers
from tests.conformance.comparisons import averages_resumed, scales_and_weights
from tests.conformance.criteria import (
    Distilled,
    GradientPenalty,
    PartsCalled,
    Siamese,
    WithLabels,
    batch_sum,
    both,
    counted_targets,
    counted_weights,
    dice,
    own_loss,
    penalized,
    structured_loss,
    token_mean,
    token_sum_and_count,
    triplet,
    weighted,
)
from tests.conformance.models import PLAN, mlp
from tests.conformance.own_steps import OWN_STEPS
from tests.conformance.samples import (
    damaged,
    double_classes,
    doubled,
    few,
    ignored,
    images,
    kept,
    overflowing,
    padded,
    sequences,
    tokens,
    words,
)
from tests.conformance.table import Row, classes, features, regression, values

# ------------------------------------------------------------------ what is changed between epochs


def unfreeze(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if epoch == 1:
        for parameter in list(model.parameters())[:2]:
            parameter.requires_grad_(True)


def freeze(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if epoch == 1:
        for parameter in list(model.parameters())[:2]:
            parameter.requires_grad_(False)


def last_layer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.parameters())[-2:], lr=0.1)


def add_group(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if epoch == 1:
        optimizer.add_param_group({"params": list(model.parameters())[:-2], "lr": 0.05})


def replace(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A new tensor for a parameter, of which the optimizer does not know."""
    if epoch == 1:
        model[0].bias = nn.Parameter(torch.ones(8))  # type: ignore[index, union-attr]


def halve_rate(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def clamped() -> nn.Module:
    """Every gradient is clamped as it comes."""
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return model


def clipped_before_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    optimizer.register_step_pre_hook(
        lambda opt, args, kwargs: nn.utils.clip_grad_value_(
            [p for group in opt.param_groups for p in group["params"]] or parameters, 0.02
        )
    )
    return optimizer


# ------------------------------------------------------------------ the table


def _structured(kind: str) -> Row:
    return Row(
        f"output is a {kind}",
        lambda: models.structured(kind),
        lambda: structured_loss,
        plan={"last": "vocab"},
    )


#: Cuts the last layer of `Language` by its outputs, and gathers them.
HEAD = {"head": "vocab"}

ROWS = [
    Row("plain, uneven batches", mlp, plan=PLAN),
    Row(
        "regression, schedule each epoch",
        mlp,
        nn.MSELoss,
        regression,
        scheduler=halve_rate,
        plan=PLAN,
    ),
    Row("3 samples", mlp, data=few, plan=PLAN),
    Row(
        "frozen layers, three groups, schedule",
        models.frozen,
        optimizer=optimizers.three_groups,
        scheduler=halve_rate,
        options={"clip_norm": 0.5},
        plan=PLAN,
    ),
    Row("tied weights, clipped", models.tied, options={"clip_norm": 0.3}, plan={"4": "vocab"}),
    Row("layer that is never used", models.never_used, plan={"used": "vocab"}),
    Row("mixture of experts", models.experts, plan={"experts.*.0": "vocab"}),
    Row("one head a task", models.tasks, plan={"body": "vocab"}),
    Row(
        "blocks that some samples skip",
        models.depth,
        plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    ),
    Row("layers unfrozen later", models.frozen, epoch_start=unfreeze, plan=PLAN),
    Row("layers frozen later", mlp, epoch_start=freeze, plan=PLAN),
    Row("group added in a callback", mlp, optimizer=last_layer, epoch_start=add_group, plan=PLAN),
    Row("parameter replaced in a callback", mlp, epoch_start=replace, plan=PLAN),
    Row(
        "running mean in the forward pass",
        models.running_mean,
        plan={"1": "colwise", "3": "rowwise"},
        parts="calls",
    ),
    Row(
        "calls counted in the forward pass",
        models.counting,
        plan={"0": "colwise", "2": "rowwise"},
        parts="calls",
    ),
    Row("buffers that are views", models.masked, plan=PLAN),
    Row("orthogonal parametrization", models.orthogonal, plan={"0": "vocab"}),
    Row("weight_norm", models.weight_norm, plan={"0": "vocab"}),
    Row("weight_norm, old", models.old_weight_norm, plan={"0": "vocab"}),
    Row("spectral_norm", models.spectral_norm, parts="calls", plan={"0": "vocab"}),
    Row("spectral_norm, old", models.old_spectral_norm, parts="calls", plan={"0": "vocab"}),
    Row(
        "BatchNorm",
        models.batch_norm,
        data=double_classes,
        parts="shares",
        compared=lambda name: "running" not in name and "num_" not in name,
        plan=PLAN,
    ),
    Row("SyncBatchNorm", models.sync_batch_norm, plan=PLAN),
    Row("GroupNorm", models.group_norm, plan=PLAN),
    Row("gradient penalty", mlp, lambda: penalized, regression, runner=GradientPenalty, plan=PLAN),
    Row("channels_last", models.channels_last, data=images, plan={"4": "vocab"}),
    Row(
        "packed sequences", models.recurrent, data=sequences, collate=padded, plan={"last": "vocab"}
    ),
    Row(
        "transformer layer",
        models.transformer,
        plan={"2.linear1": "colwise", "2.linear2": "rowwise"},
    ),
    *(_structured(kind) for kind in ("dict", "tuple", "list", "dataclass")),
    Row("scalar and empty parameters", models.scalars, plan=PLAN),
    Row(
        "float64",
        models.double,
        nn.MSELoss,
        lambda: TensorDataset(features().double(), values().double()),
        plan=PLAN,
    ),
    Row(
        "sparse embedding",
        models.bag,
        data=words,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        plan={"2": "vocab"},
    ),
    Row("model called twice", mlp, lambda: both, regression, runner=Siamese, plan=PLAN),
    Row(
        "parts of the model called",
        models.encoder,
        nn.MSELoss,
        regression,
        runner=PartsCalled,
        plan={"encode": "colwise", "decode": "rowwise"},
    ),
    Row("teacher in the criterion", mlp, Distilled, regression, plan=PLAN),
    Row("hooks on parameters", clamped, plan=PLAN),
    Row("hook before the optimizer's step", mlp, optimizer=clipped_before_step, plan=PLAN),
    Row("ignore_index", mlp, data=ignored, counted=counted_targets, plan=PLAN),
    Row(
        "ignore_index, smoothing, class weights",
        mlp,
        weighted,
        ignored,
        counted=counted_weights,
        plan=PLAN,
    ),
    Row("mean over tokens, not said", models.language, lambda: token_mean, tokens, plan=HEAD),
    Row(
        "sum over tokens and their count",
        models.language,
        lambda: token_sum_and_count,
        tokens,
        loss=token_mean,
        counted=counted_targets,
        plan=HEAD,
    ),
    Row(
        "model's own loss, not said",
        lambda: models.language(own_loss=True),
        lambda: own_loss,
        tokens,
        runner=WithLabels,
        plan=HEAD,
    ),
    Row(
        "PerTarget",
        models.language,
        lambda: PerTarget(token_mean),
        tokens,
        loss=token_mean,
        counted=counted_targets,
        plan=HEAD,
    ),
    Row(
        "ModelLoss",
        lambda: models.language(own_loss=True),
        ModelLoss,
        tokens,
        runner=WithLabels,
        loss=own_loss,
        counted=counted_targets,
        plan=HEAD,
    ),
    Row("sum in a function, not said", mlp, lambda: batch_sum, regression, plan=PLAN),
    Row("pairs in a batch, not said", mlp, lambda: triplet, plan=PLAN),
    Row("OverBatch, pairs", mlp, lambda: OverBatch(triplet), loss=triplet, plan=PLAN),
    Row("OverBatch, Dice", mlp, lambda: OverBatch(dice), loss=dice, plan=PLAN),
    Row("collate function drops rows", mlp, data=damaged, collate=kept, plan=PLAN),
    Row("collate function makes rows", mlp, data=classes, collate=doubled, plan=PLAN),
    Row(
        "averages kept by a callback, resumed",
        mlp,
        options={"logdir": "run"},
        cell=averages_resumed,
        plan=PLAN,
    ),
    Row(
        "fp16, overflow on one rank",
        mlp,
        nn.MSELoss,
        overflowing,
        options={"precision": "fp16"},
        cell=scales_and_weights,
        plan=PLAN,
    ),
    Row("Lookahead", mlp, optimizer=lambda model: optimizers.Lookahead(sgd_of(model)), plan=PLAN),
    Row(
        "schedule-free optimizer",
        mlp,
        optimizer=lambda model: optimizers.ScheduleFree(model.parameters()),
        plan=PLAN,
    ),
    Row(
        "step takes a closure",
        mlp,
        optimizer=lambda model: optimizers.Closure(model.parameters(), lr=0.1),
        plan=PLAN,
    ),
    Row(
        "LBFGS",
        models.double,
        data=double_classes,
        optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4),
        plan=PLAN,
    ),
]


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


ROWS += OWN_STEPS
BY_NAME = {row.name: row for row in ROWS}
