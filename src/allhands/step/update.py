"""Backward passes and updates without what PyTorch puts around them and nobody would see.

``loss.backward(weight)`` compares the two at length first, which takes 6 us. The profiler's label
around ``optimizer.step`` costs 25 to 35 us a step on a CPU, as much as a small model's forward
pass. What it wraps is the optimizer's own step, which is called directly unless a profiler runs or
somebody has registered step hooks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import optimizer as torch_optimizer

from allhands.compat import profiler_enabled, run_backward
from allhands.errors import UserError
from allhands.step.adam import adam_step

_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def set_mode(optimizer: torch.optim.Optimizer, training: bool) -> bool:
    """Switch an optimizer whose weights in training are not those of evaluation (schedule-free
    ones).

    Returns:
        Whether it has such modes, and so may have changed weights.
    """
    switch = getattr(optimizer, "train" if training else "eval", None)
    if not callable(switch):
        return False
    switch()
    return True


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user has replaced the `step` of this one optimizer. A schedule wraps it, too."""
    step = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        return getattr(step, "__wrapped__", None) is not type(optimizer).step
    return step is not None


def backward(loss: torch.Tensor, weight: torch.Tensor) -> None:
    """``loss.backward(weight)``, of two tensors of shape [] and one dtype."""
    if type(loss) is torch.Tensor:
        run_backward(
            (loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:  # it may have a way of its own
        loss.backward(weight)


def update_function(
    optimizer: torch.optim.Optimizer,
    same: Callable[[torch.optim.Optimizer], object] | None = None,
) -> Callable[[], object]:
    """A function that does what ``optimizer.step()`` does; by `same`, where that is given, which
    does the same in less time."""
    update = _unlabelled(optimizer, same)
    if type(optimizer).__module__.startswith("torch."):
        return update

    def explained() -> object:
        try:
            return update()
        except (AssertionError, TypeError, ValueError, RuntimeError) as error:
            if "closure" not in str(error) and "'NoneType' object is not callable" not in str(
                error
            ):
                raise
            kind = type(optimizer).__name__
            raise UserError(
                f"{kind}.step() ended with '{error}'. A closure is given to an optimizer whose "
                f"step cannot be called without one: write `class Own({kind})` with `def "
                "step(self, closure): return super().step(closure)`"
            ) from error

    return explained


def _unlabelled(
    optimizer: torch.optim.Optimizer, same: Callable[[torch.optim.Optimizer], object] | None
) -> Callable[[], object]:
    labelled = type(optimizer).step
    bare = getattr(labelled, "__wrapped__", None)
    if bare is None or not getattr(labelled, "hooked", False) or has_own_step(optimizer):
        return optimizer.step
    hooks = [
        getattr(owner, name, None)
        for owner, name in (
            (optimizer, "_optimizer_step_pre_hooks"),
            (optimizer, "_optimizer_step_post_hooks"),
            (torch_optimizer, "_global_optimizer_pre_hooks"),
            (torch_optimizer, "_global_optimizer_post_hooks"),
        )
    ]
    if any(hook is None for hook in hooks):  # a PyTorch that keeps its hooks elsewhere
        return optimizer.step
    before, after, before_any, after_any = hooks
    take = same or (adam_step(bare) if type(optimizer) in _ADAM else bare)

    def update() -> object:
        if before or after or before_any or after_any or profiler_enabled():
            return optimizer.step()
        return take(optimizer)

    return update
