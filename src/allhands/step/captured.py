"""Optimizer steps that are captured in a CUDA graph once and replayed, so that nobody asks for each
kernel again.

A step of a small model takes a GPU less time than Python takes to ask for it. What is captured is
the whole of it: forward and backward passes of all micro-batches, the exchange between workers,
clipping and the optimizer's update. Batches are copied to where the captured step reads them;
losses and outputs are observed after each replay, as they are after an eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from allhands.compat import pytree
from allhands.errors import UserError
from allhands.step.capturable import Capturable
from allhands.step.compile_check import local_part, losses_and_gradients
from allhands.step.compile_choice import CompileChoice
from allhands.step.cuda_graphs import Capture, CudaGraphs
from allhands.step.exchange import Count
from allhands.step.guards import HostState, hooked, waits_noted, where_raised
from allhands.step.optimizer_step import Observer, OptimizerStep
from allhands.world.abort import aborted_error, aborted_group, reset_at_abort

STEPS = ("auto", "eager", "compile", "graph")
# steps of a shape before the one that is looked at: libraries set themselves up in the first ones
_EAGER = 2
# Shapes that are captured; more of them mean that nearly every step has a shape of its own.
_GRAPHS = 8


def cannot_capture(reason: str) -> UserError:
    """The error where ``step="graph"`` was asked for; `reason` is the end of a sentence."""
    return UserError(
        f"step='graph': the step cannot be captured, since {reason}; change that, or write "
        "step='auto'"
    )


class CapturedSteps:
    """Takes optimizer steps, from a CUDA graph where there is one for the micro-batches' shapes.

    The first two steps of a shape are eager. In the third, waits for the device and what the step
    changes on the host (plain attributes of modules, Python's, NumPy's and PyTorch's random
    generators) are looked for: a replay would do neither. From then on the shape is captured. A
    step that cannot be is taken eagerly, as are all that follow, and the reason is said once.

    With several workers the exchange is part of the graph. Each rank captures for itself: captured
    or eager, a step asks for the same collectives in the same order, and the optimizer's update
    rounds alike, so that the ranks' weights stay equal. Where something is done on the host before
    the update (`OptimizerStep.before_update`), the step is captured in two parts.

    Args:
        module: the model.
        criterion: the loss.
        optimizer: which updates the model's parameters.
        device: of all of them.
        outputs: what who observes a step does with outputs and targets: they are "kept", for
            metrics, and are copied then; "read"; or "unread", and are freed in the backward pass.
        shows: gradients are looked at after a step, so that they have to lie in the parameters.
        insist: raise `UserError` instead of going on eagerly.
        say: takes a line to print.
        capture: how a step is captured; None: in a CUDA graph.
    """

    def __init__(
        self,
        module: nn.Module,
        criterion: Any,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        outputs: str,
        shows: bool,
        insist: bool,
        say: Callable[[str], None],
        capture: Capture | None = None,
    ) -> None:
        self.module, self.criterion, self.device = module, criterion, device
        self.outputs, self.shows, self.insist, self.say = outputs, shows, insist, say
        self.optimizer = Capturable(optimizer, device)
        self.reason: str | None = None
        #: Whether the model is to be compiled meanwhile.
        self.choice: CompileChoice | None = None
        self._waits: str | None = None  # the reason, where compiled steps may not have it
        self._capture = capture or CudaGraphs(device)
        self._is_aborted = aborted_group()
        self._captured: dict[Any, _CapturedStep] = {}
        self._eager: dict[Any, int] = {}
        self._taken: dict[
            Any, OptimizerStep
        ] = {}  # the step object that has taken this shape eagerly before
        self._good: set[Any] = set()  # shapes that have been looked at
        self._form: Any = None
        self._adapts = True  # the optimizer updates in the way that can be captured
        self._unfit(self.optimizer.look())

    def begin(self) -> None:
        """The weights and the optimizer's state are those that the training begins or goes on
        with."""
        if self._adapts:
            self.optimizer.begin()

    def finish(self) -> None:
        """The training has ended, or its group is left: the optimizer is as the user made it."""
        self._release()
        self.optimizer.finish()

    def look(self) -> None:
        """What graphs hold by address or by value may have changed: where it has, forget them. To
        be called when code of the user's has run between two steps."""
        if self._adapts:
            self._unfit(self.optimizer.look())
        if self.reason is not None:
            return
        refusal = None if self.insist else hooked(self.module)
        if refusal is not None:
            self._give_up(refusal)
            return
        flags = (
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.benchmark,
        )
        form = (
            [(_address(p), p.requires_grad) for p in self.module.parameters()],
            [module.training for module in self.module.modules()],
            flags,
        )
        if form != self._form:
            self._form = form
            self._forget()

    def __call__(
        self,
        take: OptimizerStep,
        batches: Sequence[Any],
        counts: Sequence[int],
        total: int,
        idle: bool,
    ) -> None:
        """Take the step that ``take(batches, counts, total, idle)`` takes."""
        replayed = self._take(take, batches, counts, total, idle)
        if self.choice is None:
            return
        # Compiled steps that have to be eager are not what is looked for.
        eager = self._waits is not None and not self.choice.active
        if self.choice.step_taken(
            replayed or eager, partial(self._found, take, batches, counts, total)
        ):
            self.reason = None if self.choice.active else self._waits
            self._forget()

    def _take(self, take: OptimizerStep, batches: Sequence[Any], *step: Any) -> bool:
        """Take the step, of which `step` has the further arguments; whether it was replayed."""
        if not self._adapts:
            take(batches, *step)
            return False
        if self.optimizer.changed():
            self._forget()
        compiled = self.choice is not None and self.choice.active
        if self.reason is not None and not compiled:
            return self._take_eagerly(take, batches, *step)
        leaves, tree = pytree.tree_flatten(batches)
        counts, total, idle = step
        key = (tree, tuple(_form_of(leaf) for leaf in leaves), tuple(counts), total, idle)
        captured = self._captured.get(key)
        if self.choice is not None and captured is None:
            found = partial(self._found, take, batches, counts, total)
            if self.choice.shape_fails(key, found):
                self.reason = self._waits
                self._forget()
        if self.reason is not None:
            return self._take_eagerly(take, batches, *step)
        if captured is not None:
            with take.label("captured step"):
                captured.replay(take, leaves)
            return True
        seen = self._eager[key] = self._eager.get(key, 0) + 1
        with self.optimizer.capturable(), self._capture_stream():
            leaves = [_on(leaf, self.device) for leaf in leaves]
            batches = pytree.tree_unflatten(leaves, tree)
            if seen <= _EAGER or self._taken.get(key) is not take:
                # In a new epoch by a new object: what it makes once is not for a graph.
                take(batches, *step)
            elif key not in self._good:
                self._looked_at(take, batches, *step)
                self._good.add(key)
            else:
                captured = self._capture_step(take, leaves, tree, *step)
        self._taken[key] = take
        if captured is not None:
            self._captured[key] = captured
            captured.replay(take, leaves)
        return False

    def _take_eagerly(self, take: OptimizerStep, *step: Any) -> bool:
        with self.optimizer.capturable():
            take(*step)
        return False

    # ------------------------------------------------------------------ trying

    def _found(
        self,
        take: OptimizerStep,
        batches: Sequence[Any],
        counts: Sequence[int],
        total: int,
        rounded: bool,
    ) -> list[torch.Tensor]:
        """The losses and gradients of a step, which is not taken."""
        leaves, tree = pytree.tree_flatten(batches)
        with self._capture_stream():
            there = pytree.tree_unflatten([_on(leaf, self.device) for leaf in leaves], tree)
            modules = [self.module, self.criterion]
            return losses_and_gradients(take, modules, there, counts, total, rounded)

    def _looked_at(self, take: OptimizerStep, *step: Any) -> None:
        """An eager step in which whatever could not be captured is found; it counts as any other,
        and is taken once only, since other ranks take it too."""
        host = HostState(self.module, self.criterion)
        observed: list[tuple[Any, ...]] = []
        observe, before_update = take.observe, take.before_update

        def tell() -> None:
            for values in observed:
                observe(*values)
            observed.clear()

        def between_parts() -> None:
            assert before_update is not None
            known = len(waits)
            tell()
            before_update()
            del waits[known:]

        take.observe = _notes_in(observed, self.outputs)
        take.before_update = None if before_update is None else between_parts
        try:
            with waits_noted(self.device) as waits:
                take(*step)
        finally:
            take.observe, take.before_update = observe, before_update
        tell()
        if waits:
            self._give_up(f"it waits for the device at {waits[0]}", of_model=True)
        elif (changed := host.changed()) is not None:
            self._give_up(changed)

    def _capture_step(
        self, take: OptimizerStep, leaves: list[Any], tree: Any, *step: Any
    ) -> _CapturedStep | None:
        """Record a step, or take it eagerly."""
        if len(self._captured) >= _GRAPHS:
            self._give_up(f"its micro-batches have more than {_GRAPHS} shapes")
            take(pytree.tree_unflatten(leaves, tree), *step)
            return None
        try:
            captured = _CapturedStep(
                take, leaves, tree, step, self._capture, self.device, self.outputs, self.shows
            )
        except RuntimeError as error:
            if self._is_aborted is not None and self._is_aborted():
                raise  # a worker is lost, and it is not the step's fault
            what = (
                "the GPU's memory is too small for it"
                if isinstance(error, torch.cuda.OutOfMemoryError)
                else str(error)
            )
            self._give_up(f"{what.splitlines()[0]}, at {where_raised(error)}")
            take(pytree.tree_unflatten(leaves, tree), *step)
            return None
        if self._is_aborted is not None:
            reset_at_abort(captured)
            if self._is_aborted():
                raise aborted_error()
        if not self._captured:
            self.say("step: captured in a CUDA graph, and replayed from here on")
        return captured

    def _give_up(self, reason: str, of_model: bool = False) -> None:
        """Take steps eagerly from here on; `of_model`: if it is compiled, it may do otherwise."""
        if self.insist:
            raise cannot_capture(reason)
        self.reason = reason
        self._release()
        if self.choice is not None and self.choice.active:
            return  # it is taken back soon, and then says why
        if of_model:
            self._waits = reason
        self.say(f"step: eager, since {reason}")

    def _unfit(self, refusal: str | None) -> None:
        """The optimizer cannot be captured."""
        if refusal is not None:
            self._adapts = False
            self.optimizer.finish()
            if self.reason is None:
                self._give_up(refusal)

    def _release(self) -> None:
        for captured in self._captured.values():
            captured.reset()
        self._captured.clear()

    def _forget(self) -> None:
        self._release()
        self._eager.clear()
        self._taken.clear()
        self._good.clear()

    def _capture_stream(self) -> Any:
        """Eager steps run on the stream on which steps are captured: autograd keeps to the one on
        which it has seen a weight."""
        return self._capture.alongside() if isinstance(self._capture, CudaGraphs) else nullcontext()


