"""Cross entropy over a vocabulary that is split over workers: no worker ever holds all logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from allhands.errors import UserError
from allhands.step.loss import Criterion


class SplitLoss:
    """A criterion, called with logits of which each worker has its own classes alone.

    ``F.cross_entropy`` in it (and so `torch.nn.CrossEntropyLoss`) is computed from each worker's
    own logits and two small all-reduces, for any number of classes, with `ignore_index`, class
    weights and label smoothing. Megatron-LM's way (Shoeybi et al., Megatron-LM: Training
    Multi-Billion Parameter Language Models Using Model Parallelism, 2019).

    Raises:
        UserError: when called: the criterion does not call cross_entropy, or with what cannot be
            split.
    """

    def __init__(self, call: Criterion) -> None:
        self.call = call

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        with _SplitCrossEntropy() as split:
            loss = self.call(output, target)
        if not split.used:
            raise UserError(
                "loss_parallel=True is for a criterion that calls cross_entropy with the model's "
                "logits, such as torch.nn.CrossEntropyLoss(); set loss_parallel=False"
            )
        return loss


class _SplitCrossEntropy(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        logits = args[0] if args else options.get("input")
        if func is F.cross_entropy and isinstance(logits, DTensor):
            self.used = True
            return _cross_entropy(*args, **options)
        return func(*args, **options)


def _cross_entropy(
    input: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """What `torch.nn.functional.cross_entropy` gives, from logits ``[M, C]`` or ``[N, C, …]`` split
    over C."""
    if size_average is not None or reduce is not None:
        raise UserError(
            "loss_parallel: size_average and reduce are PyTorch's old names; write reduction='sum' "
            "or 'mean'"
        )
    class_dim = 1 if input.dim() > 1 else 0
    if input.device_mesh.ndim != 1 or not input.placements[0].is_shard(class_dim):
        raise UserError(
            f"loss_parallel: cross_entropy got logits of shape {list(input.shape)} that are not "
            f"split along their classes, dimension {class_dim}; pass the model's own logits, or "
            "set loss_parallel=False"
        )
    if isinstance(target, DTensor):
        target = target.full_tensor()
    if target.is_floating_point():
        raise UserError(
            "loss_parallel: targets that are probabilities need all logits in one place; set "
            "loss_parallel=False"
        )
    mesh, classes = input.device_mesh, input.shape[class_dim]
    if not target.is_cuda and bool(
        ((target < 0) | (target >= classes)).logical_and(target != ignore_index).any()
    ):
        raise IndexError(
            f"a target is not from 0 to {classes - 1}, the classes of the logits, nor "
            f"ignore_index={ignore_index}"
        )
    rows = input.to_local().movedim(class_dim, -1)
    first = min(mesh.get_local_rank() * -(-classes // mesh.size()), classes)
    losses, counted = _Losses.apply(
        rows.reshape(-1, rows.shape[-1]),
        target.reshape(-1),
        first,
        classes,
        weight,
        ignore_index,
        label_smoothing,
        mesh.get_group(),
    )
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _Losses(torch.autograd.Function):
    """The loss of each position, float32 or wider, and what it counts in the mean."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        first: int,
        classes: int,
        weight: torch.Tensor | None,
        ignore_index: int,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, ctx.form = logits.shape[1], logits.dtype
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        form = logits.dtype
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits - largest.unsqueeze(1)
        here = target - first
        inside = (here >= 0) & (here < own)
        here = here.clamp(0, own - 1).unsqueeze(1)
        sums = [shifted.gather(1, here).squeeze(1).where(inside, 0.0)]
        own_weight = None if weight is None else weight[first : first + own].to(form)
        if smoothing:
            sums.append((shifted if own_weight is None else shifted * own_weight).sum(1))
        exponentials = shifted.exp_()  # in its place: this is as large as the logits
        total = torch.stack([*sums, exponentials.sum(1)])
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        log_sum = total[-1].log()
        valid = (target != ignore_index).to(form)
        counted = valid if weight is None else weight.to(form)[target.clamp(0, classes - 1)] * valid
        losses = (log_sum - total[0]) * counted
        ctx.slope, share = counted, valid * (smoothing / classes)
        if smoothing:
            all_weights = classes if weight is None else weight.to(form).sum()
            losses = (1 - smoothing) * losses + share * (all_weights * log_sum - total[1])
            ctx.slope = (1 - smoothing) * counted + share * all_weights
        # A GPU does not look at each target; one that no class has must not pass for a loss.
        losses = losses.masked_fill(
            ((target < 0) | (target >= classes)) & (target != ignore_index), float("nan")
        )
        ctx.taken, ctx.smoothed = (1 - smoothing) * counted * inside, share if smoothing else None
        ctx.own_weight = own_weight
        ctx.save_for_backward(exponentials.div_(total[-1].unsqueeze(1)), here)
        ctx.mark_non_differentiable(counted)
        return losses, counted

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor, _: Any) -> tuple[Any, ...]:
        probabilities, here = ctx.saved_tensors
        gradient = probabilities * (ctx.slope * given).unsqueeze(1)
        gradient.scatter_add_(1, here, -(ctx.taken * given).unsqueeze(1))
        if ctx.smoothed is not None:
            even = (ctx.smoothed * given).unsqueeze(1)
            gradient -= even if ctx.own_weight is None else even * ctx.own_weight
        return gradient.to(ctx.form), *(None,) * 7
