"""Which executor trains the clients of a device."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from allhands.errors import UserError, did_you_mean
from allhands.federated.algorithms.base import Server, Trained
from allhands.federated.executors.base import (
    CohortMember,
    Executor,
    ExecutorContext,
    Sink,
    States,
    wait_for,
)
from allhands.federated.executors.graph import Graph
from allhands.federated.executors.serial import Serial
from allhands.federated.executors.stacked import Stacked
from allhands.world import current_world

# Clients of the first cohort on which executors are tried that train them one by one, or at once.
_ALONE, _TOGETHER = (8, 64)


class Auto(Executor):
    """On a processor `Serial`. On CUDA the fastest of those that do not refuse, by a trial on
    clients of the first cohort, whose results are thrown away; every rank takes part and all choose
    the same, the one for which the slowest rank is fastest.

    What is chosen and why is printed in one line. The choice changes results by rounding only; a
    run that shall repeat another to the bit names the executor that was printed.
    """

    name = "auto"

    def __init__(self, work: ExecutorContext, server: Server) -> None:
        super().__init__(work, server)
        self.chosen: Executor | None = (
            Serial(work, server) if server.device.type != "cuda" else None
        )

    def train(self, jobs: Sequence[CohortMember], states: States, sink: Sink) -> None:
        if self.chosen is None:
            self.chosen = self._try(jobs, states)
            self.together = self.chosen.together
        self.chosen.train(jobs, states, sink)

    def take(self, name: str | None) -> None:
        """Go on with what other ranks have chosen; None: with what is chosen next."""
        if name is None:
            self.chosen = None if self.server.device.type == "cuda" else self.chosen
        elif self.chosen is None or self.chosen.name != name:
            self.chosen = self._make(EXECUTORS[name])
            self.together = self.chosen.together

    def _try(self, jobs: Sequence[CohortMember], states: States) -> Executor:
        kinds: list[type[Executor]] = [Serial, Graph, Stacked]
        seconds, said = [], []
        for kind in kinds:
            most = _TOGETHER if kind.together else _ALONE
            taken, refusal = self._time(kind, list(jobs[:: -(-len(jobs) // most) or 1]), states)
            seconds.append(taken)
            said.append(
                f"{kind.name} {refusal}" if refusal else f"{kind.name} {1000 * taken:.3f} ms"
            )
            torch.cuda.empty_cache()
        world = current_world()
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self.server.device)
        if world is not None and world.world_size > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        # Where all have failed, the serial one says why in the round itself.
        chosen = kinds[int(slowest.argmin())] if bool(slowest.isfinite().any()) else Serial
        if world is None or world.rank == 0:
            print(f"executor: {chosen.name} (a step of a client: {', '.join(said)})", flush=True)
        return self._make(chosen)

    def _make(self, kind: type[Executor]) -> Executor:
        return kind(replace(self.work, model=copy.deepcopy(self.work.model)), self.server)

    def _time(
        self, kind: type[Executor], jobs: list[CohortMember], states: States
    ) -> tuple[float, str]:
        """Seconds a step of a client, when they are trained for the second time; infinite with the
        reason where it cannot."""

        def forget(trained: Trained, seconds: float) -> None:
            pass

        refusal = kind.refuses(
            replace(self.work, model=copy.deepcopy(self.work.model)), self.server
        )
        if refusal is not None:
            return float("inf"), f"refuses: {refusal}"
        try:
            made = self._make(kind)
            made.train(jobs, states, forget)
            wait_for(self.server.device)
            began = time.perf_counter()
            made.train(jobs, states, forget)
            wait_for(self.server.device)
            steps = sum(
                self.work.local.num_steps(self.work.clients.size(job.client)) for job in jobs
            )
            return (time.perf_counter() - began) / max(steps, 1), ""
        except Exception as error:
            return float("inf"), f"failed: {error}"


EXECUTORS: dict[str, type[Executor]] = {kind.name: kind for kind in (Auto, Serial, Graph, Stacked)}


def parse(given: Any) -> tuple[type[Executor], dict[str, Any]]:
    """The class and the options that ``"name"`` or ``{"name": …, option: …}`` stands for."""

    options = dict(given) if isinstance(given, dict) else {"name": given}
    name = options.pop("name", None)
    if name not in EXECUTORS:
        raise UserError(
            f"there is no executor {name!r}{did_you_mean(name, EXECUTORS)} Known are: "
            f"{', '.join(EXECUTORS)}"
        )
    takes = list(inspect.signature(EXECUTORS[name]).parameters)[2:]
    for option in options:
        if option not in takes:
            raise UserError(
                f"the executor {name!r} has no option {option!r}{did_you_mean(option, takes)} "
                f"It takes: {', '.join(takes) or 'none'}"
            )
    return EXECUTORS[name], options
