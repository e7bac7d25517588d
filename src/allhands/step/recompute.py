"""Layers that are computed again in the backward pass instead of keeping what they computed
(activation checkpointing).

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; by ``torch.utils.checkpoint``,
without reentrant autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allhands.compat import BatchNormBase
from allhands.errors import UserError
from allhands.step.guards import capturing
from allhands.step.modes import forwards_kept


@contextmanager
def recomputed(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    """Within, calls of these modules, given with their names, keep their inputs alone until the
    backward pass.

    Random draws are the same both times, and running statistics of BatchNorm change once.

    Raises:
        UserError: from a call: the module changes a buffer of another kind, and so could not be
            computed again.
    """
    with forwards_kept(module for _, module in modules):
        for name, module in modules:
            recompute(name, module)
        yield


def recompute(name: str, module: nn.Module) -> None:
    """Have calls of a module keep their inputs alone until the backward pass, from now on; see
    `recomputed`.

    Its hooks, and those of fully_shard, run around it and once; those of modules inside it run
    again.
    """
    module.forward = _Again(name, module)


class _Again:
    """A module's forward function. Plain attributes, so that a copy of the module calls the
    copy."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module, self.forward = name, module, module.forward
        self.norms = [
            norm
            for norm in module.modules()
            if isinstance(norm, BatchNormBase) and norm.track_running_stats
        ]
        known = {id(buffer) for norm in self.norms for buffer in norm.buffers()}
        self.buffers = [name for name, buffer in module.named_buffers() if id(buffer) not in known]
        self.looked = not self.buffers
        self.draws = False  # a call in training has drawn from the GPU's random generator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        keeps = torch.compiler.is_compiling() or not capturing()
        if not keeps and self.draws:
            raise RuntimeError(
                f"activation_checkpointing computes '{self.name}' again, and that draws the same "
                "random numbers by a state that is kept on the host"
            )
        return checkpoint(
            _Passes(self).take, *args, use_reentrant=False, preserve_rng_state=keeps, **kwargs
        )

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """BatchNorm computes with the batch's own statistics, as the first time, and leaves the
        running ones alone."""
        before = [(norm, dict(norm._buffers)) for norm in self.norms if norm.training]
        for norm, buffers in before:
            norm._buffers.update(
                {
                    name: None if buffer is None else buffer.clone()
                    for name, buffer in buffers.items()
                }
            )
        try:
            yield
        finally:
            for norm, buffers in before:
                norm._buffers.update(buffers)

    def look(self, *args: Any, **kwargs: Any) -> Any:
        """One of the first calls, up to one in training: see that it changes no buffer."""
        self.looked = self.module.training
        before = {name: self.module.get_buffer(name).clone() for name in self.buffers}
        output = self.forward(*args, **kwargs)
        for name, value in before.items():
            if not torch.equal(self.module.get_buffer(name), value):
                raise UserError(
                    f"'{self.name}' changes its buffer '{name}' in its forward pass, and would "
                    "change it once more when it is "
                    "computed again; leave it out of activation_checkpointing"
                )
        return output


class _Passes:
    """One call of a module, and its repetition."""

    def __init__(self, again: _Again) -> None:
        self.again, self.passed = again, False

    def take(self, *args: Any, **kwargs: Any) -> Any:
        again = self.again
        # What is compiled changes buffers once, whatever of it is computed again.
        if torch.compiler.is_compiling():
            return again.forward(*args, **kwargs)
        if self.passed:
            with again.quiet():
                return again.forward(*args, **kwargs)
        self.passed = True
        before = _draws()
        output = again.forward(*args, **kwargs) if again.looked else again.look(*args, **kwargs)
        again.draws = again.draws or _draws() != before
        return output


def _draws() -> int:
    """How far the GPU's random generator has come; 0 while a step is captured, or without a
    GPU."""
    if not torch.cuda.is_initialized() or capturing():
        return 0
    return torch.cuda.default_generators[torch.cuda.current_device()].get_offset()
