"""What happened at every optimizer step of one run, and how far that is from a reference run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from allhands.comm import all_gather_rows
from allhands.data.agree import checksum
from allhands.loop.schedule import learning_rates
from allhands.runner import Callback
from allhands.runner.training import Training

# Names of the differences over all parameters together.
ALL_GRADIENTS, ALL_PARAMETERS = "all gradients", "all parameters"
# A tensor whose norm is below this share of the norm of all tensors of its kind is compared
# relative to that share: its own value is rounding (the gradient of a bias in front of a BatchNorm
# is 0 but for that).
_SMALLEST = 1e-7

Step = dict[str, Any]


class Recorder(Callback):
    """Keeps, for every optimizer step, what a run did; ends the training after `steps` of them.

    Every rank must have one. A step is a dict of plain data:

    * ``loss``, the mean over the global batch; ``samples``, how many there were; ``content``, a
      checksum of them in which their order does not count (None where a batch has no rows);
      ``shares``, the samples by rank; ``rates``, the learning rates;
    * ``distance``: relative L2 differences from the reference run by name (``loss``, ``gradient of
      NAME``, ``parameter NAME``, ``buffer NAME``, and all gradients and all parameters together).
      Gradients are those that the optimizer gets: exchanged, unscaled and clipped. Parameters are
      those after the step;
    * ``apart``: names of the parameters, and of the buffers after `ModelState.sync_buffers`, that
      are not the same on all ranks.

    Args:
        steps: how many steps to record.
        reference: the steps that a recorder with ``keep=True`` recorded; None compares with
            nothing.
        keep: store the tensors themselves, under ``gradients``, ``parameters`` and ``buffers``.
    """

    def __init__(self, steps: int, reference: list[Step] | None = None, keep: bool = False) -> None:
        self.limit = steps
        self.reference = reference
        self.keep = keep
        self.steps: list[Step] = []
        #: Calls of the module that the strategy gave to call, where it is not the model itself.
        self.calls = 0
        self.wraps = False
        # Of the losses, what they count, samples, checksums.
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._rows = True
        self._rates: list[float] | None = None
        self._gradients: dict[str, torch.Tensor] | None = None

    def on_train_start(self, training: Training) -> None:
        # Of the user's own model: where ranks hold parts of it, they are put together to be
        # compared.
        self._names = [
            name for name, p in training.settings.model.named_parameters() if p.requires_grad
        ]
        self._counts = training.loop.placement.counts
        if training.settings.strategy.takes_step:
            # Nobody calls optimizer.step().
            training.loop.exchange.before_step = lambda: self._before_update(training)
        else:
            training.optimizer.register_step_pre_hook(lambda *_: self._before_update(training))
        for feed in training.loop.trained:
            feed.epoch = self._seeing(feed.epoch)  # type: ignore[method-assign]
            metrics = training.metrics[feed.name]
            metrics.observe = self._observing(metrics.observe)  # type: ignore[method-assign]
        if training.loop.called is not training.model:
            self.wraps = True
            training.loop.called.register_forward_pre_hook(self._called)

    def on_step_end(self, training: Training) -> None:
        if self._gradients is None:
            self._before_update(training)  # fp16 left the step out, or the optimizer calls no hooks
        assert self._gradients is not None
        gradients, world = self._gradients, training.world
        self._gradients = None
        sums = torch.stack(
            [part[0].cpu() for part in all_gather_rows(self._sums[None].to(world.device), world)]
        )
        self._sums.zero_()
        total, count, samples, content = sums.sum(0).tolist()
        step: Step = {
            "loss": total / count if count else 0.0,
            "samples": int(samples),
            "content": int(content) if self._rows else None,
            "shares": [int(n) for n in sums[:, 2].tolist()],
            "rates": self._rates,
        }
        whole = training.loop.state.whole_parameters()
        parameters = {name: whole[name] for name in self._names}
        apart = {"parameters": _apart(parameters, training)}
        with training.loop.state.buffers_made_equal():
            buffers = training.loop.state.whole_buffers()
            apart["buffers"] = _apart(buffers, training)
            if self.keep:
                step |= {
                    "gradients": _kept(gradients),
                    "parameters": _kept(parameters),
                    "buffers": _kept(buffers),
                }
            if self.reference is not None and len(self.steps) < len(self.reference):
                step["distance"] = self._distance(step, gradients, parameters, buffers)
        step["apart"] = apart
        self.steps.append(step)
        if len(self.steps) >= self.limit:
            training.stop("verify has seen enough", now=True)

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

    # ------------------------------------------------------------------ what is listened to

    def _called(self, module: nn.Module, args: Any) -> None:
        self.calls += 1

    def _before_update(self, training: Training) -> None:
        self._rates = learning_rates(training.optimizer)
        # Copies: some optimizers change gradients in place.
        whole = training.loop.state.whole_gradients()
        self._gradients = {name: whole[name] for name in self._names}

    def _observing(self, observe: Callable[..., None]) -> Callable[..., None]:
        def wrapped(
            output: Any, target: Any, loss: torch.Tensor, factor: float, count: Any
        ) -> None:
            if self._counts:
                self._sums[0] += float(loss.detach()) * factor
                self._sums[1] += float(count)
            observe(output, target, loss, factor, count)

        return wrapped

    def _seeing(self, epoch: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def wrapped(*args: Any) -> Iterator[Any]:
            for step in epoch(*args):
                batches, counts, *_ = step
                for batch, count in zip(batches, counts, strict=True):
                    if count and self._counts:
                        rows = row_checksums(batch)
                        self._rows = self._rows and rows is not None
                        self._sums[2] += len(rows or ())
                        self._sums[3] += sum(rows or ())
                yield step

        return wrapped


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a tree of tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def row_checksums(batch: Any) -> list[int] | None:
    """A 32-bit checksum of each sample in a batch; None when its tensors have no first dimension in
    common."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.dim()]
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


def _kept(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def _apart(tensors: Mapping[str, torch.Tensor], training: Training) -> list[str]:
    """The names of those that are not the same on all ranks, bit for bit."""
    if training.world.world_size == 1 or not tensors:
        return []
    sums = torch.tensor(
        [[checksum(tensor) for tensor in tensors.values()]], device=training.world.device
    )
    seen = torch.cat(all_gather_rows(sums, training.world))
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
