"""What a criterion averages over, so that shares of any size can be put together exactly.

One optimizer step applies the gradient of (sum of losses over the global batch) / (its count). What
the count is depends on
the criterion: samples for most, counted targets for classification with `ignore_index` or class
weights, nothing (a factor
of one) for a criterion that sums. A criterion may also return the two itself, ``(sum, count)``.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from allhands.comm import all_gather_text
from allhands.errors import UserError, kind_of
from allhands.step.counted import Counted, output_advice
from allhands.step.mean_check import MeanCheck
from allhands.step.over_batch import OverBatch
from allhands.world import World

Criterion = Callable[[Any, Any], torch.Tensor]

# Criteria that compare element by element and would silently broadcast [32, 1] against [32] to [32,
# 32].
_ELEMENTWISE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
)
_ELEMENTWISE_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_COMPARED = 4  # samples


class NonFiniteLossError(UserError):
    """A training loss became NaN or infinite."""


class LossRule:
    """How to call the criterion on one micro-batch, and how its value counts.

    Attributes:
        call: the criterion; for `counts_targets` a version that sums instead of averaging, so that
            a micro-batch without any counted target gives 0 and not 0/0.
        sums: the criterion sums over its samples and is not divided by any count.
        counts_targets: the count is what `count_targets` gives, not the number of samples.
        pairs: the criterion returns ``(sum, count)``; None as long as only its first calls can
            tell, until `settle`.
        of_torch: the criterion is one of PyTorch's own.
        one_target_a_sample: no batch has other numbers of targets and samples.
        over_batch: the criterion is computed of the whole global batch at once.
        check: looks at these calls; None where nothing is to be found out.
        note: takes a line to print.
    """

    def __init__(self, criterion: Criterion) -> None:
        self.call = criterion
        # functools.partial(F.cross_entropy, ignore_index=0) counts what F.cross_entropy does with
        # that option.
        function, options = (
            (criterion.func, criterion.keywords)
            if isinstance(criterion, functools.partial)
            else (criterion, {})
        )
        self.elementwise = isinstance(function, _ELEMENTWISE) or function in _ELEMENTWISE_FUNCTIONS
        reduction = options.get("reduction", getattr(function, "reduction", "mean"))
        if reduction not in ("mean", "sum", "batchmean"):
            name = getattr(function, "__name__", type(function).__name__)
            raise UserError(
                f"the criterion {name} has reduction='{reduction}' and so returns one loss an "
                "element; write reduction='mean'"
            )
        self.sums = reduction == "sum"
        self.of_torch = _of_torch(function)
        self.counts_targets = False
        self._ignore_index = -100
        self._class_weights: torch.Tensor | None = None
        self._own_forward = False
        if isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)) and reduction == "mean":
            self.counts_targets = True
            self._ignore_index = criterion.ignore_index
            self._class_weights = criterion.weight
            self._own_forward = type(criterion).forward not in (
                nn.CrossEntropyLoss.forward,
                nn.NLLLoss.forward,
            )
            self.call = copy.copy(criterion)
            self.call.reduction = "sum"
        elif function in (F.cross_entropy, F.nll_loss) and reduction == "mean":
            self.counts_targets = True
            self._ignore_index = options.get("ignore_index", -100)
            self._class_weights = options.get("weight")
            self.call = _SumCriterion(criterion)
        self._sum_call, self.mean_call = self.call, criterion
        self.one_target_a_sample = False
        self.over_batch = isinstance(criterion, OverBatch)
        self.pairs: bool | None = None
        self._at_first: tuple[bool | None, Callable[[], MeanCheck]] | None = None
        if isinstance(criterion, Counted):
            self.pairs = criterion.pairs
        elif self.sums or self.counts_targets or self.of_torch:
            self.pairs = False
        self.check: MeanCheck | None = None
        if self.pairs is None:
            self.look_with(lambda: MeanCheck(criterion))
        self.note: Callable[[str], None] = lambda line: None

    def look_with(self, new_check: Callable[[], MeanCheck]) -> None:
        """Look at the first calls of the criterion."""
        self._at_first = self.pairs, new_check
        self.check = new_check()

    def cut_over(self, slices: Any) -> None:
        """Call the criterion on outputs that may be cut, as `Strategy.slices` gives it."""
        self.call = slices.loss_function(self.call)
        self.mean_call = slices.loss_function(self.mean_call)

    def leave_unchecked(self) -> None:
        """Find out nothing from calls of the criterion."""
        self.check = self._at_first = None

    def forget(self) -> None:
        """Find out again what calls of the criterion tell, as a rank that begins now does."""
        if self._at_first is not None:
            self.pairs, new_check = self._at_first
            self.check = new_check()

    def settle(self, seen: bool | None, divided: bool, world: World) -> None:
        """After a step or an evaluation: find out together whether the criterion gives pairs, and
        whether it is a mean.

        Args:
            seen: whether it has given pairs; None where it was not called.
            divided: a batch was computed in parts, by several ranks or in micro-batches.
            world: the ranks, which may each know something else.

        Raises:
            UserError: on all ranks: it is no mean over the samples, and the batch was divided.
        """
        check = self.check
        assert check is not None
        check.steps += 1
        own = [seen, check.found, check.waits, divided]
        said = [json.loads(text) for text in all_gather_text(json.dumps(own), world)]
        pairs = {one[0] for one in said} - {None}
        if len(pairs) > 1:
            raise UserError(
                "the criterion returned (sum, count) on some ranks and one number on others; let "
                "it return the pair"
            )
        found = [one[1] for one in said if one[1] is not None]
        waits, divided = any(one[2] for one in said), any(one[3] for one in said)
        if True not in pairs and any(found):
            (problem,) = [text for text in found if text][:1]
            if divided:
                raise UserError(problem)
            reason = problem.split(". ")[0]
            self.note(
                f"note: with accumulate or several workers this training would be refused: {reason}"
            )
        if True in pairs or found or not waits:
            self.pairs, self.check = True in pairs, None

    def use_samples_if_equal(self, targets: torch.Tensor | None) -> None:
        """Count samples instead of targets when the whole data set (`targets`) shows that it comes
        to the same thing.

        That spares one small collective a step."""
        if (
            self.counts_targets
            and self._class_weights is None
            and targets is not None
            and targets.dim()  # [samples, …], so that each has as many
            and not targets.is_floating_point()
            and not bool((targets == self._ignore_index).any())
        ):
            self.counts_targets = False
            self.call = self.mean_call

    def count_targets(self, targets: Sequence[Any]) -> torch.Tensor | None:
        """What each micro-batch counts, float64 of shape ``[len(targets)]``; None when there is no
        micro-batch.

        Class indices count one each, or their class weight, unless they are `ignore_index`; class
        probabilities of shape ``[batch, classes, …]`` count one a position, whatever the class
        weights, as the criterion itself does.
        """
        values = []
        for target in targets:
            if target.is_floating_point():
                positions = target.numel() / target.shape[1] if target.dim() > 1 else 1.0
                values.append(torch.tensor(positions, dtype=torch.float64, device=target.device))
                continue
            counted = target != self._ignore_index
            if self._class_weights is None:
                values.append(counted.sum(dtype=torch.float64))
            else:
                weights = self._class_weights.to(target.device, torch.float64)
                values.append(weights[target.clamp(0, len(weights) - 1)].mul(counted).sum())
        return torch.stack(values) if values else None

    def check_shapes(self, output: Any, target: Any, count: Any = None) -> bool:
        """Look at what the criterion is given.

        Args:
            output, target: of a micro-batch.
            count: its samples, where the batch is computed in several parts.

        Returns:
            Whether further ones need not be looked at.

        Raises:
            UserError: an elementwise criterion would broadcast its two arguments against each
                other, or is a mean over targets of which samples have different numbers; one of
                PyTorch's own is given an output that is no tensor.
        """
        if self.of_torch and not isinstance(output, torch.Tensor):
            name = getattr(self.mean_call, "__name__", type(self.mean_call).__name__)
            raise UserError(
                f"the criterion {name} takes a tensor, and the model's output is "
                f"{kind_of(output)}; {output_advice(output)}"
            )
        if (
            not self.elementwise
            or not isinstance(output, torch.Tensor)
            or not isinstance(target, torch.Tensor)
        ):
            return True
        if output.shape != target.shape:
            raise UserError(
                f"the model's output has shape {list(output.shape)} and the target "
                f"{list(target.shape)}; the criterion would silently compare every output with "
                "every target. Give both one shape, for example target.unsqueeze(1) or "
                "output.squeeze(1)"
            )
        rows = len(target) if target.dim() else 0
        if self.sums or not rows or not isinstance(count, int) or not count:
            return True
        if rows % count:
            name = getattr(self.mean_call, "__name__", type(self.mean_call).__name__)
            raise UserError(
                f"the criterion {name} is a mean over {rows} targets of {count} samples, which "
                "have different numbers of them (nodes of graphs, say), and a batch that is "
                "computed in parts would weigh samples; write allhands.PerTarget(…) around it, "
                "which weighs targets"
            )
        return self.one_target_a_sample

    def check_counts(self, output: Any, target: Any, loss: torch.Tensor) -> None:
        """Raise `UserError` when a class derived from a criterion that counts its targets does not
        average over them.

        Such a class with a ``forward`` of its own (a focal loss) may average over something else,
        or ignore ``reduction``.
        """
        if not self._own_forward:
            return
        some = self._some(output, target)
        if some is not None:
            output, target = some
        counted = self.count_targets([target])
        assert counted is not None
        if float(counted) == 0:
            return
        with torch.no_grad():
            mean = float(self.mean_call(output, target))
            known = some is None and self.counts_targets
            total = float(loss.detach() if known else self._sum_call(output, target))
        if abs(total - mean * float(counted)) > 1e-2 * abs(total) + 1e-6:
            own, base = type(self.mean_call).__name__, type(self.mean_call).__mro__[1].__name__
            raise UserError(
                f"the criterion {own} derives from {base}, but its value {mean:.6g} is not its "
                f"value with reduction='sum', {total:.6g}, divided by the {float(counted):g} "
                "targets that count. Let its forward honour self.reduction, or derive it from "
                "nn.Module when it is the mean over the samples"
            )

    def _some(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A few samples with targets that count, for what is compared once: a language model's
        output is among the largest
        tensors of a step. None: all of them."""
        if (
            type(output) is not torch.Tensor
            or type(target) is not torch.Tensor
            or len(output) != len(target)
        ):
            return None
        counted = self.count_targets([target[:_COMPARED]])
        # Of a single target the sum is the mean.
        return (
            None
            if counted is None or float(counted) < 2
            else (output[:_COMPARED].detach(), target[:_COMPARED])
        )

    @staticmethod
    def check_value(loss: Any) -> None:
        """Raise `UserError` unless the criterion gave one number."""
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            what = (
                f"shape {list(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else f"a {type(loss).__name__}"
            )
            raise UserError(
                f"the criterion returned {what}; it must return one number (a tensor of shape []), "
                "the mean over the batch: write reduction='mean', or end it with .mean()"
                + (
                    "; where a pair (sum, count) cannot be taken, as here, return sum / count"
                    if isinstance(loss, tuple)
                    else ""
                )
            )


def _of_torch(function: Any) -> bool:
    """Whether it is one of PyTorch's own losses, each of which is a mean over the samples, where
    nothing else is known of it."""
    module = getattr(function, "__module__", None) or ""
    return module.startswith(("torch.nn.", "torch._C._nn"))


class _SumCriterion:
    """A functional criterion, or a partial of one, called with ``reduction="sum"``; a class so that
    it pickles."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        return self.function(output, target, reduction="sum")
