"""BatchNorm over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from allhands.compat import BatchNormBase
from allhands.errors import UserError
from allhands.horovod import engine
from allhands.horovod.reduce_ops import Sum


class SyncBatchNorm(BatchNormBase):
    """BatchNorm whose mean and variance, in training, are those of all ranks' samples together,
    however many each has.

    On CPU and GPU (Horovod's needs a GPU); of any number of dimensions from 2 on. Arguments are
    those of torch.nn.BatchNorm2d. The ranks must call their layers in the same order. Variances are
    put together as in Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances" (1979).
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise UserError(
                f"SyncBatchNorm: the input has {input.dim()} dimension(s); it must have at least 2 "
                "(batch, channels, ...)"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalised input, of its shape."""
        self._check_input_dim(input)
        whole = self.training or (self.running_mean is None and self.running_var is None)
        if not whole or engine.current().world.world_size == 1:
            return super().forward(input)
        result, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if (
            self.training
            and self.track_running_stats
            and self.running_mean is not None
            and self.running_var is not None
        ):
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
                unbiased = variance * count / (count - 1).clamp(min=1)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)
        return result


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: Any, bias: Any, eps: float
    ) -> tuple[torch.Tensor, ...]:
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [dim for dim in range(input.dim()) if dim != 1]
        samples = input.numel() // input.shape[1]
        own = wide.new_full((1,), samples)
        if samples > 0:
            variance, mean = torch.var_mean(wide, dims, correction=0)
        else:
            variance = mean = wide.new_zeros(input.shape[1])
        table = torch.cat([own, mean, variance])[None].contiguous()
        (table,) = engine.current().allgather([table]).wait()
        counts = table[:, :1]
        means, variances = table[:, 1:].chunk(2, dim=1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / count
        scale = torch.rsqrt(variance + eps)
        shape = [1, -1] + [1] * (input.dim() - 2)
        normal = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.dims, ctx.shape, ctx.has_bias = dims, shape, bias is not None
        result = normal if weight is None else normal * weight.view(shape)
        result = result if bias is None else result + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return result.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        of_bias = grad.sum(ctx.dims)
        of_weight = (grad * normal).sum(ctx.dims)
        sums = torch.stack([of_bias, of_weight]).contiguous()
        (sums,) = engine.current().allreduce([sums], op=Sum).wait()
        mean_grad, mean_dot = (sums / count).unbind()
        factor = scale if weight is None else scale * weight
        inner = grad - mean_grad.view(ctx.shape) - normal * mean_dot.view(ctx.shape)
        of_input = (inner * factor.view(ctx.shape)).to(grads[0].dtype)
        return (
            of_input,
            of_weight if weight is not None else None,
            of_bias if ctx.has_bias else None,
            None,
        )


__all__ = ["SyncBatchNorm"]
