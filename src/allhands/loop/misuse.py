"""Backward passes and updates that a loop does not see, found in its first iterations."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_gather_rows, all_gather_text
from allhands.compat import pytree
from allhands.data import rows_in
from allhands.errors import UserError

if TYPE_CHECKING:
    from allhands.loop.own_steps import OwnSteps

_ITERATIONS = 5  # looked at; hooks cost time in each step


class Misuse:
    """A context in which ``loss.backward()`` and ``optimizer.step()`` outside of `Loop.step` raise
    `UserError`, as gradients there would not be those of the global batch. So does a call of a
    model of which the strategy trains a copy.
    """

    def __init__(self, loop: OwnSteps) -> None:
        self.loop = loop
        #: A context in which the loop itself takes a step.
        self.within = _Within(self)
        self._hooks: list[Any] = []
        self._on_models: list[Any] = []  # which nobody should call
        self._first = 0  # iteration of this process
        self._entered = False

    def begin(self) -> None:
        """The next iterations are looked at, as those of a rank that begins now."""
        self._first = self.loop.global_step

    def __enter__(self) -> None:
        self._entered = True
        self.begin()
        self.follow()

    def take_off(self) -> None:
        """Look at nothing until `follow`."""
        self._remove()
        for hook in self._on_models:
            hook.remove()
        self._on_models.clear()

    def follow(self) -> None:
        """Look at the models and optimizers that the loop has now."""
        if not self._entered:
            return
        for name, model in self.loop.untrained.items():
            hook = _CallHook(self.loop, name)
            self._on_models += [one.register_forward_pre_hook(hook) for one in model.modules()]
        for name, group in self.loop.groups.items():
            if group.captured is not None or self._is_over:
                continue  # hooks are not captured
            part = f", optimizer={name!r}" if len(self.loop.groups) > 1 else ""
            if not group.strategy.takes_step:
                self._hooks.append(
                    group.optimizer.register_step_pre_hook(
                        _MisuseHook(self, "optimizer.step()", part)
                    )
                )
            first = next((p for p in group.model.parameters() if p.requires_grad), None)
            if first is not None:
                self._hooks.append(
                    first.register_post_accumulate_grad_hook(
                        _MisuseHook(self, "loss.backward()", part)
                    )
                )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered = False
        self.take_off()

    def agree(self, call: str) -> None:
        """Raise `UserError` where the ranks do not do the same, in the first iterations.

        Args:
            call: what this rank is about to do.
        """
        world = self.loop.world
        if world.world_size == 1 or self._is_over:
            return
        calls = self.loop.unit(lambda: all_gather_text(call, world))
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise UserError(
                    f"the ranks do not make the same calls: rank 0 is at {calls[0]}, and rank "
                    f"{rank} at {other}. Call loop.step on every rank, for the same batches, "
                    "without `if loop.main`"
                )

    def agree_on_rows(self, own: Any) -> None:
        """Raise `UserError` where ranks that have the same share of the samples were given other
        rows, in the first iterations.

        Args:
            own: tensors of this rank's own, or a tree of them.
        """
        loop = self.loop
        share, shares = loop.settings.strategy.place(loop.world)
        if shares == loop.world.world_size or self._is_over:
            return
        leaves = [leaf for leaf in pytree.tree_leaves(own) if isinstance(leaf, torch.Tensor)]
        sizes = [float(leaf.detach().double().abs().sum()) for leaf in leaves]
        mine = torch.tensor([[share, rows_in(own) or 0, sum(sizes)]], dtype=torch.float64)
        found = torch.cat(all_gather_rows(mine.to(loop.device), loop.world)).cpu()
        for rank, other in enumerate(found):
            first = int((found[:, 0] == other[0]).nonzero()[0])
            if not torch.allclose(found[first], other, rtol=1e-3, equal_nan=True):
                raise UserError(
                    f"ranks {first} and {rank} hold parts of one model, and were given other rows; "
                    "divide samples by loop.share(total), which gives both the same, and not by "
                    "loop.world.rank"
                )

    @property
    def _is_over(self) -> bool:
        """Whether the iterations that are looked at are over."""
        return self.loop.global_step >= self._first + _ITERATIONS

    def stepped(self) -> None:
        """The loop has taken a step."""
        if self._hooks and self._is_over:
            self._remove()

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Within:
    """Counts how often it was entered and not left."""

    def __init__(self, misuse: Misuse) -> None:
        self._misuse, self.depth = misuse, 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._misuse.stepped()


class _MisuseHook:
    def __init__(self, misuse: Misuse, call: str, part: str) -> None:
        self.misuse, self.call, self.part = misuse, call, part

    def __call__(self, *_: Any) -> None:
        if not self.misuse.within.depth:
            raise UserError(
                f"{self.call} was called outside of loop.step, where gradients are those of one "
                f"rank's samples; {self.misuse.loop.instead_of_passes.format(self.part)}"
            )


class _CallHook:
    def __init__(self, loop: OwnSteps, name: str) -> None:
        strategy = loop.settings.strategy.in_words()
        call = f"loop.models[{name!r}]" if loop.several else "loop.model"
        self.message = (
            f"the model that was given to allhands.Loop was called itself, and strategy "
            f"'{strategy}' trains parts of a copy of it; call {call}"
        )

    def __call__(self, *_: Any) -> None:
        raise UserError(self.message)
