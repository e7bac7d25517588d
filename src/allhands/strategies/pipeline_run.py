"""The passes of a pipeline: an optimizer step's micro-batches by a schedule, and evaluation batch
by batch."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.data import map_tensors
from allhands.errors import UserError
from allhands.step.exchange import Forward, LossOf
from allhands.strategies.base import OutputElsewhere
from allhands.strategies.pipeline_parts import Part
from allhands.strategies.pipeline_stage import Ghost, StagedModel, signature, stage_module

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
# Schedules, each with its buffers, that are kept for the shapes of micro-batches that may come
# again.
_KEPT = 8
# Activations on their way to the next stage in evaluation, before the first of them is waited for.
_UNDER_WAY = 4

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a batch.

    `filled` is what goes through the model: `batch`, or with further samples that do not count, up
    to the other ranks' number. `count` is 0 where the one in `batch` does not count either.
    """

    batch: Any
    filled: Any
    count: int


class _Input(BaseException):
    """Carries the model's input out of handle_batch; past a user's ``except Exception``."""

    def __init__(self, value: Any) -> None:
        self.value = value


def fits(schedule: str, micro_batches: int, ranks: int) -> bool:
    """Whether PyTorch's schedule of this name takes so many micro-batches on so many ranks."""
    if schedule == "1f1b":
        return micro_batches >= ranks
    if schedule in ("interleaved", "zero_bubble"):
        return micro_batches % max(1, micro_batches // ranks) == 0
    return True


class PipelineRun:
    """This rank's stages, bound to their neighbours.

    Args:
        model: the whole model; only the submodules of this rank's stages are kept.
        stages: the parts of all stages, in order; stage s is on rank ``s % ranks`` of the group.
        ghost: tells what passes between the stages.
        group: the ranks along the pipeline, or None for the world.
        device: this rank's.
        schedule: one of `SCHEDULES`.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: list[list[Part]],
        ghost: Ghost,
        group: dist.ProcessGroup | None,
        device: torch.device,
        schedule: str,
    ) -> None:
        self.group, self.device, self.schedule, self.ghost = group, device, schedule, ghost
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.last = len(stages) - 1
        self.numbers = list(range(self.rank, len(stages), self.ranks))
        self.holds_last = self.last in self.numbers
        self.chunks = [
            stage_module(model, stages[number], self._precision) for number in self.numbers
        ]
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._shapes: list[torch.Tensor] = []
        # In a training step: what the first stage is called with, and what makes the last stage's
        # output into its loss.
        self._inputs: Iterator[Any] | None = None
        self._loss: Callable[[Any], torch.Tensor] | None = None
        self._autocast: Autocast = nullcontext

    def _hook(self, number: int, chunk: nn.Module) -> None:
        """The first stage takes its input, and the last makes its output a loss, outside of what
        shards the chunk."""

        def before(_: nn.Module, arguments: tuple[Any, ...]) -> Any:
            return arguments if self._inputs is None else (next(self._inputs),)

        def after(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            if number < self.last:
                return self._handed_on(number, output)
            return output if self._loss is None else self._loss(output)

        if number == 0:
            chunk.register_forward_pre_hook(before, prepend=True)
        chunk.register_forward_hook(after)

    def model(self, names: Mapping[str, str]) -> StagedModel:
        """What the runner sees in place of the model; to be called once the chunks are sharded.

        Args:
            names: of parameters that the whole model knows by another name first.
        """
        for number, chunk in zip(self.numbers, self.chunks, strict=True):
            self._hook(number, chunk)
        self._model = StagedModel(self.chunks, names)
        self._model.answer = self.evaluate
        self._sharded = any(
            hasattr(parameter, "placements") for parameter in self._model.parameters()
        )
        return self._model

    def _precision(self) -> AbstractContextManager[Any]:
        return self._autocast()

    def _handed_on(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """Checked against what the next stage waits for, since another shape would be read as
        garbage."""
        expected = self._shapes[number]
        if (
            value.dtype != expected.dtype
            and torch.promote_types(value.dtype, expected.dtype) == expected.dtype
        ):
            value = value.to(expected.dtype)  # as of parameters that fsdp casts; nothing is lost
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise UserError(
                f"stage {number} of the pipeline gives {value.dtype} of shape {list(value.shape)}, "
                f"and {expected.dtype} of shape {list(expected.shape)} was expected. Cut where the "
                "whole activation is on every rank: stages=[…]"
            )
        return value.contiguous()

    # ------------------------------------------------------------------ a training step

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        forward: Forward,
        loss_of: LossOf,
        autocast: Autocast,
    ) -> None:
        """Forward and backward over micro-batches; their gradients are added up in the parameters.

        Those of one shape that follow one another share one run of the schedule.

        Args:
            micro_batches: this rank's, the same along the pipeline.
            forward: calls the runner's handle_batch with the staged model.
            loss_of: ``(number of the micro-batch, output, target)`` to the loss that is
                differentiated; called on the last stage.
            autocast: the precision of forward passes and losses.
        """
        self.settle()
        self._autocast = autocast
        try:
            numbered = enumerate(micro_batches)
            with self._casts_kept():
                for shape, run in itertools.groupby(
                    numbered, key=lambda pair: signature(pair[1].filled)
                ):
                    self._run(shape, list(run), forward, loss_of)
        finally:
            self._autocast, self._inputs, self._loss = nullcontext, None, None

    def _casts_kept(self) -> AbstractContextManager[Any]:
        """Within, autocast casts each weight once, and not once a micro-batch: it forgets casts
        when the outermost one ends.

        Of parameters that fully_shard gathers, it would keep the whole stage's.
        """
        return nullcontext() if self._sharded else torch.autocast(self.device.type, enabled=False)

    def _run(
        self, shape: Any, run: list[tuple[int, MicroBatch]], forward: Forward, loss_of: LossOf
    ) -> None:
        key = (shape, len(run))
        schedule = self._schedules.pop(key, None)
        if new := schedule is None:
            with self._autocast():
                shapes = self.ghost.between(
                    self._input_of(run[0][1].filled, forward), self._model.training
                )
            schedule = self._make_schedule(shapes, len(run)), shapes
        self._schedules[key] = schedule
        while len(self._schedules) > _KEPT:
            self._schedules.popitem(last=False)
        step, self._shapes = schedule
        self._inputs = (self._input_of(micro.filled, forward) for _, micro in run)
        losses = iter(run)
        self._loss = lambda output: self._weighted(*next(losses), output, forward, loss_of)
        arguments = (torch.arange(len(run)),) if self.rank == 0 else ()
        target = torch.arange(len(run)) if self.holds_last else None
        # With fully_shard, the first call of a schedule clears the gradients that earlier ones have
        # left.
        kept = [(p, p.grad) for p in self._model.parameters() if p.grad is not None] if new else []
        for parameter, _ in kept:
            parameter.grad = None
        try:
            step(*arguments, target=target, return_outputs=False)
        except RuntimeError as error:
            # PyTorch wraps what a stage raises in an error that prints the stage's arguments.
            if isinstance(error.__cause__, (UserError, ValueError)):
                raise error.__cause__ from None
            raise
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _make_schedule(self, shapes: list[torch.Tensor], count: int) -> Callable[..., Any]:
        from torch.distributed import pipelining  # takes a second or two to import

        stages: list[Any] = []
        for number, chunk in zip(self.numbers, self.chunks, strict=True):
            # The first stage is called with a number, since its input may be any tree; the last one
            # gives the loss.
            if number == 0:
                given = torch.empty(1, dtype=torch.int64, device="meta")
            else:
                given = shapes[number - 1]
            if number == self.last:
                gives = torch.empty((), device="meta", requires_grad=True)
            else:
                gives = shapes[number]
            stages.append(
                pipelining.PipelineStage(
                    chunk,
                    number,
                    self.last + 1,
                    self.device,
                    input_args=(given,),
                    output_args=(gives,),
                    group=self.group,
                )
            )
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        name = self.schedule if fits(self.schedule, count, self.ranks) else "gpipe"
        if name == "interleaved":
            return pipelining.ScheduleInterleaved1F1B(stages, count, **options).step
        if name == "zero_bubble":
            return pipelining.ScheduleInterleavedZeroBubble(stages, count, **options).step
        if len(stages) > 1:
            return pipelining.ScheduleLoopedBFS(stages, count, **options).step
        kind = pipelining.ScheduleGPipe if name == "gpipe" else pipelining.Schedule1F1B
        return kind(stages[0], count, **options).step

    def _input_of(self, batch: Any, forward: Forward) -> Any:
        def record(value: Any) -> Any:
            raise _Input(value)

        before, self._model.answer = self._model.answer, record
        try:
            forward(batch)
        except _Input as got:
            return got.value
        finally:
            self._model.answer = before
        raise UserError(
            "handle_batch did not call the model that it is given, so a pipeline has no input. "
            "Call model(…) itself"
        )

    def _weighted(
        self, number: int, micro: MicroBatch, output: Any, forward: Forward, loss_of: LossOf
    ) -> torch.Tensor:
        if micro.count == 0:
            return (output.float() * 0).sum()
        if micro.filled is not micro.batch:
            output = map_tensors(output, lambda tensor: tensor[: micro.count])
        asked = 0

        def give(_: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked > 1:
                raise UserError(
                    "handle_batch calls the model more than once a batch, which a pipeline cannot; "
                    "put what it does with the outputs into the model, or use distributed='fsdp'"
                )
            return output

        before, self._model.answer = self._model.answer, give
        try:
            with self._autocast():
                loss = loss_of(number, *forward(micro.batch))
        finally:
            self._model.answer = before
        # The value is no longer needed and the gradient of a cast is 1 in any format, so nothing is
        # lost.
        return loss.float()

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, value: Any) -> Any:
        """The model's output for one input, on the ranks that hold the last stage.

        Each rank goes on to its next batch as soon as it has handed this one on, so that the stages
        work at the same time.

        Raises:
            OutputElsewhere: on the other ranks.
        """
        self._shapes = self.ghost.between(value, self._model.training)
        for number, chunk in zip(self.numbers, self.chunks, strict=True):
            if number:
                meta = self._shapes[number - 1]
                value = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
                dist.recv(value, self._peer(number - 1), self.group)
            given = chunk(value)
            if number < self.last:
                self._sent.append((dist.isend(given, self._peer(number + 1), self.group), given))
                while len(self._sent) > _UNDER_WAY:
                    self._sent.popleft()[0].wait()
            else:
                return given
        raise OutputElsewhere

    def _peer(self, stage: int) -> int:
        rank = stage % self.ranks
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def settle(self) -> None:
        """Wait until all that was sent in evaluation has been received."""
        while self._sent:
            self._sent.popleft()[0].wait()