class _CapturedStep:
    """One captured step, with the memory that it reads and writes.

    Args:
        take: the step that is captured; kept, since the graph reads tensors of its own.
        leaves, tree: its micro-batches, flattened.
        step: the further arguments of the step.
        capture: see `Capture`.
        device: where the graph reads.
        outputs, shows: see `CapturedSteps`.
    """

    def __init__(
        self,
        take: OptimizerStep,
        leaves: list[Any],
        tree: Any,
        step: tuple[Any, ...],
        capture: Capture,
        device: torch.device,
        outputs: str,
        shows: bool,
    ) -> None:
        self._own, self._keeps = take, outputs == "kept"
        # Of who observes the replay.
        self._observe, self._before_update = take.observe, take.before_update
        static = [
            torch.empty_like(leaf, device=device).copy_(leaf)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        self._inputs = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
        self._observed: list[tuple[Any, ...]] = []
        self._counted: Count = 0.0
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._in_parts = take.before_update is not None
        batches = pytree.tree_unflatten(static, tree)

        def note_gradients() -> None:
            self._gradients = [(p, p.grad) for p in take.parameters]

        def function(cut: Callable[[], None]) -> None:
            def end_part() -> None:
                note_gradients()
                cut()

            self._observed.clear()
            observe, before_update = take.observe, take.before_update
            take.observe = _notes_in(self._observed, outputs)
            take.before_update = end_part if self._in_parts else None
            try:
                self._counted = take.compute(batches, *step)
            finally:
                take.observe, take.before_update = observe, before_update
            if shows:
                note_gradients()

        self._graphs = capture(function, self._between_parts)

    def replay(self, take: OptimizerStep, leaves: list[Any]) -> None:
        """Take the captured step with other micro-batches of the same shapes; `take` is who
        observes it."""
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        torch._foreach_copy_(self._inputs, given, non_blocking=True)
        self._observe, self._before_update = take.observe, take.before_update
        self._graphs.replay()
        if not self._in_parts:
            self._tell()
        if take.exchange.after_step is not None:
            take.exchange.after_step(self._counted)

    def reset(self) -> None:
        """Let go of what was captured, whoever still holds this object."""
        self._graphs.reset()

    def _between_parts(self) -> None:
        """The gradients are whole: do on the host what comes before the update."""
        self._tell()
        assert self._before_update is not None
        self._before_update()

    def _tell(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # an eager step of another shape has left its own there
        for output, target, *measured in self._observed:
            if self._keeps:  # the next replay overwrites what this one gives
                self._observe(_copy(output), _copy(target), *measured)
            else:
                self._observe(output, target, *measured)


def _notes_in(observed: list[tuple[Any, ...]], outputs: str) -> Observer:
    """Notes what a step tells, to be told after it."""

    def note(output: Any, target: Any, *measured: Any) -> None:
        observed.append((*((None, None) if outputs == "unread" else (output, target)), *measured))

    return note


def _address(parameter: Any) -> int:
    """Where the values of a parameter lie, or this rank's part of them."""
    return local_part(parameter).data_ptr()


def _on(leaf: Any, device: torch.device) -> Any:
    """A copy on the device that begins where memory is allocated, as what a graph reads does: the
    last bit of a product depends on that."""
    return leaf.to(device, non_blocking=True, copy=True) if isinstance(leaf, torch.Tensor) else leaf


def _copy(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value
    )


def _form_of(leaf: Any) -> Any:
    """What must be the same for a graph to serve: of a tensor its form, of anything else
    itself."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.stride()
    return leaf if isinstance(leaf, (int, float, str, bool, bytes, type(None))) else id(leaf)
