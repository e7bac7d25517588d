"""Checkpoints between two rounds: the folder, the files and the choosing are those of the
runner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import calls
from allhands.errors import UserError
from allhands.runner import checkpoint
from allhands.runner.training_checkpoints import TrainingCheckpoints

if TYPE_CHECKING:
    from allhands.federated.session import Session

_FORMAT = 1
_STATES = "states/"


class RoundCheckpoints(TrainingCheckpoints):
    """The checkpoints of one federated training. All ranks call every method together.

    The epochs in their names are finished rounds. Weights, the algorithm's state, costs and history
    are written once; what clients keep, by the rank on which they are. Training goes on to the bit,
    on any number of ranks.
    """

    def __init__(self, session: Session) -> None:
        given: Any = session  # has what the choosing of a checkpoint asks of a `Training`
        super().__init__(given)
        self.session = session

    def save_round(self, best: bool, metrics: Mapping[str, Mapping[str, float]]) -> Path:
        """Save, after a round."""
        session = self.session
        assert self._saver is not None
        calls.note(("saving a checkpoint after round", session.epoch))
        own = {_STATES + key: value for key, value in session.rounds.states.state_dict().items()}
        summary = {
            "epoch": session.epoch,
            "step": session.step,
            "world_size": session.world.world_size,
            "metrics": metrics,
        }
        return self._saver.save(self.state(), own, summary, None, best)

    def state(self) -> dict[str, Any]:
        session, settings = self.session, self.session.settings
        rounds = session.rounds.state_dict()
        return {
            "format": _FORMAT,
            "model": session.model.state_dict(),
            "rounds": {**rounds, "history": _packed(rounds["history"])},
            "algorithm": session.rounds.algorithm.name,
            "clients": len(session.rounds.clients),
            "optimizer": settings.optimizer.state_dict(),
            "scheduler": session.schedule.state_dict(),
            "epoch": session.epoch,
            "step": session.step,
            "position": None,
            "best": session.best,
            "best_epoch": session.best_round,
            "callbacks": [callback.state_dict() for callback in settings.callbacks],
            "seed": settings.seed,
            "world_size": session.world.world_size,
        }

    def _load(self, path: Path, state: dict[str, Any]) -> None:
        session, settings, rounds = self.session, self.session.settings, self.session.rounds
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
        try:
            session.model.load_state_dict(state["model"])
            settings.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"resume: the checkpoint is of another model or optimizer: {error}"
            ) from None
        session.read_model()
        rounds.load_state_dict(
            {**state["rounds"], "history": _unpacked(state["rounds"]["history"])}
        )
        session.schedule.load_state_dict(state["scheduler"])
        session.best, session.best_round = state["best"], state["best_epoch"]
        for callback, callback_state in zip(settings.callbacks, state["callbacks"], strict=True):
            callback.load_state_dict(callback_state)
        # One rank's part at a time; each rank takes what it will keep, and learns where the rest
        # is.
        parts = (checkpoint.load_own(path, rank) for rank in range(state["world_size"]))
        rounds.states.load_state_dict(
            {
                key.removeprefix(_STATES): value
                for key, value in part.items()
                if key.startswith(_STATES)
            }
            for part in parts
        )


def _packed(history: Mapping[str, Any]) -> dict[str, Any]:
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


def _unpacked(history: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [part.tolist() for part in value["clients"].split(value["counts"].tolist())]
        if isinstance(value, dict) and value.keys() == {"clients", "counts"}
        else value
        for key, value in history.items()
    }
