"""Criteria that say what they average over: they return the sum of their losses and its count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from allhands.data.trees import is_samples, named_members
from allhands.errors import UserError, kind_of


class Counted(nn.Module, ABC):
    """The base of criteria that may return ``(sum, count)``."""

    #: Whether the criterion returns a pair, and not a mean over the samples.
    pairs: bool = True
    #: Whether it takes all that the model gives, whatever `output_key` of the runner says.
    takes_whole_output: bool = False

    @abstractmethod
    def mean(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of one whole batch, a tensor of shape []."""


class PerTarget(Counted):
    """A loss that is a mean over targets, and not over samples: the tokens of sequences, the pixels
    of masks.

    A step then applies the gradient of the mean over all targets of the global batch that are not
    `ignore_index`::

        def next_token(output, target):  # [N, T, V], [N, T]
            return F.cross_entropy(output.flatten(0, 1), target.flatten())

        runner.train(criterion=allhands.PerTarget(next_token), …)

    Args:
        fn: ``(output, target)`` to a tensor of shape [], the mean over the targets that are not
            `ignore_index`. A function or a module; no class weights.
        ignore_index: the value of targets that do not count. Nothing else is done with it: `fn` has
            to leave them out.

    Raises:
        UserError: `fn` cannot be called; when called: the target is no tensor.
    """

    def __init__(self, fn: Callable[[Any, Any], torch.Tensor], ignore_index: int = -100) -> None:
        super().__init__()
        if not callable(fn):
            raise UserError(
                f"PerTarget(fn={kind_of(fn)}): fn must be a function (output, target) -> mean over "
                "the targets"
            )
        self.fn, self.ignore_index = fn, ignore_index

    def mean(self, output: Any, target: Any) -> torch.Tensor:
        return self.fn(output, target)

    def forward(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        count = targets_counted(target, self.ignore_index, "PerTarget")
        # The mean over no target is 0 / 0. Where none counts, the loss is that of other targets,
        # times 0.
        target = torch.where(count > 0, target, 0 if self.ignore_index else 1)
        return _times(self.fn(output, target), count), count


class ModelLoss(Counted):
    """The loss that the model has computed itself: ``output.loss`` or ``output["loss"]``, as models
    of transformers give it.

    ``handle_batch`` returns the model's output and the targets that its loss is a mean over::

        class Runner(allhands.SupervisedRunner):
            def handle_batch(self, model, batch):
                return model(**batch), batch["labels"]

        Runner().train(criterion=allhands.ModelLoss(shift=True), …)  # a causal language model

    Args:
        over: what the loss is a mean over: "targets" that are not `ignore_index`, or "samples".
        ignore_index: the value of targets that do not count.
        shift: the first target of each sequence (dimension 1) does not count, as in causal language
            models, which predict ``labels[:, 1:]``.

    In evaluation, an output that is a list with a dict for each sample has no loss, as models of
    detection compute none there: the loader is then measured by its metrics alone.

    Raises:
        UserError: `over` is neither; when called: the output has no loss, or the target is no
            tensor.
    """

    takes_whole_output = True

    def __init__(
        self, over: str = "targets", ignore_index: int = -100, shift: bool = False
    ) -> None:
        super().__init__()
        if over not in ("targets", "samples"):
            raise UserError(f"ModelLoss(over={over!r}); it must be 'targets' or 'samples'")
        self.over, self.ignore_index, self.shift = over, ignore_index, shift
        self.pairs = over == "targets"

    def mean(self, output: Any, target: Any) -> torch.Tensor:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise UserError(
                f"ModelLoss: the output is {kind_of(output)} without a tensor output.loss or "
                "output['loss']; let handle_batch pass the labels to the model and return all that "
                "it gives, or pass a criterion of your own"
            )
        return loss

    def forward(self, output: Any, target: Any) -> Any:
        if is_samples(output) and not torch.is_grad_enabled():
            return None
        loss = self.mean(output, target)
        if not self.pairs:
            return loss
        count = targets_counted(target, self.ignore_index, "ModelLoss", self.shift)
        return _times(torch.where(count > 0, loss, 0.0), count), count


def output_advice(output: Any) -> str:
    """What to write where a tensor is needed and `output` is none."""
    names = [
        str(name)
        for name, value in (named_members(output) or {}).items()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    if not names:
        return "let handle_batch return the tensor"
    runner = f"SupervisedRunner(output_key={names[0]!r})"
    return f"write {runner}" + (
        f", or another of {', '.join(map(repr, names))}" if names[1:] else ""
    )


def targets_counted(target: Any, ignore_index: int, who: str, shift: bool = False) -> torch.Tensor:
    """How many targets are not `ignore_index`: float64 of shape []."""
    if not isinstance(target, torch.Tensor) or (shift and target.dim() < 2):
        what = (
            f"of shape {list(target.shape)}"
            if isinstance(target, torch.Tensor)
            else kind_of(target)
        )
        needed = "a tensor [batch, positions, …]" if shift else "a tensor"
        raise UserError(
            f"{who} counts the targets that are not {ignore_index}, and the target is {what}, not "
            f"{needed}; return it from handle_batch, as in `return model(**batch), "
            "batch['labels']`, or let your criterion return (sum, count)"
        )
    return ((target[:, 1:] if shift else target) != ignore_index).sum(dtype=torch.float64)


def batch_loss(criterion: Any) -> Any:
    """The criterion as it is called with batches that nobody else has a part of: it gives the
    mean."""
    return criterion.mean if isinstance(criterion, Counted) else criterion


def split_pair(value: tuple[Any, ...]) -> tuple[torch.Tensor, Any]:
    """The sum and the count of what a criterion returned as a pair.

    Raises:
        UserError: it is no tensor of shape [] and a number of at least 0.
    """
    total, count = value if len(value) == 2 else (None, -1)
    number = (
        count.numel() == 1 if isinstance(count, torch.Tensor) else isinstance(count, (int, float))
    )
    if not isinstance(total, torch.Tensor) or total.dim() != 0 or not number or float(count) < 0:
        raise UserError(
            f"the criterion returned a tuple of {', '.join(map(kind_of, value))}; it must return "
            "one number, the mean over the samples, or (sum, count): the sum of the losses, a "
            "tensor of shape [], and the number that they are divided by"
        )
    return total, count


def as_count(count: Any) -> Any:
    """A count that can be added up exactly."""
    return count.detach().reshape(()).double() if isinstance(count, torch.Tensor) else float(count)


class Weights:
    """Numbers as tensors on a device, in the format of the losses that they weigh.

    Args:
        device: of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self.dtype = torch.float64  # until the first loss shows its own
        self._device = device
        self._known: dict[float, torch.Tensor] = {}

    def __call__(self, value: float) -> torch.Tensor:
        weight = self._known.get(value)
        if weight is None:
            weight = torch.tensor(value, dtype=self.dtype, device=self._device)
            if len(self._known) < 64:  # two or three, unless batches are bucketed by size
                self._known[value] = weight
        return weight

    def cast(self, dtype: torch.dtype) -> None:
        """Losses are of this format; what is known stays on the device, since the next step may be
        captured, in which no number could be sent there."""
        self.dtype = dtype
        self._known = {value: weight.to(dtype) for value, weight in self._known.items()}


def scale_gradients(parameters: list[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply all gradients by a number, shape [], without reading it."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            # A DTensor's; a factor of all parts is one of the whole.
            local = getattr(gradient, "_local_tensor", gradient)
            groups.setdefault((local.device, local.dtype), []).append(local)
    with torch.no_grad():
        for (device, dtype), members in groups.items():
            own = factor.to(device, dtype)
            dense = [member for member in members if not member.is_sparse]
            if dense:
                torch._foreach_mul_(dense, own)
            for member in members:
                if member.is_sparse:
                    member.mul_(own)


def _times(mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The sum of losses, in float32 or wider."""
    wide = mean.float() if mean.dtype in (torch.float16, torch.bfloat16) else mean
    return wide * count.to(wide.dtype)
