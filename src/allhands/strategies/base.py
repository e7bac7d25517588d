"""The small interface behind which every way of training with many workers lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allhands.step.exchange import Exchange, Placement
from allhands.step.precision import Scaler
from allhands.strategies.model_state import ModelState
from allhands.world import World

#: Calls a module on a micro-batch of the training data, ``(module, micro-batches of a batch)``, and
#: gives a function that computes the loss of its output.
TryOn = Callable[[nn.Module, int], Callable[[], Any]]


class OutputElsewhere(BaseException):
    """The model that handle_batch was given has its output on another rank; past a user's ``except
    Exception``."""


@dataclass(frozen=True)
class BindOptions:
    """What a training has beside model, optimizer and ranks.

    Attributes:
        seed: of the training.
        scaler: scales the losses of an fp16 training, and is asked before each step that the
            exchange takes.
        try_on: calls a module on training data, where something is measured.
        clip_norm: bound of the gradients' norm.
        weights_follow: the caller brings weights and the optimizer's state to all ranks after
            binding, so that they need not be sent before.
        may_lose: a rank may be lost in the middle of the training, and what it holds of the
            optimizer's state is to be kept on another one too.
        replicas: where a rank may be lost, how many logical workers there are, see
            `Strategy.replicas`; None where that is not asked for.
        before: what binding the same model and optimizer gave before members of the world have
            changed.
    """

    seed: int = 42
    scaler: Scaler | None = None
    try_on: TryOn | None = None
    clip_norm: float | None = None
    weights_follow: bool = False
    may_lose: bool = False
    replicas: int | None = None
    before: Bound | None = None


BIND_OPTIONS = BindOptions()


@dataclass
class Bound:
    """A strategy that is bound to a model and an optimizer, on one rank.

    Attributes:
        placement: which rank holds which part of the model, and which samples it sees.
        exchange: what travels in a step.
        state: the plain model and optimizer out of what the ranks hold, and back.
    """

    placement: Placement
    exchange: Exchange
    state: ModelState


class Strategy(ABC):
    """What the workers exchange, and when.

    A strategy object holds only settings. It is pickled to the workers, and `bind` gives there what
    a training works with.
    """

    #: The name by which it is chosen: ``distributed="ddp"``.
    name: str
    #: Whether it computes what one process would, up to rounding. A strategy that does not by
    #: design says False; `allhands.verify` then measures how far it drifts, and holds only samples
    #: and learning rates to be the same.
    exact: bool = True
    #: Optimizer steps between two comparisons of the ranks' weights during an epoch; 0 compares
    #: them at the end of each epoch only.
    check_weights_every: int = 0
    #: Whether each rank's gradients are the mean over its own samples, because no rank waits for
    #: the others.
    alone: bool = False
    #: Whether the exchange also takes the optimizer's step.
    takes_step: bool = False
    #: What the exchange's `own_tensors` are, and what becomes of them in a training by another
    #: ``{strategy}``.
    own_in_words: str = (
        "what compression had left over of the gradients; it is not used, as "
        "{strategy} does not compress now"
    )
    #: Whether every rank must call the model equally often, in training and evaluation; see
    #: `allhands.data.feed`.
    level: bool = False
    #: Whether each worker has the whole model under its own names, in one copy.
    whole_model: bool = False
    #: Whether a model on the meta device can be trained, whose weights come into being on the
    #: workers.
    takes_meta: bool = False
    #: Whether the exchange has on each rank what compression has left over of its gradients. A
    #: training goes on without that of a rank that is lost.
    keeps_residual: bool = False
    #: Whether ranks have gradients of other parameters, or of parts of them, after the exchange.
    parted: bool = False
    #: Whether a rank holds, computes and hands to collectives the same whatever the number of whole
    #: copies of the model; only their groups grow.
    copies_alike: bool = False
    #: Optimizer steps that are taken while an exchange is on its way.
    overlap: int = 0

    def exact_for(self, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> bool:
        """Whether it is exact in a training with this optimizer and this bound of the gradient's
        norm."""
        return self.exact

    def kinds_of_step(self) -> tuple[list[int], dict[int, int]]:
        """Steps that stand for all of a training, by their numbers from 0: those to take first,
        after which nothing new is held, and one of each kind, with how many steps of a period are
        like it."""
        return [0], {1: 1}

    def regroup_refused(self) -> str | None:
        """Why a training cannot go on where members of its world change, bound to model and
        optimizer anew, as a sentence with what to write; None where it can."""
        return f"strategy '{self.in_words()}' cannot be bound to other workers"

    def replicas(self, workers: int) -> int | None:
        """Of an elastic job that so many workers began: how many logical workers there are, of
        which each rank trains a contiguous part; None where ranks stand for no more than their
        share of each global batch."""
        return None

    def check_size(self, workers: int) -> None:
        """Raise `UserError` when it cannot run with so many workers, before any is started."""

    def size_wanted(self) -> int | None:
        """How many workers to start where nobody says; None leaves it to the machine."""
        return None

    def compile_refused(self, workers: int) -> str | None:
        """Why no model is compiled (``step="compile"``) with so many workers, as the end of a
        sentence; None where one can be."""
        if self.whole_model:
            return None
        return (
            f"strategy '{self.name}' is not among those whose models are compiled ('single', "
            "'ddp', 'kvstore', 'local_sgd', 'fsdp' and 'pipeline')"
        )

    def compiled(self, workers: int) -> str:
        """What is compiled with so many workers: "model", as one; "layers", each for itself, and
        the model where it has none; "only layers"."""
        return "model"

    def recomputing_refused(self) -> str | None:
        """Why layers cannot be computed again in the backward pass, as a sentence with what to
        write; None where they can."""
        return None

    def over_batch_refused(self, workers: int) -> str | None:
        """Why no loss can be computed of a whole global batch (`allhands.OverBatch`), with what to
        write; None where it can."""
        return None

    def check_training(self, settings: Any, workers: int) -> None:
        """Raise `UserError` for a model (of `TrainSettings`) that it cannot train with so many
        workers, before any is started."""

    def capture_refused(self, model: nn.Module, world: World) -> str | None:
        """Why steps cannot be captured in CUDA graphs, as the end of a sentence, before `bind`;
        None where they can."""
        return (
            f"strategy '{self.name}' is not among those whose steps are captured ('single', "
            "'ddp', 'fsdp', 'tensor' and 'local_sgd')"
        )

    @abstractmethod
    def check(self, world: World) -> None:
        """Raise `UserError` when this strategy cannot run in this world, before anything is
        built."""

    def bind(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: BindOptions = BIND_OPTIONS,
    ) -> Bound:
        """Distribute a training over the ranks; to be called on all of them, after `check`.

        Args:
            model: on the world's device already, unless it `takes_meta`.
            optimizer: over its parameters.
            world: the ranks.
            options: what else a training has that some strategies need.

        Returns:
            What one training on this rank has of the strategy, which itself stays as it is.
        """
        return Bound(Placement(model, world), Exchange(), ModelState(model, optimizer, world))

    def shares(self, workers: int) -> int:
        """Into how many shares the samples are dealt out, with so many workers."""
        return workers

    def place(self, world: World) -> tuple[int, int]:
        """The number of the share of the samples that this rank gets, and how many there are."""
        return world.rank, world.world_size

    def slices(self, workers: int) -> Any:
        """Where outputs may be cut over so many workers: what has ``loss_function(call)``, the
        criterion to call with them, and ``full_output(output)``; else None."""
        return None

    def in_words(self) -> str:
        """Its name, with settings by which two of them differ in what they compute."""
        return self.name

    def train_instead(self) -> Callable[..., Any] | None:
        """What trains in each worker in place of the runner's epochs, ``(runner, settings, world,
        reporter, shipped)`` to the trained state; None where epochs of optimizer steps over one
        data set are what the strategy distributes."""
        return None

    def check_settings(self, settings: Any) -> None:
        """Raise `UserError` for a setting of the training (`TrainSettings`) that `train_instead`
        does not honour, before any worker is started."""

    def servers_to_start(self) -> int:
        """How many parameter servers to start beside the workers."""
        return 0
