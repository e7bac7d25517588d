"""What all ranks decide together between two optimizer steps: to stop because of a signal, to save
because time has passed.

A signal reaches the ranks at different moments, and their clocks differ. A collective after every
step would settle it and cost too much; so the ranks ask one another a few times a second, at steps
that they have agreed on the time before.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from allhands.comm import broadcast_ints, calls
from allhands.errors import WorldError
from allhands.world import World, slurm

if TYPE_CHECKING:
    from allhands.loop.elastic_units import ElasticUnits

# Schedulers send SIGTERM to end a job, and SIGUSR1 some time before they do.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Seconds between two rounds, about.
EVERY = 0.25
# Steps before the first round of a training that saves nothing.
_UNSAVED = 3


@dataclass(frozen=True)
class Decision:
    """What a round has settled: the signal to stop for, or 0, whether a checkpoint is due, whether
    the world is about to have other members, and whether the training's time is over."""

    signal: int = 0
    save: bool = False
    changed: bool = False
    over: bool = False


class Agreement:
    """The rounds of one training.

    Args:
        world: the processes.
        save_seconds: a checkpoint is due so long after the last one; None never asks for one.
        signals: those that stop the training once all ranks know; empty for none.
        elastic: of a world whose members may change; else None.
    """

    def __init__(
        self,
        world: World,
        save_seconds: float | None,
        signals: tuple[signal.Signals, ...] = SIGNALS,
        elastic: ElasticUnits | None = None,
    ) -> None:
        self.world, self._elastic = world, elastic
        if elastic is not None and signal.SIGTERM not in signals:
            signals = (*signals, signal.SIGTERM)
        self.save_seconds = save_seconds
        #: The optimizer step after which the next round is; compared with by the training loop.
        self.next: float = 1 if signals or save_seconds is not None else math.inf
        # An interrupt keeps the weights that there are, so it need not be the first step that asks.
        self._first = _UNSAVED if save_seconds is None and signals == (signal.SIGINT,) else 1
        self._pending = 0
        self._heeded = False
        self._interval = 1
        self._saved_at = self._asked_at = time.monotonic()
        self._asked_step = 0
        self._ends_at = math.inf
        self._before: dict[int, Any] = {}
        self._signals = signals
        self._interruptible = False

    def take_interrupts(self) -> None:
        """Stop at SIGINT too, after the step; a second one raises KeyboardInterrupt at once. For a
        training in the user's process, before it begins."""
        self._interruptible = True
        self._first = _UNSAVED if self.next == math.inf else self._first
        self._signals = (*self._signals, signal.SIGINT)
        self.next = min(self.next, 1)

    @property
    def interrupted(self) -> bool:
        """Whether SIGINT came to a training in the user's process."""
        return self._interruptible and self._pending == signal.SIGINT

    def __enter__(self) -> Agreement:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                # A handler of the user's own stays.
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                # What was trained is handed back, whatever else comes.
                ignored = number == signal.SIGINT and not self._interruptible
                signal.signal(number, signal.SIG_IGN if ignored else handler)
        self._before = {}
        at_end = self._pending not in (0, signal.SIGINT) or self.interrupted
        if at_end and not self._heeded:
            # Came after the last round: it does what it does without us.
            os.kill(os.getpid(), self._pending)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._pending = self._pending or number
        if self.world.world_size == 1:
            self.next = 0  # nobody else to ask

    def saved(self) -> None:
        """A checkpoint was made just now."""
        self._saved_at = time.monotonic()

    def stop_after(self, seconds: float, step: int) -> None:
        """The training's time is over in so many seconds; all ranks call it after this step."""
        self._ends_at = min(self._ends_at, time.monotonic() + seconds)
        self.next = min(self.next, step + 1)

    def begin(self, step: int) -> None:
        """The training goes on after `step`, the same on every rank."""
        if self.next != math.inf:
            self.next, self._interval, self._asked_step = step + self._first, 1, step
            self._asked_at = time.monotonic()

    def follow(self, source: int) -> None:
        """Hold the next round where rank `source` does, which all ranks call together: some have
        held the last one, or are about to, and others are not as far."""
        if self.next == math.inf:
            return
        own = [int(self.next), self._interval, self._asked_step]
        given = own if self.world.rank == source else None
        self.next, self._interval, self._asked_step = broadcast_ints(given, self.world, source)

    def ask(self, step: int) -> Decision:
        """Hold a round, after the same `step` on every rank."""
        now = time.monotonic()
        due = self.save_seconds is not None and now - self._saved_at >= self.save_seconds
        seconds = (now - self._asked_at) / max(1, step - self._asked_step)
        # The first steps are slow, so their pace is trusted only little by little.
        wanted = max(1, min(2 * self._interval, int(EVERY / seconds) if seconds > 0 else 1, 10_000))
        over = now >= self._ends_at
        pending, save, interval, changed, over = self._exchange(
            self._told_to_all(), due, wanted, over
        )
        if changed:  # within an evaluation nobody is taken in; the next step is not to be missed
            interval = 1
        self._asked_at, self._asked_step, self._interval = now, step, interval
        self.next = step + interval
        self._heeded = bool(pending)
        return Decision(pending, save, changed, over)

    @property
    def leaves(self) -> int:
        """The signal that this rank alone got, and leaves an elastic job for; else 0."""
        return self._pending if self._elastic is not None and not self._told_to_all() else 0

    def heed(self) -> None:
        """This rank leaves for its signal, which is not to be sent again."""
        self._heeded = True

    def _told_to_all(self) -> int:
        """The signal that this rank got, and that ends the training of all."""
        pending = self._pending
        if pending and self._elastic is not None and not self._elastic.job_ends():
            return 0
        return pending

    def _exchange(
        self, pending: int, due: bool, interval: int, over: bool
    ) -> tuple[int, bool, int, bool, bool]:
        """The largest pending signal of all ranks; rank 0's clock decides the rest."""
        first = self.world.rank == 0
        changed = first and self._elastic is not None and self._elastic.changed()
        if self.world.world_size == 1:
            return pending, due, interval, changed, over
        calls.note("agreeing whether to go on")
        said = torch.tensor(
            [pending, first and due, interval if first else 0, changed, first and over],
            dtype=torch.int64,
            device=self.world.device,
        )
        dist.all_reduce(said, dist.ReduceOp.MAX)
        pending, save, interval, changed, over = said.tolist()
        return pending, bool(save), interval, bool(changed), bool(over)


def requeue_if_asked(world: World, say: Callable[[str], None]) -> None:
    """Once a signal has ended a training and all is saved: put its Slurm job back into the queue
    when ALLHANDS_REQUEUE=1."""
    if world.rank != 0 or not slurm.wants_requeue(os.environ):
        return
    # Said first: once Slurm ends the job, what is printed may not arrive.
    say(f"asking Slurm to requeue job {slurm.job_of(os.environ)}")
    try:
        say(slurm.requeue())
    except WorldError as error:
        say(f"the job was not requeued: {error}")
