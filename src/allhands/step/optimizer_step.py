"""One optimizer step, the same at any number of workers, micro-batches and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from allhands.comm import all_reduce_sum
from allhands.step.counted import Weights, as_count, scale_gradients, split_pair
from allhands.step.exchange import Count, Exchange, Forward, Passes, Placement
from allhands.step.loss import Criterion, LossRule, NonFiniteLossError
from allhands.step.mean_check import leaves_of, map_known
from allhands.step.modes import evaluation_mode
from allhands.step.over_batch import WholeBatch, slopes_of
from allhands.step.precision import Precision
from allhands.step.step_failures import explain, raise_on_all, spoil, stop_together
from allhands.step.update import backward, update_function
from allhands.world import World

# is told (output, target, loss, factor, count): `loss * factor` is the micro-batch's sum of losses,
# over `count` items
Observer = Callable[[Any, Any, torch.Tensor, float, Any], None]


class OptimizerStep:
    """Forward and backward over this rank's micro-batches, gradient exchange, clipping, and the
    optimizer's update.

    The update equals that of a single process which computes the criterion once over the whole
    global batch: each micro-batch's loss is weighted by what it counts over what the global batch
    counts, so neither uneven shares nor a short last batch nor accumulation change it.

    Args:
        parameters: the parameters that the optimizer trains.
        optimizer: any torch.optim.Optimizer whose ``step()`` needs no closure.
        rule: how the criterion counts.
        placement: which share of the samples this rank sees.
        exchange: what travels in the step.
        world: the processes.
        precision: number format; fp16 gradients are unscaled before they are clipped.
        forward: calls the model on a micro-batch.
        observe: is told each micro-batch's result before its backward pass.
        target_of: the target in a micro-batch.
        clip_norm: upper bound of the gradients' global L2 norm, or None.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        rule: LossRule,
        placement: Placement,
        exchange: Exchange,
        world: World,
        precision: Precision,
        forward: Forward,
        observe: Observer,
        target_of: Callable[[Any], Any],
        clip_norm: float | None = None,
    ) -> None:
        self.parameters = []
        for parameter in parameters:
            if parameter.requires_grad:
                self.parameters.append(parameter)
            else:  # frozen since its last step, whose gradient must not be applied again
                parameter.grad = None
        self.optimizer, self.clip_norm = optimizer, clip_norm
        self.rule, self.precision = rule, precision
        self.exchange, self.world = exchange, world
        self.forward, self.observe, self.target_of = forward, observe, target_of
        self.scale, self.several = exchange.gradient_scale, world.world_size > 1
        self.after_backward, self.alone = exchange.after_backward, exchange.alone
        self.level, self.passes = placement.level, exchange.passes
        # So many ranks see the same samples, and count the same targets.
        self.copies = world.world_size // placement.shares
        self.several_shares = self.copies < world.world_size
        # Whether losses come as (sum, count), or may; such counts are added up in the end.
        self.pairs, self.open = bool(rule.pairs), rule.pairs is not False
        self.counts_here = placement.counts
        self.whole = (
            WholeBatch(world, placement.share, self.counts_here) if rule.over_batch else None
        )
        self._seen = False  # a loss of this rank's
        self._count: Any = None  # of the micro-batch that is computed
        self._pair_weight: torch.Tensor | None = None
        self._items: Any = 0.0  # what this rank's losses of the step count
        #: Names the parts of a step for whoever records a timeline.
        self.label: Callable[[str], AbstractContextManager[Any]] = nullcontext
        #: Called once, before the first update: whether this rank had a sample, and its first loss.
        self.before_first_update: Callable[[bool, float | None], None] | None = None
        self.before_update: Callable[[], None] | None = None  #: called after the exchange
        self._first_value: torch.Tensor | None = None
        self._failed: NonFiniteLossError | None = None
        self._weight = Weights(world.device)
        self._loss: Criterion = self._first_loss
        self._apply = update_function(optimizer)

    def __call__(
        self, batches: Sequence[Any], counts: Sequence[int], total: int, idle: bool
    ) -> None:
        """Take one step.

        Args:
            batches: this rank's micro-batches, possibly none.
            counts: samples in each.
            total: samples in the global batch, over all ranks.
            idle: some rank has no micro-batch in this step.
        """
        own = self.compute(batches, counts, total, idle)
        if self.exchange.after_step is not None:
            self.exchange.after_step(own)

    def compute(
        self, batches: Sequence[Any], counts: Sequence[int], total: int, idle: bool
    ) -> Count:
        """What of a step can be captured; returns what this rank's losses count."""
        idle = idle or self.whole is not None  # no gradient is exchanged before all of them exist
        own, failed = self.forward_backward(batches, counts, total, idle)
        if self.alone:
            total = sum(counts)
        if self.after_backward:
            if self.before_first_update is not None:
                self._look_once(counts)
            return self._exchange_all(failed or self._failed, own, total)
        if self.several:
            self.exchange.complete(idle, failed is not None)
        if self.several and self.world.device.type == "cpu":
            stop_together(failed, self.parameters, self.world)
        if self.before_first_update is not None:
            self._look_once(counts)
        if self.open:
            self._divide(total)
        if self.before_update is not None:
            self.before_update()
        self._update()
        return own

    def forward_backward(
        self, batches: Sequence[Any], counts: Sequence[int], total: int, idle: bool
    ) -> tuple[Count, NonFiniteLossError | None]:
        """The passes of a step; returns what this rank's losses count, and the error of one that
        is not finite, where other ranks wait for this one."""
        for parameter in self.parameters:
            parameter.grad = None
        whole = total
        if self.alone:
            total = sum(counts)
        own: Count = sum(counts)
        if self.passes is not None:
            batches, counts = self.passes.divide(batches, counts)
        if self.rule.counts_targets:
            weights, factors, counted = self._count_targets(batches, counts)
        elif self.rule.sums:
            weights = [self._weight(self.scale if count else 0.0) for count in counts]
            factors, counted = [1.0] * len(batches), counts
        else:
            weights = [self._weight(self.scale * count / total) for count in counts]
            factors = counted = counts
        self._divided = self.several_shares or len(batches) > 1
        if self.open:
            self._pair_weight, self._items = self._weight(self.scale / max(total, 1)), 0.0
        failed = self._failed = None
        try:
            if self.whole is not None:
                weight = self.scale * whole / max(total, 1) if self.alone else self.scale
                self._over_batch(batches, counts, weight)
            elif self.passes is not None:
                self._drive(self.passes, batches, counts, weights, factors, counted)
            else:
                self._one_by_one(batches, counts, weights, factors, counted, idle)
        except NonFiniteLossError as error:
            if not self.several:
                raise
            failed = error
            if not self.after_backward:
                spoil(self.parameters, float("nan") if idle else None)
        if self.alone and self.rule.counts_targets:
            own = counted.sum() if batches else 0.0
        return own, failed

    def _look_once(self, counts: Sequence[int]) -> None:
        look, self.before_first_update = self.before_first_update, None
        value, self._first_value = self._first_value, None
        if look is not None:
            look(any(counts), None if value is None else float(value))

    def _one_by_one(
        self,
        batches: Sequence[Any],
        counts: Sequence[int],
        weights: Any,
        factors: Any,
        counted: Any,
        idle: bool,
    ) -> None:
        last = len(batches) - 1
        for number, batch in enumerate(batches):
            if self.level and not counts[number]:
                self._fill(batch, weights[number])
            elif idle or number < last:
                with self.exchange.no_exchange():
                    self._micro_batch(batch, weights[number], factors[number], counted[number])
            else:
                self._micro_batch(batch, weights[number], factors[number], counted[number])

    def _over_batch(self, batches: Sequence[Any], counts: Sequence[int], weight: float) -> None:
        """All forward passes, the loss of the whole global batch, and the backward passes of this
        rank's outputs."""
        assert self.whole is not None
        outputs, parts = [], []
        for batch, count in zip(batches, counts, strict=True):
            try:
                with (
                    self.exchange.no_exchange(),
                    self._forward_mode(count),
                    self.label("forward"),
                    self.precision.autocast(),
                ):
                    output, target = self.forward(batch)
            except (ValueError, RuntimeError) as error:
                explain(error, self.exchange, self.world)
                raise
            outputs.append([leaf for leaf in leaves_of(output) if leaf.requires_grad])
            if count:
                parts.append(
                    (
                        map_known(
                            output, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad)
                        ),
                        target,
                    )
                )
        gathered = self.whole(parts)
        if gathered is not None:
            with self.precision.autocast():
                loss = self.rule.call(*gathered)
            self.rule.check_value(loss)
            real = [count for count in counts if count]
            for (output, target), count in zip(parts, real, strict=True):
                self._observe(output, target, loss, count, count)
            scaler, loss = self.precision.scaler, loss * weight
            (loss if scaler is None else scaler.scale(loss)).backward()
        for leaves, slopes in slopes_of(outputs, [output for output, _ in parts], counts):
            with self.exchange.no_exchange(), self.label("backward"):
                torch.autograd.backward(leaves, slopes)

    def _drive(
        self,
        passes: Passes,
        batches: Sequence[Any],
        counts: Sequence[int],
        weights: Any,
        factors: Any,
        counted: Any,
    ) -> None:
        """The passes run as the strategy says, and it asks for each micro-batch's loss where its
        output is."""

        def loss_of(number: int, output: Any, target: Any) -> torch.Tensor:
            loss, weight = self._loss(output, target), weights[number]
            factor, count = factors[number], counted[number]
            if self.pairs:
                loss, weight, factor, count = self._pair(loss)
            self._observe(output, target, loss, factor, count)
            loss = loss * weight.to(loss.dtype)
            return loss if self.precision.scaler is None else self.precision.scaler.scale(loss)

        try:
            with self.label("forward"):  # and backward, in the strategy's own order
                passes.forward_backward(
                    batches, counts, self.forward, loss_of, self.precision.autocast
                )
        except (ValueError, RuntimeError) as error:
            explain(error, self.exchange, self.world)
            raise

    def _micro_batch(self, batch: Any, weight: torch.Tensor, factor: float, count: Any) -> None:
        self._count = count
        try:
            with self.label("forward"), self.precision.autocast():
                output, target = self.forward(batch)
                loss = self._loss(output, target)
        except (ValueError, RuntimeError) as error:
            explain(error, self.exchange, self.world)
            raise
        if self.pairs:
            loss, weight, factor, count = self._pair(loss)
        self._observe(output, target, loss, factor, count)
        # among the largest tensors of a language model; the loss keeps what it needs
        del output
        # The weight enters as the gradient of the loss; to multiply the loss would be an operation.
        scaler = self.precision.scaler
        try:
            with self.label("backward"):
                if scaler is None:
                    backward(loss, weight.to(loss.dtype))
                else:
                    scaler.scale(loss * weight).backward()
        except RuntimeError as error:
            explain(error, self.exchange, self.world)
            raise

    def _observe(
        self, output: Any, target: Any, loss: torch.Tensor, factor: float, count: Any
    ) -> None:
        try:
            self.observe(output, target, loss, factor, count)
        except NonFiniteLossError as error:
            if not (self.level and self.several):
                raise
            self._failed = self._failed or error  # the others wait for this rank's backward pass

    def _fill(self, batch: Any, weight: torch.Tensor) -> None:
        """Pass a batch that counts for nothing through the model, for the sake of the ranks that
        wait for it in their own pass.

        The model is in evaluation mode, so that neither running statistics nor random draws know of
        it.
        """
        with self._forward_mode(0):
            with self.precision.autocast():
                output, target = self.forward(batch)
                loss: Any = self._loss(output, target)
            if self.pairs:
                loss, _ = loss
            loss.backward(weight.to(loss.dtype))

    @contextmanager
    def _forward_mode(self, count: int) -> Iterator[None]:
        """Within, the model is in evaluation mode where a micro-batch counts for nothing."""
        if count:
            yield
            return
        with evaluation_mode(self.forward.module):  # type: ignore[attr-defined]
            yield

    def _pair(self, given: Any) -> tuple[torch.Tensor, Any, float, Any]:
        """A micro-batch's sum of losses, its weight as long as the step's count is not known, the
        sum's factor, and the count."""
        loss, count = given
        count = as_count(count)
        self._items = self._items + count
        return loss, self._pair_weight, 1.0, count

    def _divide(self, total: float) -> None:
        """Divide the gradients, which were by the samples, by what the losses of the step count."""
        if self.rule.pairs is None:
            self.rule.settle(self.pairs if self._seen else None, self._divided, self.world)
            self.pairs, self.open = bool(self.rule.pairs), self.rule.pairs is not False
        if not self.pairs:
            return
        items = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if self.counts_here:
            items += self._items
        if not self.alone:
            all_reduce_sum([items], self.world)
        # When nothing at all counts, every loss is a sum over nothing, 0, and so is its gradient.
        scale_gradients(self.parameters, torch.where(items > 0, total / items, 0.0))

    def _exchange_all(self, failed: NonFiniteLossError | None, own: Count, total: float) -> Count:
        missing = False
        if failed is not None and self.alone:
            raise failed  # nobody waits for this rank's part of the step
        if self.several and not self.alone and self.world.device.type == "cpu":
            misses = any(parameter.grad is None for parameter in self.parameters)
            flags = torch.tensor([float(failed is not None), float(misses)])
            all_reduce_sum([flags], self.world)
            any_failed, any_missing = flags.tolist()
            if any_failed:
                raise_on_all(failed, self.world)
            missing = bool(any_missing)
        if self.open:
            self._divide(total)
            own = self._items if self.alone and self.pairs else own
        self.exchange.before_update = self.before_update
        with self.label("exchange"):
            updated = self.exchange.exchange_all(own, total, self.clip_norm, missing)
        if not updated:
            if self.before_update is not None:
                self.before_update()
            self._update()
        return own

    def _first_loss(self, output: Any, target: Any) -> torch.Tensor:
        """The first losses, looked at; later ones have the same form and are not."""
        alike = self.rule.check_shapes(output, target, self._count if self._divided else None)
        loss: Any = self.rule.call(output, target)
        if self.rule.pairs is None:
            self.pairs, self._seen = isinstance(loss, tuple), True
        value = split_pair(loss)[0] if self.pairs else loss
        self.rule.check_value(value)
        self.rule.check_counts(output, target, value)
        if self.before_first_update is not None and self._first_value is None:
            self._first_value = value.detach()
        check = self.rule.check
        if check is not None and not self.pairs:
            check.look(output, target)
        if alike and (check is None or self.pairs or check.found is not None):
            self._loss = self.rule.call
        self._weight.cast(value.dtype)
        return loss

    def _count_targets(self, batches: Sequence[Any], counts: Sequence[int]) -> tuple[Any, Any, Any]:
        """Weights, loss factors and counts of the micro-batches; the global count needs one small
        all-reduce."""
        counted = self.rule.count_targets([self.target_of(batch) for batch in batches])
        total = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        if counted is not None:
            if self.level and not all(counts):
                has_samples = [float(count > 0) for count in counts]
                counted = counted * counted.new_tensor(has_samples)
            total += counted.sum()
        if not self.alone:
            all_reduce_sum([total], self.world)
        # When no target at all counts, every loss is a sum over nothing, 0, and so is its gradient.
        weight = (self.scale * self.copies / total.clamp_min(1e-30)).to(self._weight.dtype)[0]
        weights = [weight if count else self._weight(0.0) for count in counts]
        return weights, [1.0] * len(batches), counted

    def _update(self) -> None:
        with self.label("optimizer"):
            self.apply()
            if self.several:
                self.exchange.updated()

    def apply(self) -> None:
        """Clip this rank's gradients, and take the optimizer's step here alone."""
        if self.exchange.take_step is not None:
            self.exchange.take_step()
            return
        scaler = self.precision.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            if scaler is not None:
                scaler.unscale_others(self.exchange.updated_elsewhere)
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if scaler is not None:
            scaler.apply(self.optimizer)
        else:
            self._apply()
