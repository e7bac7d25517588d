"""Whether ``step="auto"`` has a model compiled while it trains: where the steps that are left are
expected to save more than compiling takes."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from allhands.comm import all_gather_text, calls
from allhands.step.compile_check import relative_gaps
from allhands.step.compiled import is_compilers, message_of
from allhands.step.guards import where_raised
from allhands.world import World

_WINDOW = 20  # steps whose times are compared
_DECIDES = 40  # steps of a process before it is decided, and before what was tried is looked at
# The part of a step's time that compiling is expected to save: of captured steps of BERT,
# ResNet-50 and ViT-S on an H200, 0.26 to 0.37 were measured.
_SAVES = 0.25
_MARGIN = 2.0  # so many times what compiling takes must be saved
_COMPILES = 15.0, 0.5  # seconds, of a model and of each of its layers
# How far losses and gradients of the compiled model may differ from those of the model as it is: so
# far, or so many times as far as those of weights that are rounded otherwise.
_ALLOWED, _ROUNDING = 0.01, 5.0
_FASTER = 0.97  # of the time before, at most, or what was tried is taken back

#: Gives the losses and gradients of a step, which is not taken; of weights that are rounded
#: otherwise, where that is asked for.
Found = Callable[[bool], list[torch.Tensor]]


class CompileChoice:
    """Measures the steps of a training, tries them compiled where that is expected to pay, and
    takes that back where it does not, or where their gradients are others.

    What is expected: ``left * seconds * 0.25 >= 2 * (15 + 0.5 * layers)``, with the steps that are
    left, the median seconds of the last ones, and the model's layers that have weights. All ranks
    decide together, at the same step.

    Args:
        compiled: makes the context in which the model is compiled.
        layers: modules with weights of their own.
        left: the optimizer steps that are left; None where nobody knows.
        world: the ranks.
        say: takes a line to print.
        able: this rank has a compiler.
    """

    def __init__(
        self,
        compiled: Callable[[], AbstractContextManager[Any]],
        layers: int,
        left: Callable[[], int | None],
        world: World,
        say: Callable[[str], None],
        able: bool = True,
    ) -> None:
        self._compiled, self._left, self._world, self._say = compiled, left, world, say
        self._takes = _COMPILES[0] + _COMPILES[1] * layers
        self._able = able
        self._times = StepTimes(world.device)
        self._active: AbstractContextManager[Any] | None = None
        self._taken, self._next = 0, float(_DECIDES)
        self._before = 0.0
        #: Of steps whose compiled passes were tried, and of the last one.
        self._shapes: set[Any] = set()
        self._shape: Any = None

    def __enter__(self) -> CompileChoice:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.active and error is not None and is_compilers(error):
            error.add_note(
                "allhands: step='auto' had the model compiled; step='graph' or 'eager' never does"
            )
        self._leave()

    @property
    def active(self) -> bool:
        """Whether the model is compiled."""
        return self._active is not None

    def begin(self) -> None:
        """The model is compiled from the start, as it was when the training was interrupted."""
        self._enter()
        self._next = math.inf

    def shape_fails(self, shape: Any, found: Found) -> bool:
        """Whether the model is compiled no longer, as its passes in the step to come fail.

        Each shape is compiled for itself, so that the first step of each is tried. Several ranks
        need not see a shape at the same step, and cannot agree then: they try the first one after
        `begin` alone.

        Args:
            shape: of the step.
            found: gives its losses and gradients.
        """
        self._shape = shape
        if not self.active or shape in self._shapes:
            return False
        tries = self._world.world_size == 1 or not self._shapes
        self._shapes.add(shape)
        refusal = self._agreed(lambda: self._passes(found)) if tries else None
        if refusal is not None:
            self._take_back(refusal)
        return refusal is not None

    def step_taken(self, counts: bool, found: Found) -> bool:
        """A step is taken.

        Args:
            counts: it was of the kind that most steps are.
            found: gives the losses and gradients of such a step; see `losses_and_gradients`.

        Returns:
            Whether the model is compiled, or no longer, from here on.
        """
        self._taken += 1
        if counts:
            self._times.mark()
        else:
            self._times.restart()
        if self._taken < self._next:
            return False
        return self._judge() if self.active else self._decide(found)

    def _decide(self, found: Found) -> bool:
        self._next = math.inf
        seconds, left = self._slowest(), self._left()
        if seconds is None or left is None or left * seconds * _SAVES < _MARGIN * self._takes:
            return False
        self._before, self._next = seconds, self._taken + _DECIDES
        self._say(
            f"step: {left:,} steps of {1000 * seconds:.3g} ms are left, so that torch.compile is "
            f"tried (about {self._takes:.0f} s); step='graph' or 'eager' never compiles"
        )
        refusal = self._agreed(lambda: self._differs(found))
        if refusal is None:
            self._shapes = {self._shape}
            return True
        self._take_back(refusal)
        return False

    def _take_back(self, refusal: str) -> None:
        self._next = math.inf
        self._say(f"step: compiled no longer, since {refusal}")
        self._leave()

    def _passes(self, found: Found) -> str:
        found(False)
        return ""

    def _differs(self, found: Found) -> str:
        """Have the model compiled; in what it gives something else then, "" where in nothing."""
        plain = found(False)
        rounding = relative_gaps(plain, found(True))
        self._enter()
        refusal = ""
        for what, gap in relative_gaps(plain, found(False)).items():
            allowed = max(_ALLOWED, _ROUNDING * rounding[what])
            if not gap <= allowed:
                refusal = (
                    f"its {what} differ by {gap:.2g} of their norm then, and rounding explains "
                    f"{allowed:.2g}"
                )
        return refusal

    def _agreed(self, look: Callable[[], Any]) -> str | None:
        """Why the model is not to stay compiled, on all ranks alike.

        A wrong result, an error of the compiler and a want of memory show here, where no step
        depends on them.

        Args:
            look: says why, or fails; empty where nothing is wrong.
        """
        try:
            refusal = look() or ""
        except Exception as error:  # whatever it is, the training goes on without
            refusal = (
                f"it fails: {type(error).__name__}: {message_of(error)}, at {where_raised(error)}"
            )
        calls.note("comparing the compiled model with the model as it is")
        return next(filter(None, all_gather_text(refusal, self._world)), None)

    def _judge(self) -> bool:
        self._next = math.inf
        seconds = self._slowest()
        if seconds is not None and seconds < _FASTER * self._before:
            self._say(
                f"step: compiled, {1000 * seconds:.3g} ms in place of {1000 * self._before:.3g}"
            )
            return False
        said = "cannot be captured" if seconds is None else f"take {1000 * seconds:.3g} ms"
        self._say(
            f"step: compiled no longer, since such steps {said}; before, they took "
            f"{1000 * self._before:.3g}"
        )
        self._leave()
        return True

    def _slowest(self) -> float | None:
        """The seconds of a step on the slowest rank; None where one of them cannot tell."""
        calls.note("comparing the seconds of a step")
        own = self._times.median() if self._able else None
        told = [json.loads(text) for text in all_gather_text(json.dumps(own), self._world)]
        return None if None in told else max(told)

    def _enter(self) -> None:
        self._active = self._compiled()
        self._active.__enter__()
        self._times.restart()

    def _leave(self) -> None:
        active, self._active = self._active, None
        if active is not None:
            active.__exit__(None, None, None)
        self._times.restart()


class StepTimes:
    """The seconds between steps that follow one another; the device is not waited for.

    Args:
        device: on which the steps are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: deque[Any] = deque(maxlen=_WINDOW + 1)

    def mark(self) -> None:
        """A step is taken, or on its way."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        self._marks.append(mark)

    def restart(self) -> None:
        """What follows is not to be compared with what was."""
        self._marks.clear()

    def median(self) -> float | None:
        """Of the last steps; None before there are enough of them. Waits for the device."""
        marks = list(self._marks)
        if len(marks) <= _WINDOW:
            return None
        if not self._cuda:
            return statistics.median(b - a for a, b in itertools.pairwise(marks))
        marks[-1].synchronize()
        return statistics.median(a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks))
