"""What happened at every optimizer step of one run, and how far that is from a reference run."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from allhands.comm import all_gather_rows
from allhands.data import Feed, tensors_in
from allhands.data.agree import checksum
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.schedule import learning_rates
from allhands.runner import Callback
from allhands.runner.training import Training
from allhands.step.closure import takes_closure
from allhands.world import World

# Names of the differences over all parameters together.
ALL_GRADIENTS, ALL_PARAMETERS = "all gradients", "all parameters"
# A tensor whose norm is below this share of the norm of all tensors of its kind is compared
# relative to that share: its own value is rounding (the gradient of a bias in front of a BatchNorm
# is 0 but for that).
_SMALLEST = 1e-7

Step = dict[str, Any]


class Recorder:
    """Keeps, for every optimizer step, what a run did.

    Every rank must have one. A step is a dict of plain data:

    * ``optimizer``, its name where there are several, else "", and ``number`` of the step among
      those of this optimizer, from 1;
    * ``loss``, the mean over the global batch; ``samples``, how many were read since the step
      before; ``content``, a checksum of them in which their order does not count (None where a
      batch has no rows); ``form``, a checksum of the shapes of a sample's tensors, -1 where they
      differ, as samples do that a collate function pads to the longest of a batch; ``shares``, the
      samples by rank; ``rates``, the learning rates;
    * ``distance``: relative L2 differences from the reference run by name (``loss``, ``gradient of
      NAME``, ``parameter NAME``, ``buffer NAME``, and all gradients and all parameters together).
      Gradients are those that the optimizer gets: exchanged, unscaled and clipped; there are none
      of an optimizer that computes them itself, by a closure. Parameters are those after the step;
    * ``apart``: names of the parameters, and of the buffers after `ModelState.sync_buffers`, that
      are not the same on all ranks.

    Args:
        world: the ranks.
        reference: the steps that a recorder with ``keep=True`` recorded; None compares with
            nothing.
        keep: store the tensors themselves, under ``gradients``, ``parameters`` and ``buffers``.
    """

    def __init__(
        self, world: World, reference: list[Step] | None = None, keep: bool = False
    ) -> None:
        self.world, self.reference, self.keep = world, reference, keep
        self.steps: list[Step] = []
        #: Calls of the module that the strategy gave to call, where it is not the model itself.
        self.calls = 0
        self.wraps = False
        self._watched: dict[int, _Watched] = {}  # by the group's id
        self._counts = True
        # Of the losses, what they count, samples, checksums.
        # Losses, their count, samples, their checksums, and the form of their tensors.
        self._sums = torch.zeros(5, dtype=torch.float64)
        self._rows = True

    # ------------------------------------------------------------------ what is listened to

    def watch(self, group: OptimizerGroup, optimizer: str = "", prefix: str = "") -> None:
        """Record the steps of an optimizer.

        Args:
            group: the optimizer and its model.
            optimizer: its name in a step.
            prefix: of its parameters' names.
        """
        self._counts = group.placement.counts
        self._watched[id(group)] = _Watched(group, optimizer, prefix)
        if group.called is not group.model:
            self.wraps = True
            group.called.register_forward_pre_hook(self._called)

    def watch_feed(self, feed: Feed) -> None:
        """Take in the samples that a loader gives."""
        feed.epoch = self._seeing(feed.epoch)  # type: ignore[method-assign]

    def _seeing(self, epoch: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def wrapped(*args: Any) -> Iterator[Any]:
            for step in epoch(*args):
                self.see(step[0], step[1])
                yield step

        return wrapped

    def see(self, batches: Iterable[Any], counts: Iterable[int]) -> None:
        """Take in micro-batches of this rank, and the samples in each."""
        for batch, count in zip(batches, counts, strict=True):
            if count and self._counts:
                rows = row_checksums(batch)
                self._rows = self._rows and rows is not None
                self._sums[2] += len(rows or ())
                self._sums[3] += sum(rows or ())
                self._sums[4] = _one_form(float(self._sums[4]), form_of(batch))

    def see_own(self, count: int) -> None:
        """Take in samples that this rank has made itself: what is computed differs by rounding, so
        they are only counted."""
        if self._counts:
            self._sums[2] += count

    def observe(self, loss: torch.Tensor, factor: float, count: Any) -> None:
        """Take in a micro-batch's loss, and what it counts."""
        if self._counts:
            self._sums[0] += float(loss.detach()) * factor
            self._sums[1] += float(count)

    def _called(self, module: nn.Module, args: Any) -> None:
        self.calls += 1

    @property
    def unwrapped(self) -> bool:
        """The module that the strategy gave to call was never called."""
        return self.wraps and self.calls == 0

    # ------------------------------------------------------------------ a step

    def number(self, group: OptimizerGroup) -> int:
        """How many steps the optimizer has taken."""
        return self._watched[id(group)].number

    @property
    def fewest(self) -> int:
        """Steps of the optimizer that has taken the fewest."""
        return min(watched.number for watched in self._watched.values())

    def stepped(self, group: OptimizerGroup) -> None:
        watched = self._watched[id(group)]
        rates, gradients = watched.taken()
        sums = torch.stack(
            [
                part[0].cpu()
                for part in all_gather_rows(self._sums[None].to(self.world.device), self.world)
            ]
        )
        self._sums.zero_()
        total, count, samples, content, _ = sums.sum(0).tolist()
        step: Step = {
            "optimizer": watched.optimizer,
            "number": watched.number,
            "loss": total / count if count else 0.0,
            "samples": int(samples),
            "content": int(content) if self._rows else None,
            "form": functools.reduce(_one_form, sums[:, 4].tolist(), 0.0),
            "shares": [int(n) for n in sums[:, 2].tolist()],
            "rates": rates,
        }
        parameters = watched.of(group.state.whole_parameters())
        apart = {"parameters": _apart(parameters, self.world)}
        with group.state.buffers_made_equal():
            buffers = watched.named(group.state.whole_buffers())
            apart["buffers"] = _apart(buffers, self.world)
            if self.keep:
                step |= {
                    "gradients": _kept(gradients),
                    "parameters": _kept(parameters),
                    "buffers": _kept(buffers),
                }
            if self.reference is not None and self._comparable(step):
                step["distance"] = self._distance(step, gradients, parameters, buffers)
        step["apart"] = apart
        self.steps.append(step)

    def _comparable(self, step: Step) -> bool:
        assert self.reference is not None
        number = len(self.steps)
        return (
            number < len(self.reference)
            and self.reference[number]["optimizer"] == step["optimizer"]
        )

    def _distance(
        self, step: Step, gradients: Any, parameters: Any, buffers: Any
    ) -> dict[str, float]:
        assert self.reference is not None
        other = self.reference[len(self.steps)]
        scale = max(
            [
                abs(other["loss"]),
                *(
                    _SMALLEST * abs(earlier["loss"])
                    for earlier in self.reference[: len(self.steps)]
                ),
            ]
        )
        found = {"loss": _ratio(abs(step["loss"] - other["loss"]), scale)}
        found |= _distances(gradients, other["gradients"], "gradient of ", ALL_GRADIENTS)
        found |= _distances(parameters, other["parameters"], "parameter ", ALL_PARAMETERS)
        return found | _distances(buffers, other["buffers"], "buffer ", None)


