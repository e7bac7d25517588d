"""Captured steps on processors, where a function stands for its CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from allhands.loop import optimizer_group
from allhands.step import CapturedSteps
from allhands.step.cuda_graphs import Graphs


class FunctionGraphs:
    """Captures steps by keeping the function.

    Attributes:
        steps: whose steps they are.
        captures, replays: how many there were.
    """

    steps: CapturedSteps

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(
        self, function: Callable[[Callable[[], None]], None], between: Callable[[], None]
    ) -> Graphs:
        self.captures += 1
        return _Function(self, function, between)

    def replayed(self, function: Callable[[], None]) -> None:
        """Call what stands for graphs."""
        self.replays += 1
        # A graph keeps what the optimizer was when it was captured.
        with self.steps.optimizer.capturable():
            function()


class _Function:
    def __init__(
        self,
        graphs: FunctionGraphs,
        function: Callable[[Callable[[], None]], None],
        between: Callable[[], None],
    ) -> None:
        self._graphs, self._function, self._between = graphs, function, between
        self._is_reset = False

    def replay(self) -> None:
        assert not self._is_reset
        self._graphs.replayed(lambda: self._function(self._between))

    def reset(self) -> None:
        self._is_reset = True


@contextmanager
def captured_on_processors(
    make: Callable[[], FunctionGraphs] = FunctionGraphs,
) -> Iterator[list[FunctionGraphs]]:
    """Within, trainings on processors capture their steps.

    Args:
        make: gives what captures the steps of a binding.

    Yields:
        What captured the steps of each binding, in their order.
    """
    made: list[FunctionGraphs] = []

    class Captured(CapturedSteps):
        def __init__(self, *args: Any, **options: Any) -> None:
            graphs = make()
            super().__init__(*args, capture=graphs, **options)
            graphs.steps = self
            made.append(graphs)

    patch = mock.patch.object
    with (
        patch(optimizer_group, "captures_steps", lambda *_: True),
        patch(optimizer_group, "CapturedSteps", Captured),
    ):
        yield made
