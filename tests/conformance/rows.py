"""The rows: trainings that have come out different somewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset, default_collate

from allhands import Callback, ModelLoss, OverBatch, PerTarget
from tests.conformance import models, optimizers
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
from tests.conformance.table import GLOBAL_BATCH, Row, classes, features, labels, regression, values

# ------------------------------------------------------------------ data


def few() -> TensorDataset:
    return TensorDataset(features(3), labels(3))


def double_classes() -> TensorDataset:
    """What BatchNorm makes of rounding is no matter here."""
    return TensorDataset(features().double(), labels())


def images() -> TensorDataset:
    x = torch.randn(22, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x.to(memory_format=torch.channels_last), labels())


def sequences() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(1 + i % 5, 2, generator=generator), labels()[i]) for i in range(22)]


def padded(samples: list[Any]) -> Any:
    lengths = torch.tensor([len(x) for x, _ in samples])
    return (
        pad_sequence([x for x, _ in samples], batch_first=True),
        lengths,
        torch.stack([y for _, y in samples]),
    )


def ignored() -> TensorDataset:
    """Labels of which some do not count, more of them in the first samples."""
    y = labels().clone()
    y[:7:2] = -100
    return TensorDataset(features(), y)


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 7, (22, 6), generator=generator) for _ in range(2))
    for i in range(22):
        y[i, 1 + i * 5 % 6 :] = -100
    return TensorDataset(x, y)


def words() -> TensorDataset:
    return TensorDataset(tokens().tensors[0], labels())


def damaged() -> list[Any]:
    """Samples of which a collate function drops some: all of a rank's in the first batch."""
    return [None if i < 7 or i % 5 == 0 else (features()[i], labels()[i]) for i in range(22)]


def kept(samples: list[Any]) -> Any:
    whole = [sample for sample in samples if sample is not None]
    return default_collate(whole) if whole else None


def doubled(samples: list[Any]) -> Any:
    """Two rows of a sample whose label is 0, as an augmentation in the collate function makes
    them."""
    return default_collate(
        [row for x, y in samples for row in ([(x, y), (-x, y)] if y == 0 else [(x, y)])]
    )


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


# -------------------------------------------------------------- rows with a comparison of their own


class Averages(Callback):
    """Keeps a moving average of the model, as many do."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def on_step_end(self, training: Any) -> None:
        for name, value in training.model.state_dict().items():
            if name in self.kept:
                self.kept[name].mul_(0.8).add_(value.detach(), alpha=0.2)
            else:
                self.kept[name] = value.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def averages_resumed(row: Row, given: dict[str, Any]) -> float:
    """Train an epoch, and go on from its checkpoint with new objects; the averages of both
    epochs."""
    from allhands.comm import all_gather_text
    from allhands.world import current_world

    given["callbacks"].append(Averages())
    given["num_epochs"] = 1
    row.runner(device="cpu").train(**given)
    model = row.model()
    again = Averages()
    given |= {
        "model": model,
        "optimizer": row.optimizer(model),
        "resume": "auto",
        "num_epochs": row.epochs,
    }
    given["callbacks"] = [given["callbacks"][0], again]
    row.runner(device="cpu").train(**given)
    model, right = row.model(), Averages()
    optimizer, criterion, data = row.optimizer(model), row.criterion(), row.data()
    for _ in range(row.epochs):
        for first in range(0, len(data), GLOBAL_BATCH):
            x, y = data[first : first + GLOBAL_BATCH]
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            right.on_step_end(type("Now", (), {"model": model}))
    whole = {
        name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in again.kept.items()
    }
    # On a pipeline a rank has the averages of its own layers.
    world = current_world()
    named = (
        {name for text in all_gather_text(",".join(whole), world) for name in text.split(",")}
        if world
        else set(whole)
    )
    assert named == set(right.kept), named ^ set(right.kept)
    worst = [
        float((whole[name].double() - right.kept[name].double()).abs().max()) for name in whole
    ]
    apart = max(
        float((given["model"].state_dict()[k] - v).abs().max())
        for k, v in model.state_dict().items()
    )
    return max([apart, *worst])


class Scales(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, training: Any) -> None:
        self.seen.append(training.loop.precision.scaler.get_scale())


def overflowing() -> TensorDataset:
    """One sample, of the last rank's share, whose gradient is too large for fp16 at the first
    scales."""
    x, y = features(24).clone(), values(24).clone()
    y[11] = 60.0
    return TensorDataset(x, y)


def scales_and_weights(row: Row, given: dict[str, Any]) -> float:
    """The loss scales of every step are those of one process; so are the weights, as far as fp16
    tells them apart."""
    scales = Scales()
    given["callbacks"].append(scales)
    row.runner(device="cpu").train(**given)
    found = []
    for pieces in (1, 2, 3, 4):  # what rounding does where gradients are added up over parts
        model, scaler = row.model(), torch.amp.GradScaler("cpu")
        optimizer, data, right = row.optimizer(model), row.data(), []
        for _ in range(row.epochs):
            for first in range(0, len(data), GLOBAL_BATCH):
                x, y = data[first : first + GLOBAL_BATCH]
                optimizer.zero_grad()
                for piece in range(pieces):
                    with torch.autocast("cpu", torch.float16):
                        loss = row.criterion()(
                            model(x.chunk(pieces)[piece]), y.chunk(pieces)[piece]
                        )
                    scaler.scale(loss / pieces).backward()
                scaler.step(optimizer)
                scaler.update()
                right.append(scaler.get_scale())
        found.append(model.state_dict())
    assert min(right) < 2.0**16, "nothing overflowed"
    assert scales.seen == right, f"scales {scales.seen}, right {right}"
    noise = max(float((other[k] - found[0][k]).abs().max()) for other in found[1:] for k in other)
    apart = max(
        float((given["model"].state_dict()[k] - v).abs().max()) for k, v in found[0].items()
    )
    return apart / max(3 * noise, 1e-6) * row.tolerance


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
