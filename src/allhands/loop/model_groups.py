"""Which optimizer trains which models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from allhands.checks import check_bare
from allhands.comm import broadcast_tensors
from allhands.errors import UserError, did_you_mean, kind_of
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.settings import LoopSettings, check_model
from allhands.loop.trainable import check_trainable
from allhands.strategies import Strategy
from allhands.world import World


def named(what: str, one: Any, several: Mapping[str, Any] | None) -> dict[str, Any]:
    """`one` under its kind's name, or `several` by their own.

    Raises:
        UserError: neither or both are given, or `several` is no dict of names.
    """
    if (one is None) == (several is None):
        given = "neither" if one is None else "both"
        raise UserError(f"pass {what}= or {what}s={{name: …}}; {given} was given")
    if several is None:
        return {what: one}
    if not isinstance(several, Mapping) or not several:
        raise UserError(f"{what}s is {kind_of(several)}; pass a dict of names to {what}s")
    return {str(name): value for name, value in several.items()}


def group_settings(
    settings: LoopSettings,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    schedulers: Mapping[str, Any],
    several: bool,
) -> dict[str, LoopSettings]:
    """The settings of each optimizer's training, by the optimizer's name.

    The model of an optimizer that trains parts of several models is a module that holds them.
    """
    for name in schedulers:
        if name not in optimizers:
            raise UserError(
                f"schedulers has {name!r}, which is no optimizer's name"
                f"{did_you_mean(name, optimizers)} The optimizers are {', '.join(optimizers)}"
            )
    parts: dict[str, LoopSettings] = {}
    for name, optimizer in optimizers.items():
        check_bare(f"optimizer {name!r}" if several else "optimizer", optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"optimizer {name!r} is {kind_of(optimizer)}; pass a torch.optim optimizer over "
                "parameters of the models"
            )
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = {
            key: model
            for key, model in models.items()
            if any(id(parameter) in own for parameter in model.parameters())
        }
        if not trained:
            raise UserError(
                f"the optimizer {name!r} trains no parameter of the models "
                f"{', '.join(models)}; make it from one of them: "
                f"torch.optim.{type(optimizer).__name__}(model.parameters(), …)"
            )
        for other, part in parts.items():
            shared = [key for key, one in trained.items() if one in part.model.modules()]
            if shared:
                raise UserError(
                    f"the optimizers {other!r} and {name!r} train parts of one model, "
                    f"{shared[0]!r}; give each part to models= by a name of its own, or pass one "
                    "optimizer"
                )
        model = next(iter(trained.values())) if len(trained) == 1 else nn.ModuleDict(trained)
        parts[name] = replace(
            settings,
            model=model,
            optimizer=optimizer,
            scheduler=schedulers.get(name),
            # Each is bound to its own model.
            strategy=copy.deepcopy(settings.strategy) if several else settings.strategy,
        )
    return parts


class OwnModels:
    """The models, optimizers and schedulers of a training whose steps are the user's, by name.

    Args:
        models, optimizers, schedulers: by name.
        several: the user has named them.

    Attributes:
        container: holds all models.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Mapping[str, Any] | None,
        several: bool,
    ) -> None:
        self.models, self.optimizers = dict(models), dict(optimizers)
        self.schedulers, self.several = dict(schedulers or {}), several
        for name, model in self.models.items():
            check_model(model)
            if not name.isidentifier():
                raise UserError(f"models has the name {name!r}; write one like a variable's")
        self.container = nn.ModuleDict(self.models)

    @property
    def model(self) -> nn.Module:
        """The one model, or what holds all of them."""
        return self.container if self.several else next(iter(self.models.values()))

    def parts(self, settings: LoopSettings) -> dict[str, LoopSettings]:
        """See `group_settings`."""
        return group_settings(settings, self.models, self.optimizers, self.schedulers, self.several)

    def check(self, settings: LoopSettings, workers: int, asked: str) -> None:
        """Raise `UserError` for what cannot be honoured with so many workers.

        Args:
            settings: have the strategy.
            workers: of the training.
            asked: what the user has written, with a place for the strategy's name.
        """
        check_own_steps(settings.strategy, workers, asked.format(settings.strategy.name))
        for part in self.parts(settings).values():
            part.validate()
            check_trainable(part, workers)


def place_others(
    models: Mapping[str, nn.Module], parts: Mapping[str, LoopSettings], world: World
) -> dict[str, nn.Module]:
    """The models that no optimizer trains, on the device and equal on all ranks."""
    trained = {id(p) for part in parts.values() for p in part.model.parameters()}
    others = {
        name: model
        for name, model in models.items()
        if all(id(parameter) not in trained for parameter in model.parameters())
    }
    for model in others.values():
        model.to(world.device)
        broadcast_tensors([*(p.detach() for p in model.parameters()), *model.buffers()], world)
    return others


def called_models(
    models: Mapping[str, nn.Module], groups: Mapping[str, OptimizerGroup]
) -> dict[str, nn.Module]:
    """The modules to call in a step function, by the names of the models."""
    called = dict(models)
    for group in groups.values():
        plain, module = group.settings.model, group.called
        for name, model in models.items():
            if model is plain:
                called[name] = module
            elif isinstance(module, nn.ModuleDict) and model is plain._modules.get(name):
                called[name] = module[name]
    for name, model in models.items():
        if isinstance(model, AveragedModel) and untrained(models, called):
            raise UserError(
                f"models has {name!r}, an AveragedModel, and strategy "
                f"'{next(iter(groups.values())).strategy.in_words()}' does not train the model of "
                "which it is to be the average, but parts of a copy. Average the parameters of "
                "loop.model, and swap the averages in for evaluation, as examples/own_loop/ema.py"
            )
    return called


def untrained(
    models: Mapping[str, nn.Module], called: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """The models that stay as they are while parts of copies are trained, by name."""
    return {
        name: model
        for name, model in models.items()
        if called[name] is not model
        and {id(p) for p in model.parameters()}.isdisjoint(map(id, called[name].parameters()))
    }


def check_own_steps(strategy: Strategy, workers: int, asked: str) -> None:
    """Raise `UserError` for a strategy that cannot take steps of the user's own; `asked` is what
    the user has written."""
    if strategy.train_instead() is not None:
        raise UserError(
            f"{asked}: its rounds are no steps of one optimizer; write "
            f"SupervisedRunner().train(distributed={strategy.name!r}, …)"
        )
    slices = strategy.slices(workers)
    if slices is not None and slices.loss_parallel:
        raise UserError(
            f"{asked} leaves the model's outputs in slices, of which a step function would compute "
            "another loss on each rank; write loss_parallel=False"
        )
