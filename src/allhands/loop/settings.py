"""What was asked of a training, checked before any worker is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allhands.checks import check_bare, check_choice, check_whole, is_number
from allhands.comm.clipping import check_clip_norm
from allhands.data import Source, sources_from_datasets, sources_from_loaders
from allhands.errors import UserError, kind_of
from allhands.loop.schedule import Schedule
from allhands.loop.trackers import Logger, Trackers
from allhands.step import PRECISIONS, STEPS
from allhands.step.closure import takes_closure
from allhands.strategies import Strategy
from allhands.world import World


@dataclass
class Data:
    """Loaders or data sets as the user gave them; read where the samples are needed."""

    loaders: Any = None
    datasets: Any = None
    #: One process has sent the data to all workers, so they need not be compared.
    same_everywhere: bool = False
    #: There may be none.
    optional: bool = False

    def sources(self, seed: int) -> dict[str, Source]:
        """One source a loader. Calls the user's ``get_datasets_fn`` where there is one."""
        if self.optional and self.loaders is None and self.datasets is None:
            return {}
        if (self.loaders is None) == (self.datasets is None):
            given = "neither" if self.loaders is None else "both"
            raise UserError(f"pass either loaders= or datasets=; {given} was given")
        if self.loaders is not None:
            return sources_from_loaders(self.loaders)
        return sources_from_datasets(self.datasets, seed)

    @property
    def built_in_worker(self) -> bool:
        """The data sets are made by the user's function, in the workers only."""
        return isinstance(self.datasets, Mapping) and "get_datasets_fn" in self.datasets

    def check(self, seed: int) -> None:
        """Raise `UserError` for what can be seen without building the data."""
        if self.loaders is not None or self.datasets is None or not self.built_in_worker:
            self.sources(seed)


def absolute(path: str | Path | None) -> Path | None:
    """A path that means the same in every process."""
    return None if path is None else Path(path).expanduser().absolute()


def resume_of(given: str | Path | None) -> str | None:
    """What a training goes on from: a path that means the same in every process, or "auto"."""
    return given if given is None or given == "auto" else str(absolute(given))


