"""What a step of Catalyst's calls: an engine, and an optimizer that takes the loop's steps."""

from __future__ import annotations

from typing import Any

import torch

from allhands.catalyst.hand_steps import HandSteps
from allhands.errors import UserError

_INSTEAD = {
    "clip_grad_norm_": "train(clip_norm=…)",
    "clip_grad_value_": "allhands.clip_grad_value(optimizer, …) before train()",
    "autocast": "train(precision='bf16'), which does it",
    **dict.fromkeys(
        ("prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "init_process"),
        "nothing: train() does it",
    ),
    **dict.fromkeys(
        ("gather", "reduce", "sync_metrics", "mean_reduce_ddp_metrics"),
        "self.batch_metrics[…] = a mean over the batch, which is averaged over all workers",
    ),
    **dict.fromkeys(
        ("save_checkpoint", "load_checkpoint"), "train(logdir=…) and allhands.load_checkpoint"
    ),
}


class BatchEngine:
    """Where a training computes, and its backward passes.

    Args:
        device: of the training.
        loop: the training; None outside of one.

    Attributes:
        device: as it was given.
        is_main_process, process_index, num_processes: of this process among all.
    """

    def __init__(self, device: torch.device, loop: HandSteps | None = None) -> None:
        self.device, self._loop = device, loop
        world = None if loop is None else loop.world
        self.process_index = 0 if world is None else world.rank
        self.num_processes = 1 if world is None else world.world_size
        self.is_main_process = self.process_index == 0

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss, the mean over the samples of the batch.

        Raises:
            UserError: there is no training, or its strategy takes part in the passes.
        """
        if self._loop is None:
            raise UserError("engine.backward(loss) is for handle_batch, while train() runs")
        self._loop.add_gradients(loss)

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise UserError(f"engine.{name} is not here; write {_INSTEAD[name]}")
        raise AttributeError(f"'BatchEngine' object has no attribute {name!r}")


class SteppingOptimizer:
    """The optimizer of a training: ``step()`` exchanges gradients first. All else is the
    optimizer's own.

    Args:
        loop: the training.
        name: of the optimizer in it.
    """

    def __init__(self, loop: HandSteps, name: str) -> None:
        self._loop, self._name = loop, name

    def step(self) -> None:
        """Take the step with the gradients of all workers."""
        self._loop.take_step(self._name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        del set_to_none
        self._loop.clear_gradients(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop.groups[self._name].optimizer, name)
