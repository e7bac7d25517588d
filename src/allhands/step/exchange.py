"""What a step needs of a strategy that is bound to a model: where the model and the samples are,
and what travels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from allhands.world import World

# (micro-batch) -> (the model's output, the target)
Forward = Callable[[Any], tuple[Any, Any]]
# (number of the micro-batch, output, target) -> the loss, weighted as the gradient is
LossOf = Callable[[int, Any, Any], torch.Tensor]
# What losses count: a number, or one of shape [] on the device, which nobody has waited for.
Count = float | torch.Tensor


class Passes(Protocol):
    """Runs the passes of a step in its own order, in place of one micro-batch after another."""

    def divide(
        self, batches: Sequence[Any], counts: Sequence[int]
    ) -> tuple[Sequence[Any], Sequence[int]]: ...

    def forward_backward(
        self,
        batches: Sequence[Any],
        counts: Sequence[int],
        forward: Forward,
        loss_of: LossOf,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None: ...


class Placement:
    """Which rank holds which part of the model, and which samples it sees.

    This one is for ranks that each hold the whole model and see a share of their own.

    Args:
        model: the user's.
        world: the ranks.
        module: to call in the forward pass, if it is another one.

    Attributes:
        module: to call in the forward pass.
        model: is evaluated and asked for its parameters; the user's, unless it was taken apart.
        share, shares: the number of this rank's share of the samples, and how many there are.
        counts: what this rank measures counts; where several have seen the same samples, it does
            on one of them.
        stream: number of the stream from which dropout draws; ranks that compute the same layer
            on the same samples have one.
        level: every rank must call the model equally often, in training and evaluation; see
            `allhands.data.feed`.
        layout: how the model lies on the ranks, in words; "" where all of them hold all of it.
        slices: where outputs may be cut over ranks, what puts them together; see
            `allhands.Strategy.slices`.
        copy_size: so many ranks hold the model once, together.
        copy_runs: in the order of the ranks, those of a copy lie in so many runs of equal length.
            Another copy's runs follow each of them.
    """

    copy_size = copy_runs = 1

    def __init__(self, model: nn.Module, world: World, module: nn.Module | None = None) -> None:
        self.model = model
        self.module = model if module is None else module
        self.share, self.shares = world.rank, world.world_size
        self.stream = world.rank
        self.counts = True
        self.level = False
        self.layout = ""
        self.slices: Any = None

    def held_parts(self) -> Mapping[str, Any] | None:
        """What this rank holds of each tensor of the plain model, by name, as
        `allhands.strategies.held.Held`; None where each rank holds all of them."""
        return None

    def evaluated(self) -> None:
        """The module was called without gradients: let go of what that has left."""


class Exchange:
    """What travels in a step: before, during or after the backward passes.

    This one exchanges nothing.

    Attributes:
        alone: each rank's gradients are the mean over its own samples, because no rank waits for
            the others.
        after_backward: gradients are exchanged in one call, `exchange_all`, once all backward
            passes of a step are done.
        passes: runs the passes of a step, in place of one micro-batch after another.
        gradient_scale: what to multiply each rank's share of the loss by, because of how the
            exchange combines gradients. With fp16 it is 1: a larger loss would overflow at a
            smaller scale than that of one process.
        states_elsewhere: tensors of the optimizer's state here that the optimizer does not hold.
        updated_elsewhere: the parameters with whole gradients here that other ranks update.
        before_step: where `exchange_all` takes the optimizer's step, called before each with the
            exchanged gradients in the parameters; for looking only, and slow.
        before_update: called there, too, once what `take_step` needs is on this rank.
        take_step: takes the optimizer's step from there on, without a word to another rank; None
            where the optimizer itself does.
        after_step: called with what this rank's losses have counted when a step was taken, or
            replayed: what is not captured with it follows.
        notes: lines to print as the training begins.
        goes_on_together: all ranks call `go_on` together.
    """

    alone = False
    after_backward = False
    passes: Passes | None = None
    gradient_scale = 1.0
    states_elsewhere: Iterable[torch.Tensor] = ()
    updated_elsewhere: Iterable[nn.Parameter] = ()
    before_step: Callable[[], None] | None = None
    before_update: Callable[[], None] | None = None
    take_step: Callable[[], None] | None = None
    after_step: Callable[[Count], None] | None = None
    notes: Sequence[str] = ()
    goes_on_together = False

    def begin(self, step: int) -> None:
        """The training begins or goes on: the model's weights and the optimizer's state are those
        of optimizer step `step`."""

    def go_on(self) -> None:
        """Optimizer steps follow: parameters may have been frozen, unfrozen or replaced, and what
        evaluation and saving have put aside is taken up again."""

    def finish(self, lost: bool = False) -> None:
        """Leave what `begin` has opened.

        Args:
            lost: some rank is gone: without a word to the others. Else the training has ended
                without an error, and weights and the optimizer's state are in its objects after
                it.
        """

    # ------------------------------------------------------------------ a step

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

    def exchange_all(
        self, own: Count, total: float, clip_norm: float | None, missing: bool
    ) -> bool:
        """Where `after_backward`: exchange the gradients that lie in the parameters.

        Args:
            own: samples of this rank in this step; where it is `alone`, what its losses count.
            total: samples of all ranks; where it is `alone`, of this rank.
            clip_norm: bound of the norm of the exchanged gradients, where the optimizer's step is
                taken too.
            missing: ranks have asked one another, and some rank misses a gradient in this step.

        Returns:
            Whether the optimizer's step was taken with them.
        """
        return False

    def updated(self) -> None:
        """The optimizer has changed weights, with several workers and not in `exchange_all`."""

    # ------------------------------------------------------------------ guards

    def explain(self, error: Exception) -> Exception | None:
        """What to say in place of an error in a forward or backward pass that this exchange is the
        cause of; None: the error."""
        return None

    def check_first_loss(self, loss: float | None) -> None:
        """Raise `UserError` when this rank's first loss (None where it has none) cannot be right;
        all ranks call it together."""

    def check_equal(self, where: str) -> None:
        """Raise `WorldError` when the ranks' weights, which should be equal, are not; `where` says
        at which step."""

    def epoch_values(self) -> dict[str, float]:
        """Further values of the epoch that has ended, the same on all ranks; they stand beside the
        metrics."""
        return {}

    # ------------------------------------------------------------------ what a resumed one needs

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs of the exchange, the same on all ranks; of tensors,
        strings, numbers, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the exchange of the same strategy that gave `state`, on any number of ranks;
        before `begin`. Empty: another strategy has written the checkpoint."""

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """What this rank alone has, and a resumed training needs; tensors that add up over the
        ranks."""
        return {}

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Continue with what `own_tensors` gave, before `begin`; returns whether they are used."""
        return False