class _Watched:
    """An optimizer whose steps are recorded, and what is seen of one before its update."""

    def __init__(self, group: OptimizerGroup, optimizer: str, prefix: str) -> None:
        self.group, self.optimizer, self.prefix = group, optimizer, prefix
        self.number = 0
        # Of the user's own model: where ranks hold parts of it, they are put together to be
        # compared.
        self._names = [
            name for name, p in group.settings.model.named_parameters() if p.requires_grad
        ]
        self._rates: list[float] = []
        self._gradients: dict[str, torch.Tensor] | None = None
        self._has_gradients = not takes_closure(group.optimizer)
        if group.strategy.takes_step:
            # Nobody calls optimizer.step().
            group.exchange.before_step = self._before_update
        else:
            group.optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def _before_update(self) -> None:
        self._rates = learning_rates(self.group.optimizer)
        # Copies: some optimizers change gradients in place.
        self._gradients = self.of(self.group.state.whole_gradients()) if self._has_gradients else {}

    def taken(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        if self._gradients is None:
            self._before_update()  # fp16 left the step out, or the optimizer calls no hooks
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        self.number += 1
        return self._rates, gradients

    def of(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the parameters that are trained, by name."""
        return self.named({name: whole[name] for name in self._names})

    def named(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same with the names of a step."""
        return {self.prefix + name: tensor for name, tensor in whole.items()}


class RunnerRecorder(Callback):
    """A `Recorder` of the runner's training, which it ends after some steps."""

    def __init__(self, steps: int, reference: list[Step] | None = None, keep: bool = False) -> None:
        self.limit, self._given = steps, (reference, keep)

    def on_train_start(self, training: Training) -> None:
        self.record = Recorder(training.world, *self._given)
        loop = training.loop
        (self._group,) = loop.groups.values()
        self.record.watch(self._group)
        for feed in loop.trained:
            self.record.watch_feed(feed)
            metrics = training.metrics[feed.name]
            metrics.observe = self._observing(metrics.observe)  # type: ignore[method-assign]

    def _observing(self, observe: Callable[..., None]) -> Callable[..., None]:
        def wrapped(
            output: Any, target: Any, loss: torch.Tensor, factor: float, count: Any
        ) -> None:
            self.record.observe(loss, factor, count)
            observe(output, target, loss, factor, count)

        return wrapped

    def on_step_end(self, training: Training) -> None:
        self.record.stepped(self._group)
        if len(self.record.steps) >= self.limit:
            training.stop("verify has seen enough", now=True)


def row_checksums(batch: Any) -> list[int] | None:
    """A 32-bit checksum of each sample in a batch; None when its tensors have no first dimension in
    common."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    if not tensors or len({len(tensor) for tensor in tensors}) > 1:
        return None
    rows = [0] * len(tensors[0])
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        for number, row in enumerate(
            data.view(len(data), -1).view(torch.uint8).numpy() if data.numel() else ()
        ):
            rows[number] = zlib.crc32(row.data, rows[number])
    return rows


def form_of(batch: Any) -> float:
    """A checksum of the shapes of a sample's tensors, above 0."""
    shapes = [list(tensor.shape[1:]) for tensor in tensors_in(batch) if tensor.dim()]
    return 1.0 + zlib.crc32(repr(shapes).encode())


def _one_form(one: float, other: float) -> float:
    """The form of two parts of a step, either of which may have no sample (0); -1: two forms."""
    return other if not one else one if other in (0.0, one) else -1.0


def _kept(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def _apart(tensors: Mapping[str, torch.Tensor], world: World) -> list[str]:
    """The names of those that are not the same on all ranks, bit for bit."""
    if world.world_size == 1 or not tensors:
        return []
    sums = torch.tensor([[checksum(tensor) for tensor in tensors.values()]], device=world.device)
    seen = torch.cat(all_gather_rows(sums, world))
    return [
        name
        for name, differs in zip(tensors, (seen != seen[0]).any(0).tolist(), strict=True)
        if differs
    ]


def _distances(
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    kind: str,
    together: str | None,
) -> dict[str, float]:
    """Relative L2 differences by name, and of all of them as one vector under the name
    `together`."""
    pairs = {
        name: (
            float((tensor.detach().cpu().double() - theirs[name].double()).norm()),
            float(theirs[name].double().norm()),
        )
        for name, tensor in ours.items()
    }
    whole = sum(size**2 for _, size in pairs.values()) ** 0.5
    found = {
        kind + name: _ratio(difference, max(size, _SMALLEST * whole))
        for name, (difference, size) in pairs.items()
    }
    if together is not None:
        found[together] = _ratio(
            sum(difference**2 for difference, _ in pairs.values()) ** 0.5, whole
        )
    return found


def _ratio(difference: float, size: float) -> float:
    return difference / size if size else float("inf") if difference else 0.0