@dataclass(kw_only=True)
class LoopSettings:
    """What every training has, whoever writes its steps; see `allhands.Loop` for each setting."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    data: Data
    logdir: Path | None = None
    loggers: Sequence[Logger] = ()
    resume: str | None = None
    seed: int = 42
    accumulate: int = 1
    clip_norm: float | None = None
    precision: str = "fp32"
    steps_per_epoch: int | None = None
    max_steps: int | None = None
    evaluate_every: int | None = None
    save_every: int | None = None
    save_minutes: float | None = None
    step: str = "eager"
    profile: int | None = None
    activation_checkpointing: bool | str | Sequence[str] = False
    #: Take at most so many steps of each loader in an epoch.
    limit: int | None = None
    #: Read the first epoch's samples in every epoch.
    same_epoch: bool = False
    #: Whoever asked for the training ends it early, so that its length says nothing of its
    #: schedule.
    cut_short: bool = False
    strategy: Strategy = field(default=None)  # type: ignore[assignment]

    def trackers(self, world: World, say: Callable[[str], None]) -> Trackers:
        """What takes the numbers beside the logdir: on rank 0 the loggers."""
        about = {
            "model": type(self.model).__name__,
            "optimizer": type(self.optimizer).__name__,
            "lr": self.optimizer.param_groups[0]["lr"],
            "strategy": self.strategy.in_words(),
            "workers": world.world_size,
            "seed": self.seed,
            "precision": self.precision,
            "accumulate": self.accumulate,
            "clip_norm": self.clip_norm,
        }
        return Trackers(self.loggers if world.rank == 0 else (), about, say)

    def validate(self) -> None:
        """Raise `UserError` for the first setting that cannot be honoured."""
        check_model(self.model)
        self._check_optimizer()
        Schedule(self.scheduler).check_optimizer(self.optimizer)
        self._check_numbers()
        if self.resume == "auto" and self.logdir is None:
            raise UserError("resume='auto' looks for a checkpoint in the logdir; pass logdir=…")
        self._check_saving()
        self.data.check(self.seed)

    def _check_saving(self) -> None:
        every, minutes = self.save_every, self.save_minutes
        check_whole("save_every", every, unit="optimizer steps", otherwise="None")
        if minutes is not None and not (is_number(minutes) and minutes > 0):
            raise UserError(
                f"save_minutes={minutes!r}; it must be a positive number of minutes, or None"
            )
        for name, value in (("save_every", every), ("save_minutes", minutes)):
            if value is not None and self.logdir is None:
                raise UserError(
                    f"{name}={value!r} saves checkpoints, which need a folder; pass logdir=… as "
                    "well"
                )
        profile = self.profile
        check_whole("profile", profile, unit="optimizer steps", otherwise="None")
        if profile is not None and self.logdir is None:
            raise UserError(
                f"profile={profile!r} writes a timeline, which needs a folder; pass logdir=… as "
                "well"
            )

    def check_one_loader(self, trained: Sequence[str]) -> None:
        """Raise `UserError` for a training by steps over several loaders, which an epoch takes one
        after another."""
        for name in ("max_steps", "evaluate_every"):
            if getattr(self, name) is not None and len(trained) > 1:
                raise UserError(
                    f"{name}={getattr(self, name)} counts the steps of one loader, and an epoch "
                    f"trains on {', '.join(trained)}, one after another; pass one loader whose "
                    f"name begins with 'train', or leave {name} out"
                )

    def check_closure(self) -> None:
        """Raise `UserError` for an optimizer that computes the loss again, where strategy or
        settings do not let it."""
        if not takes_closure(self.optimizer):
            return
        strategy, kind = self.strategy, type(self.optimizer).__name__
        what = f"{kind} computes the loss several times in one step, by a closure"
        other = "use an optimizer that takes one gradient, such as torch.optim.AdamW or SGD"
        if (
            strategy.takes_step
            or strategy.alone
            or strategy.parted
            or strategy.train_instead() is not None
        ):
            asked, instead = f"strategy '{strategy.in_words()}'", "distributed='ddp'"
            if strategy.name == "ddp":
                asked, instead = "DDP(optimizer_state='sharded')", "DDP()"
            raise UserError(f"{what}, which {asked} does not; write {instead}, or {other}")
        if self.precision == "fp16":
            raise UserError(
                f"{what}, and the loss scale of fp16 is for one; write precision='bf16', or {other}"
            )
        if self.clip_norm is not None:
            raise UserError(
                f"{what}, and clip_norm={self.clip_norm} bounds one gradient; leave it out, or "
                f"{other}"
            )

    def _check_optimizer(self) -> None:
        check_bare("optimizer", self.optimizer)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UserError(
                f"optimizer is {kind_of(self.optimizer)}; pass a torch.optim optimizer over "
                "model.parameters()"
            )
        own = {id(p) for p in self.model.parameters()}
        strangers = sum(
            id(p) not in own for group in self.optimizer.param_groups for p in group["params"]
        )
        if strangers:
            raise UserError(
                f"the optimizer holds {strangers} parameter(s) that the model does not have; make "
                "it from this model: "
                f"torch.optim.{type(self.optimizer).__name__}(model.parameters(), …)"
            )

    def _check_numbers(self) -> None:
        check_whole("accumulate", self.accumulate)
        for name in ("steps_per_epoch", "max_steps", "evaluate_every"):
            check_whole(name, getattr(self, name), unit="optimizer steps", otherwise="None")
        check_clip_norm(self.clip_norm)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("step", self.step, STEPS)
        asked = self.activation_checkpointing
        names = asked if isinstance(asked, (list, tuple)) else [asked]
        if not isinstance(asked, bool) and not (
            names and all(isinstance(name, str) and name for name in names)
        ):
            raise UserError(
                f"activation_checkpointing={asked!r}; it must be True, False, the name of a class "
                "of layers, or a list of names of classes or modules"
            )
        if not isinstance(self.seed, int):
            raise UserError(f"seed={self.seed!r}; it must be a whole number")


def check_model(model: Any) -> None:
    """Raise `UserError` unless it is a module that can be trained or called."""
    check_bare("model", model)
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UserError(
            f"the model is wrapped in {type(model).__name__} already; pass the bare model, "
            "model.module: the strategy says how it is distributed"
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {kind_of(model)}; pass a torch.nn.Module")


def is_meta(model: nn.Module) -> bool:
    """Whether parameters of it are on the meta device, where they have no values."""
    return any(parameter.is_meta for parameter in model.parameters())


def check_meta(settings: LoopSettings) -> None:
    """Raise `UserError` for a model on the meta device that cannot be trained, or whose trained
    weights would be lost."""
    if not is_meta(settings.model):
        return
    if not settings.strategy.takes_meta:
        raise UserError(
            "the model is on the meta device and has no weights, and strategy "
            f"'{settings.strategy.name}' needs them; write "
            "distributed='fsdp', or build the model on the CPU"
        )
    if settings.logdir is None:
        raise UserError(
            "the model is on the meta device, so there is no place for its trained weights but a "
            "checkpoint; pass logdir=…"
        )


def check_sync_batch_norm(model: nn.Module, world: World) -> None:
    """Raise `UserError` for a SyncBatchNorm where PyTorch cannot compute it."""
    layer = next(
        (name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)),
        None,
    )
    if layer is not None and world.device.type != "cuda" and torch.distributed.is_initialized():
        raise UserError(
            f"layer '{layer}' is a SyncBatchNorm, which needs GPUs: PyTorch has none for "
            f"'{world.device.type}'. Use BatchNorm, "
            "whose statistics are averaged before evaluation and saving, or GroupNorm"
        )


def check_values(model: nn.Module, method: str) -> None:
    """Raise `UserError` for a model on the meta device, which has no weights to compute with."""
    if is_meta(model):
        raise UserError(
            f"{method} computes with the whole model on each worker, and this one is on the meta "
            "device; load the weights of a "
            "checkpoint: "
            "model.to_empty(device='cpu')"
            ".load_state_dict(allhands.load_checkpoint(logdir)['model'])"
        )
