"""The small interface behind which every way of training with many workers lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from allhands.step.optimizer_step import Passes
from allhands.step.precision import Scaler
from allhands.strategies.held import Held, Read
from allhands.world import World

#: Calls a module on a micro-batch of the training data: ``(module, micro-batches of a batch)``.
TryOn = Callable[[nn.Module, int], Any]


class OutputElsewhere(BaseException):
    """The model that handle_batch was given has its output on another rank; past a user's ``except
    Exception``."""


class Strategy(ABC):
    """What the workers exchange, and when.

    A strategy object holds only settings; it is pickled to the workers, and `prepare` binds it to a
    model there.
    """

    #: The name by which it is chosen: ``distributed="ddp"``.
    name: str
    #: Whether it computes what one process would, up to rounding. A strategy that does not by
    #: design says False; `allhands.verify` then measures how far it drifts, and holds only samples
    #: and learning rates to be the same.
    exact: bool = True
    #: Optimizer steps between two calls of `check_equal` during an epoch; 0 calls it at the end of
    #: each epoch only.
    check_weights_every: int = 0
    #: Whether each rank's gradients are the mean over its own samples, because no rank waits for
    #: the others.
    alone: bool = False
    #: Whether `exchange_all` also takes the optimizer's step.
    takes_step: bool = False
    #: What `own_tensors` are, and what becomes of them in a training by another ``{strategy}``.
    own_in_words: str = (
        "what compression had left over of the gradients; it is not used, as "
        "{strategy} does not compress now"
    )
    #: Whether `load_state_dict` also takes the state that another number of ranks has saved.
    resumes_anywhere: bool = False
    #: Whether every rank must call the model equally often, in training and evaluation; see
    #: `allhands.data.feed`.
    level: bool = False
    #: Whether a model on the meta device can be trained, whose weights come into being on the
    #: workers.
    takes_meta: bool = False
    #: Set for `prepare`.
    try_on: TryOn | None = None
    #: The training's seed, set before `prepare`.
    seed: int = 42
    #: Set for `prepare`: the trainer captures steps in CUDA graphs, if it can.
    captures: bool = False
    #: Set for `prepare`: scales the losses of an fp16 training, and is to be asked before each step
    #: that the strategy takes.
    scaler: Scaler | None = None
    #: Whether ranks have gradients of other parameters, or of parts of them, after the exchange.
    parted: bool = False
    #: Where `takes_step`: called before each step with the exchanged gradients in the parameters;
    #: for looking only, and slow.
    before_step: Callable[[], None] | None = None

    def exact_for(self, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> bool:
        """Whether it is exact in a training with this optimizer and this bound of the gradient's
        norm."""
        return self.exact

    def check_size(self, workers: int) -> None:
        """Raise `UserError` when it cannot run with so many workers, before any is started."""

    def size_wanted(self) -> int | None:
        """How many workers to start where nobody says; None leaves it to the machine."""
        return None

    def compiled(self, workers: int) -> str | None:
        """What ``step="compile"`` compiles with so many workers: "model", as one; "layers", each
        for itself; None refuses it."""
        return None

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
        """Why steps cannot be captured in CUDA graphs, as the end of a sentence, before `prepare`;
        None where they can."""
        return (
            f"strategy '{self.name}' is not among those whose steps are captured ('single' and "
            "'ddp')"
        )

    @abstractmethod
    def check(self, world: World) -> None:
        """Raise `UserError` when this strategy cannot run in this world, before anything is
        built."""

    @abstractmethod
    def prepare(self, model: nn.Module, world: World) -> nn.Module:
        """The module to call in the forward pass, made from `model`, which is on the world's device
        already."""

    def own_module(self, model: nn.Module) -> nn.Module:
        """After `prepare`: the module that is evaluated and asked for its parameters; `model`,
        unless it was taken apart."""
        return model

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """After `prepare`: the optimizer of the training, before it goes on from a checkpoint."""

    def shares(self, workers: int) -> int:
        """Into how many shares the samples are dealt out, with so many workers."""
        return workers

    def place(self, world: World) -> tuple[int, int]:
        """Whose share of the samples this rank gets, and among how many."""
        return world.rank, world.world_size

    def counts(self, world: World) -> bool:
        """Whether what this rank measures counts; where several have seen the same samples, it does
        on one of them."""
        return True

    def stream(self, world: World) -> int:
        """Number of the stream from which dropout draws; ranks that compute the same layer on the
        same samples share one."""
        return world.rank

    def layout(self, world: World) -> str:
        """How the model lies on the ranks, in words; "" where all of them hold all of it."""
        return ""

    def slices(self, world: World) -> Any:
        """Where outputs may be cut over ranks: what has ``loss_function(call)``, the criterion to
        call with them, and ``full_output(output)``; else None."""
        return None

    def in_words(self) -> str:
        """Its name, with settings by which two of them differ in what they compute."""
        return self.name

    def notes(self) -> list[str]:
        """Lines to print as the training begins: what it has found out and chosen."""
        return []

    # ------------------------------------------------------------------ a step

    #: Runs the passes of a step, in place of one micro-batch after another.
    passes: Passes | None = None

    @property
    def drives(self) -> bool:
        """Whether it has `passes`."""
        return self.passes is not None

    def gradient_scale(self, world: World) -> float:
        """What to multiply each rank's share of the loss by, because of how the exchange combines
        gradients.

        With fp16 it is 1: a larger loss would overflow at a smaller scale than that of one process.
        """
        return 1.0

    def updated_elsewhere(self) -> Iterable[nn.Parameter]:
        """The parameters with whole gradients here that other ranks update."""
        return ()

    def no_exchange(self) -> AbstractContextManager[None]:
        """Forward and backward passes inside do not exchange gradients."""
        return nullcontext()

    def complete(self, idle: bool, failed: bool) -> None:
        """After the backward passes, where they exchange gradients: end the exchange; all ranks
        call it together.

        Args:
            idle: some rank had no sample, and every backward pass was in `no_exchange`.
            failed: a loss of this rank was not finite, and its gradients are to be NaN.

        Raises:
            UserError: the exchange cannot have been complete.
        """

    def updated(self) -> None:
        """The optimizer has changed weights, with several workers and not in a step of the strategy
        itself."""

    def explain(self, error: Exception) -> Exception | None:
        """What to say in place of an error in a forward or backward pass that this strategy is the
        cause of; None: the error."""
        return None

    def check_first_loss(self, loss: float | None) -> None:
        """Raise `UserError` when this rank's first loss (None where it has none) cannot be right;
        all ranks call it together."""

    @property
    def after_backward(self) -> bool:
        """Whether gradients are exchanged in one call, `exchange_all`, once all backward passes of
        a step are done."""
        return type(self).exchange_all is not Strategy.exchange_all

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

    def begin(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """The training begins or goes on: the model's weights and the optimizer's state are those
        of optimizer step `step`."""

    def exchange_all(
        self, own: float, total: float, clip_norm: float | None, missing: bool
    ) -> bool:
        """Exchange the gradients that lie in the parameters; a strategy that does so defines it.

        Args:
            own: samples of this rank in this step; where it is `alone`, what its losses count.
            total: samples of all ranks; where it is `alone`, `own`.
            clip_norm: bound of the norm of the exchanged gradients, where the strategy takes the
                optimizer's step too.
            missing: ranks have asked one another, and some rank misses a gradient in this step.

        Returns:
            Whether the optimizer's step was taken with them.
        """
        return False

    def collect(self) -> None:
        """Bring weights and the optimizer's state into the objects that `begin` and `prepare` got,
        before they are saved."""

    def epoch_values(self) -> dict[str, float]:
        """Further values of the epoch that has ended, the same on all ranks; they stand beside the
        metrics."""
        return {}

    def go_on(self) -> None:
        """Optimizer steps follow: take up again what `collect` and `sync_buffers` have put
        aside."""

    def evaluated(self) -> None:
        """The module was called without gradients: let go of what that has left."""

    def finish(self) -> None:
        """The training has ended without an error: leave what `begin` has opened."""

    def sync_buffers(self) -> None:
        """Make buffers (BatchNorm statistics), and weights where workers have their own, equal on
        all ranks; called before evaluation and saving."""

    @contextmanager
    def buffers_made_equal(self, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
        """Within, the buffers of `model` are what evaluation would see; yields this rank's own,
        which it has again afterwards."""
        own = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if own:
            self.sync_buffers()
        try:
            yield own
        finally:
            for name, buffer in model.named_buffers():
                if name in own:
                    buffer.copy_(own[name])

    # ------------------------------------------------------ the whole model, where ranks hold parts

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The plain model's ``state_dict``, of tensors, or of what this rank holds of them
        (`Held`)."""
        return model.state_dict()

    def held_parts(self) -> Mapping[str, Held] | None:
        """What this rank holds of each tensor of the plain model, by name; None where each rank
        holds all of them."""
        return None

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The same of the plain optimizer; all ranks call it together."""
        return optimizer.state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], read: Read) -> None:
        """Go on from the plain model's ``state_dict``; ``read(value, held)`` brings slices of a
        value of it into ``held.local``.

        Raises:
            ValueError, RuntimeError, KeyError: it is of another model.
        """
        model.load_state_dict(state)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], read: Read
    ) -> None:
        """The same for the optimizer."""
        optimizer.load_state_dict(dict(state))

    def copy_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """A copy of this rank's weights and buffers in the processor's memory, for
        `restore_weights`."""
        return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}

    def restore_weights(self, model: nn.Module, copy: dict[str, torch.Tensor]) -> None:
        """Go back to the weights of `copy_weights`."""
        model.load_state_dict(copy)

    def whole_parameters(self) -> dict[str, torch.Tensor] | None:
        """Every parameter of the plain model, on every rank; all call it together. None where the
        module's own are whole."""
        return None

    def whole_buffers(self) -> dict[str, torch.Tensor] | None:
        """The same of the buffers."""
        return None

    def whole_gradients(self) -> dict[str, torch.Tensor] | None:
        """The same of the gradients, from within `before_step`."""
        return None

    def give_back(self, keep: bool) -> None:
        """Put what was trained into the objects that `prepare` and `bind` got, on ranks that `keep`
        it; all call it together."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs, the same on all ranks; of tensors, strings, numbers, lists
        and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as a strategy of the same name and world size (any one, where
        `resumes_anywhere`) would that gave `state`; after `prepare`."""

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """What this rank alone has, and a resumed training needs; tensors that add up over the
        ranks."""
        return {}

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Continue with what `own_tensors` gave, before `begin`; returns whether they are used."""
        return False

    def check_equal(self, where: str) -> None:
        """Raise `WorldError` when the ranks' weights, which should be equal, are not; `where` says
        at which step."""
