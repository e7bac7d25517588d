"""What a runner's training has in a checkpoint beside what its loop has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.errors import UserError
from allhands.loop.base_loop import BaseLoop
from allhands.loop.loop_checkpoints import LoopCheckpoints
from allhands.report.history import History
from allhands.strategies.kept import has_parts, in_parts, of_this_rank

if TYPE_CHECKING:
    from allhands.runner.training import Training


class RunnerCheckpoints(LoopCheckpoints):
    """The history, the best value, and the callbacks."""

    def __init__(self, loop: BaseLoop, training: Training) -> None:
        super().__init__(loop)
        self.training = training

    def alike(self, in_memory: bool) -> dict[str, Any]:
        training = self.training
        return (
            super().alike(in_memory)
            | training.history.state_dict()
            | {
                "best": training.best,
                "best_epoch": training.best_epoch,
                "best_step": training.best_step,
                "callbacks": self._callback_states(in_memory),
            }
        )

    def _callback_states(self, in_memory: bool) -> list[dict[str, Any]]:
        states = [callback.state_dict() for callback in self.training.settings.callbacks]
        parts = self.loop.placement.held_parts()
        if in_memory or parts is None:
            return states
        return in_parts(states, parts, self.loop.world)

    def keeps_parts(self) -> str:
        parts = self.loop.placement.held_parts()
        for callback in self.training.settings.callbacks:
            if parts is not None and has_parts(callback.state_dict(), parts):
                return type(callback).__name__
        return ""

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
