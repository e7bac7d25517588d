"""Federated trainings that go on in their processes when a worker is lost, and take in one that
comes: a round that was interrupted is repeated, with its clients dealt out among those who are
left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch

from allhands.federated.checkpoint import RoundCheckpoints, TrainingInRounds
from allhands.federated.executors.choice import Auto
from allhands.federated.rounds import Evaluate, Rounds
from allhands.loop.elastic_units import ElasticUnits
from allhands.loop.standing import Standing
from allhands.loop.state_transfer import broadcast_state
from allhands.world import World
from allhands.world.regroup import Regrouping

Values = dict[str, dict[str, float]]


class SavedInRounds(TrainingInRounds, Protocol):
    """A `RoundLoop`, with what makes its checkpoints."""

    checkpoints: RoundCheckpoints


class ElasticRounds(ElasticUnits):
    """Does the units of a training in rounds.

    Args:
        world: of the training.
        regrouping: of the world.
        make_evaluate: makes anew what measures the global model; all ranks call it together.
    """

    loop: SavedInRounds

    def __init__(
        self, world: World, regrouping: Regrouping, make_evaluate: Callable[[], Evaluate | None]
    ) -> None:
        super().__init__(world, regrouping)
        self._make_evaluate = make_evaluate
        # As the round began that is being computed.
        self._before: dict[str, Any] | None = None

    def round(self) -> Values:
        """Compute a round, as often as it takes."""
        rounds = self.loop.rounds

        def once() -> Values:
            self._before = _state_of(rounds)
            return rounds.one_round()

        values: Values = self.run(once)
        self._before = None
        return values

    def refused(self) -> str:
        loop = self.loop
        rounds = loop.rounds
        if rounds.states:
            what = ", ".join(f"'{name}'" for name in rounds.states.lengths)
            return (
                f"clients keep {what} on the workers that trained them, which is lost with a "
                f"worker (algorithm '{rounds.algorithm.name}')"
            )
        if type(rounds) is not Rounds:
            return f"{type(rounds).__name__} may have a state of its own"
        if rounds.team.size > 1:
            return "with devices_per_client workers train a client together; leave it out"
        if loop.settings.load_best_on_end and loop.settings.logdir is None:
            return "load_best_on_end=True keeps the best weights in each process; pass logdir="
        return ""

    def leave(self) -> None:
        """Nothing waits in the background."""

    def bind(self, standing: Standing) -> None:
        rounds = self.loop.rounds
        if self._before is not None:
            _take(self._before, rounds)
            self._before = None
        rounds.bind(self._make_evaluate())

    def bring(self, standing: Standing) -> None:
        loop, rounds, progress = self.loop, self.loop.rounds, self.progress
        if standing.alike:
            return
        own = standing.units[self.world.rank]
        state = None
        if self.world.rank == standing.source:
            executor = rounds.executor
            chosen = executor.chosen if isinstance(executor, Auto) else None
            state = {
                "result": progress.result,
                "rounds": _state_of(rounds),
                "all": loop.checkpoints.state() if -1 in standing.units else None,
                "executor": None if chosen is None else chosen.name,
            }
        state = broadcast_state(state, standing.source, self.world)
        if own < 0:
            loop.checkpoints.take(state["all"])
            if isinstance(rounds.executor, Auto):
                rounds.executor.take(state["executor"])
        elif own < standing.newest:
            _take(state["rounds"], rounds)
        progress.units, progress.result = standing.newest, state["result"]


def _state_of(rounds: Rounds) -> dict[str, Any]:
    """What a round changes; lists of the history by their lengths, as they only grow."""
    server, state = rounds.server, rounds.state_dict()
    history = state.pop("history")
    return {
        "weights": server.weights.clone(),
        "integers": server.integers.clone(),
        "rounds": copy.deepcopy(state),
        "history": history,
        "lengths": _lengths(history),
    }


def _take(state: dict[str, Any], rounds: Rounds) -> None:
    server = rounds.server
    with torch.no_grad():
        server.weights.copy_(state["weights"])
        server.integers.copy_(state["integers"])
    history = _cut(state["history"], state["lengths"])
    rounds.load_state_dict({**copy.deepcopy(state["rounds"]), "history": history})


def _lengths(history: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _lengths(value) if isinstance(value, dict) else len(value)
        for name, value in history.items()
    }


def _cut(history: dict[str, Any], lengths: dict[str, Any]) -> dict[str, Any]:
    """The same object, with what has come since taken away."""
    for name in set(history) - set(lengths):
        del history[name]
    for name, length in lengths.items():
        if isinstance(length, dict):
            _cut(history[name], length)
        else:
            del history[name][length:]
    return history
