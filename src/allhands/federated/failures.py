"""Clients that fail: named on every rank and, as configured, fatal, tried again, or left out of the
round."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from allhands.checks import check_choice, check_whole
from allhands.comm import all_gather_text
from allhands.errors import AllhandsError, UserError
from allhands.federated.algorithms.base import Trained
from allhands.federated.client_schedule import common_store
from allhands.federated.clients import Clients
from allhands.federated.executors.base import ClientError, CohortMember, Executor, Sink, States
from allhands.federated.sums import Sums
from allhands.federated.team import Team, TeammateError
from allhands.world import World

ACTIONS = ("stop", "retry", "skip")
_LOOK = 0.5  # seconds between two looks at whether another rank has ended the run
_LEFT_OUT, _FATAL = 1.0, 2.0  # values of the figure `failed`


class _Over(Exception):
    """The run ends because of another rank."""


class ClientFailedError(AllhandsError, RuntimeError):
    """A client failed, on this rank or on another one; names it, with its traceback."""


def check_action(action: str, retries: int) -> None:
    """Raise `UserError` unless `Failures` takes both."""
    check_choice("on_client_failure", action, ACTIONS)
    check_whole("client_retries", retries)


class Failures:
    """What becomes of clients that fail.

    A rank never leaves a round alone: it takes part in the round's sum, whose figures tell the
    others that something failed; only then do the ranks exchange what it was.

    Args:
        world: the ranks; all of them make it together.
        action: "stop" ends the run on all ranks; "retry" trains the client again, with the same
            draws, and stops when that fails `retries` times; "skip" leaves it out, and the others'
            weights make up the whole.
        retries: how often "retry" tries again.
        team: the ranks that train a client together, and fail together; their leader puts it into
            the figures.

    Raises:
        UserError: neither action nor number is known.
    """

    def __init__(
        self, world: World, action: str = "stop", retries: int = 2, team: Team | None = None
    ) -> None:
        check_action(action, retries)
        self.world, self.action, self.retries = world, action, retries
        self._leads = team is None or team.leads
        # Ranks of a team wait for one another in every step, so none of them may end before the
        # others do.
        alone = team is None or team.size == 1
        self._store = common_store(world, "failures") if alone else None
        self._looked = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        # Slot: figure, text, whether a mistake of the user's.
        self._told: dict[int, tuple[float, str, bool]] = {}
        self._tries: dict[int, int] = {}
        self._error: BaseException | None = None
        self._over = False

    @property
    def fatal(self) -> bool:
        """Whether this rank knows of something that ends the run."""
        return self._error is not None or self._over

    def train(
        self,
        executor: Executor,
        jobs: Sequence[CohortMember],
        states: States,
        sink: Sink,
        name: Callable[[int], str],
    ) -> None:
        """`executor.train`, again without those that have failed or are done, until all are
        either."""
        done: set[int] = set()

        def noted(trained: Trained, seconds: float) -> None:
            sink(trained, seconds)
            done.update(trained.slots)
            if self._elsewhere():
                raise _Over

        left = list(jobs)
        while True:
            try:
                # Also without a job: choosing an executor is for all ranks together.
                executor.train(left, states, noted)
                return
            except _Over:
                self._over = True
                return
            except ClientError as error:
                self._take(error, name(error.job.client))
            left = [job for job in left if job.slot not in done and job.slot not in self._told]
            if not left or self.fatal:
                return

    def _take(self, error: ClientError, name: str) -> None:
        slot, cause = error.job.slot, error.__cause__ or error
        # A loss of the wrong shape, and the like: it would fail for every client.
        if isinstance(cause, UserError):
            self._told[slot] = _FATAL, str(error), True
        else:
            trace = "".join(traceback.format_exception(cause)).rstrip()
            # The rank at which it failed says why.
            text = "" if isinstance(cause, TeammateError) else f"client {name} failed:\n{trace}"
            tries = self._tries[slot] = self._tries.get(slot, 0) + 1
            if self.action == "skip":
                self._told[slot] = _LEFT_OUT, text, False
                return
            if self.action == "retry" and tries <= self.retries:
                if text:
                    print(
                        f"{text}\nclient {name} is trained again, {tries} of {self.retries}",
                        flush=True,
                    )
                return
            again = f" ({tries} times)" if self.action == "retry" else ""
            self._told[slot] = _FATAL, text.replace(" failed:", f" failed{again}:", 1), False
        self._end(cause)

    def _end(self, error: BaseException) -> None:
        self._error = error
        if self._store is not None:
            self._store.set("over", "")

    def _elsewhere(self) -> bool:
        """Whether another rank has seen what ends the run, so that the clients that are left here
        need not be trained."""
        if self._store is None or time.monotonic() - self._looked < _LOOK:
            return False
        self._looked = time.monotonic()
        return bool(self._store.check(["over"]))

    def broke(self, error: Exception, jobs: Sequence[CohortMember]) -> None:
        """Something other than a client's own training failed on this rank, which tells the others
        and then ends.

        Raises:
            Exception: the same, where the rank has no client by which to tell them.
        """
        if not jobs:
            raise error
        if isinstance(error, AllhandsError):
            text = str(error)
        else:
            text = "".join(traceback.format_exception(error)).rstrip()
        self._told[jobs[0].slot] = _FATAL, text, isinstance(error, UserError)
        self._end(error)

    def note(self, sums: Sums) -> None:
        """Put this rank's failures into the round's figures."""
        if not self._leads:
            return
        for slot, (figure, _, _) in self._told.items():
            sums.note([slot], ok=0.0, failed=figure)
        for slot, tries in self._tries.items():
            sums.note([slot], retried=float(tries) if slot not in self._told else 0.0)

    def settle(
        self, figures: dict[str, torch.Tensor], cohort: Sequence[int], clients: Clients, round_: int
    ) -> None:
        """Say who was left out, or end the run; the same on every rank.

        Raises:
            ClientFailedError: a client failed and that is fatal; on every rank, with the same
                words.
            UserError: the same, where what failed is a mistake in what was asked for.
        """
        worst = float(figures["failed"].max()) if len(cohort) else 0.0
        if not worst:
            return
        told: list[tuple[int, float, str, bool]] = []
        for text in all_gather_text(
            json.dumps([[slot, *said] for slot, said in self._told.items()]), self.world
        ):
            told += json.loads(text)
        told = sorted(entry for entry in told if entry[2])
        if worst >= _FATAL:
            _, _, text, mistake = next(entry for entry in told if entry[1] >= _FATAL)
            if mistake:
                raise UserError(text) from self._error
            raise ClientFailedError(
                f"round {round_}: {text}\n"
                "(on_client_failure='skip' goes on without such clients, 'retry' trains them again)"
            ) from self._error
        if self.world.rank == 0:
            for slot, _, text, _ in told:
                print(
                    f"round {round_}: {text}\nclient {clients.name(cohort[slot])} is left out of "
                    "the round",
                    flush=True,
                )
