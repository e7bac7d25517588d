"""Checkpoints between two rounds: the folder, the files and the choosing are those of the
runner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from allhands.comm import calls
from allhands.errors import UserError
from allhands.federated.rounds import Rounds
from allhands.loop import checkpoint
from allhands.loop.checkpoints import Checkpoints
from allhands.loop.position import Position
from allhands.loop.schedule import Schedule
from allhands.runner.train_settings import TrainSettings
from allhands.world import World

_FORMAT = 1
_STATES = "states/"


class TrainingInRounds(Protocol):
    """What a checkpoint holds of a `RoundLoop`, under that class's names."""

    settings: TrainSettings
    world: World
    rounds: Rounds
    model: nn.Module
    schedule: Schedule
    epoch: int
    global_step: int
    best: float | None
    best_round: int

    @property
    def step(self) -> int: ...

    def read_model(self) -> None: ...


class RoundCheckpoints(Checkpoints):
    """The checkpoints of one federated training. All ranks call every method together.

    The epochs in their names are finished rounds. Weights, the algorithm's state, costs and history
    are written once; what clients keep, by the rank on which they are. Training goes on to the bit,
    on any number of ranks.
    """

    loop: TrainingInRounds

    def save(
        self,
        position: Position | None,
        best: bool = False,
        metrics: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Path:
        loop = self.loop
        assert self._saver is not None
        calls.note(("saving a checkpoint after round", loop.epoch))
        own = {_STATES + key: value for key, value in loop.rounds.states.state_dict().items()}
        summary = {
            "epoch": loop.epoch,
            "step": loop.step,
            "world_size": loop.world.world_size,
            "metrics": metrics or {},
        }
        return self._saver.save(self.state(), own, summary, None, best)

    def state(self) -> dict[str, Any]:
        loop, settings = self.loop, self.loop.settings
        rounds = loop.rounds.state_dict()
        return {
            "format": _FORMAT,
            "model": loop.model.state_dict(),
            "rounds": {**rounds, "history": _pack(rounds["history"])},
            "algorithm": loop.rounds.algorithm.name,
            "clients": len(loop.rounds.clients),
            "optimizer": settings.optimizer.state_dict(),
            "scheduler": loop.schedule.state_dict(),
            "epoch": loop.epoch,
            "step": loop.step,
            "position": None,
            "best": loop.best,
            "best_epoch": loop.best_round,
            "callbacks": [callback.state_dict() for callback in settings.callbacks],
            "seed": settings.seed,
            "world_size": loop.world.world_size,
        }

    def load(self, path: Path, state: dict[str, Any]) -> None:
        self._check(path, state)
        self.take(state)
        # One rank's part at a time; each rank takes what it will keep, and learns where the rest
        # is.
        parts = (checkpoint.load_own(path, rank) for rank in range(state["world_size"]))
        self.loop.rounds.states.load_state_dict(
            {
                key.removeprefix(_STATES): value
                for key, value in part.items()
                if key.startswith(_STATES)
            }
            for part in parts
        )

    def _check(self, path: Path, state: dict[str, Any]) -> None:
        settings, rounds = self.loop.settings, self.loop.rounds
        if "rounds" not in state:
            raise UserError(
                f"resume: {path} is of a training that was not federated; resume it without "
                "Federated(…)"
            )
        if state["format"] != _FORMAT:
            raise UserError(
                f"resume: {path} was written by another version of allhands (federated format "
                f"{state['format']})"
            )
        # Who has which samples follows from the seed.
        for what, then, now in (
            ("seed", state["seed"], settings.seed),
            ("clients", state["clients"], len(rounds.clients)),
            ("algorithm", state["algorithm"], rounds.algorithm.name),
            ("number of callbacks", len(state["callbacks"]), len(settings.callbacks)),
        ):
            if then != now:
                raise UserError(
                    f"resume: the checkpoint was written with {what} {then!r} and this run has "
                    f"{now!r}; set the {what} to {then!r}, or start anew with resume=None"
                )

    def take(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave.

        Raises:
            UserError: it is of another model or optimizer.
        """
        loop, settings, rounds = self.loop, self.loop.settings, self.loop.rounds
        try:
            loop.model.load_state_dict(state["model"])
            settings.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"resume: the checkpoint is of another model or optimizer: {error}"
            ) from None
        loop.read_model()
        rounds.load_state_dict({**state["rounds"], "history": _unpack(state["rounds"]["history"])})
        loop.epoch = loop.global_step = rounds.server.round
        loop.schedule.load_state_dict(state["scheduler"])
        loop.best, loop.best_round = state["best"], state["best_epoch"]
        for callback, callback_state in zip(settings.callbacks, state["callbacks"], strict=True):
            callback.load_state_dict(callback_state)


def _pack(history: Mapping[str, Any]) -> dict[str, Any]:
    """A history whose lists of clients are tensors: a cohort of 1,000 over 500 rounds is half a
    million numbers."""
    return {
        key: _as_tensors(value) if _lists_clients(value) else value
        for key, value in history.items()
    }


def _lists_clients(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and all(type(c) is int for c in row) for row in value
    )


def _as_tensors(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    flat = [client for row in rows for client in row]
    return {
        "clients": torch.tensor(flat, dtype=torch.int64),
        "counts": torch.tensor([len(row) for row in rows]),
    }


def _unpack(history: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [part.tolist() for part in value["clients"].split(value["counts"].tolist())]
        if isinstance(value, dict) and value.keys() == {"clients", "counts"}
        else value
        for key, value in history.items()
    }
