"""What a runner's training has in a checkpoint beside what its loop has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.errors import UserError
from allhands.loop.base_loop import BaseLoop
from allhands.loop.loop_checkpoints import LoopCheckpoints
from allhands.report.history import History
from allhands.strategies.kept import in_parts, of_this_rank

if TYPE_CHECKING:
    from allhands.loop.optimizer_group import OptimizerGroup
    from allhands.runner.training import Training


class RunnerCheckpoints(LoopCheckpoints):
    """The history, the best value, and the callbacks."""

    def __init__(self, loop: BaseLoop, training: Training) -> None:
        super().__init__(loop)
        self.training = training

    def alike(self, optimizer_state: Callable[[OptimizerGroup], Any]) -> dict[str, Any]:
        training = self.training
        return (
            super().alike(optimizer_state)
            | training.history.state_dict()
            | {
                "best": training.best,
                "best_epoch": training.best_epoch,
                "best_step": training.best_step,
                "callbacks": self._callback_states(),
            }
        )

    def _callback_states(self) -> list[dict[str, Any]]:
        states = [callback.state_dict() for callback in self.training.settings.callbacks]
        parts = self.loop.placement.held_parts()
        return states if parts is None else in_parts(states, parts, self.loop.world)

    def load(self, path: Path, state: dict[str, Any]) -> None:
        callbacks = self.training.settings.callbacks
        if "rounds" not in state and len(state["callbacks"]) != len(callbacks):
            raise UserError(
                f"resume: the checkpoint was written with {len(state['callbacks'])} callback(s) "
                f"and this run has {len(callbacks)}; pass the same callbacks in the same order"
            )
        super().load(path, state)

    def load_rest(self, state: dict[str, Any]) -> None:
        super().load_rest(state)
        training, callbacks = self.training, self.training.settings.callbacks
        states, parts = state["callbacks"], self.loop.placement.held_parts()
        if parts is not None:
            states = of_this_rank(states, parts, training.model)
        for callback, callback_state in zip(callbacks, states, strict=True):
            callback.load_state_dict(callback_state)
        training.best, training.best_epoch = state["best"], state["best_epoch"]
        training.best_step = state.get("best_step", 0)
        training.history = History.of_state(state)
