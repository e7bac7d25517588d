"""What every training does around its steps: begin, go on from a checkpoint, save, stop together,
end."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import astuple
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from allhands.comm import calls
from allhands.data import preserved_generators
from allhands.launch import handback
from allhands.loop.agreement import SIGNALS, Agreement, Decision, requeue_if_asked
from allhands.loop.checkpoints import Checkpoints
from allhands.loop.position import Position
from allhands.loop.reporter import Reporter
from allhands.loop.settings import LoopSettings
from allhands.loop.times import CHECKPOINTS, Times
from allhands.report.history import History, Values
from allhands.world import World

if TYPE_CHECKING:
    from allhands.loop.elastic_units import ElasticUnits


# `torch.load` reads what users have saved with a history in it.
torch.serialization.add_safe_globals([History])

# Why a training ends whose time has passed.
TIME_OVER = "its time is over"


class TrainingStopped(SystemExit):
    """The training ends in the middle of an epoch, on all ranks.

    Attributes:
        signal: that it ends for, and 0 where it was told to by `stop`. The exit code is 128 plus
            its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number if number else 0)
        self.signal = number


class Lifecycle:
    """A training on one rank, from its start to its end; a context manager.

    Entering it goes on from the checkpoint that was asked for. Leaving it waits for the last
    checkpoint. All ranks enter, save and leave together.

    Args:
        settings: what was asked for.
        world: the ranks.
        reporter: prints, on rank 0.
        checkpoints: makes the training's checkpoints out of this object.

    Attributes:
        epoch: finished epochs.
        global_step: iterations over all epochs: batches that were trained on.
        position: how far the epoch that runs has come; None between two epochs.
        stop_reason: why the training ends after the current epoch; None: it goes on.
        signal: that the training ends for, or 0.
    """

    #: Of a training that goes on when members of the world change; else None.
    elastic: ElasticUnits | None = None
    #: What an epoch is called.
    period = "epoch"
    #: What `global_step` counts.
    counted = "optimizer step"
    #: Called after members of the world have changed.
    regrouped: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        settings: LoopSettings,
        world: World,
        reporter: Reporter,
        checkpoints: Callable[[Any], Checkpoints],
    ) -> None:
        self.settings, self.world, self.reporter = settings, world, reporter
        self.epoch = self.global_step = 0
        self.times = Times()
        self.position: Position | None = None
        self.stop_reason: str | None = None
        self.signal = 0
        # steps of evaluation; with the iterations, they number the rounds of the agreement
        self.evaluated = 0
        self.checkpoints = checkpoints(self)
        #: Called around a save in the middle of an evaluation: before it, and after it where the
        #: training goes on.
        self.around_save: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._stop_now = self._finished = False
        self._stack = ExitStack()
        minutes = settings.save_minutes
        # Ctrl-C reaches the caller, who passes it on and waits for what is handed back.
        interrupts = (signal.SIGINT,) if handback.arrived is not None else ()
        self.agreement = Agreement(
            world,
            minutes * 60 if minutes is not None else None,
            (*SIGNALS, *interrupts) if settings.logdir is not None else interrupts,
            self.elastic,
        )

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(preserved_generators())
            stack.enter_context(self.agreement)
            for context in self.contexts():
                stack.enter_context(context)
            if self.elastic is not None and self.elastic.joins:
                self.elastic.receive()
            else:
                self.checkpoints.restore()
            note = self.check_schedule()
            self.begin()
            self.checkpoints.open()
            self.announce(note)
            self.agreement.begin(self.global_step)
            self._stack = stack.pop_all()
        self.times.begun()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, TrainingStopped):
            try:
                self.checkpoints.close(failed=True)
                self.release()
                self.reporter.close()
            finally:
                self._stack.__exit__(kind, error, trace)  # which may say it better
            return
        with self._stack:
            self.finish()
            self.checkpoints.close()
            self.leave_for_signal()

    def finish(self) -> None:
        """No step follows; the checkpoints are still open."""
        if self._finished:
            return
        self._finished = True
        self.release()
        self.reporter.close()
        self.end()

    def leave_for_signal(self) -> None:
        """Say what follows where a signal has ended the training, and all is saved; return where
        none has.
        """
        if self.signal in (0, signal.SIGINT):
            return
        name = signal.Signals(self.signal).name
        if self.settings.logdir is None:
            saved = "nothing was saved, as there is no logdir"
        else:
            saved = f"saved in {self.settings.logdir}; go on with resume='auto'"
        self.reporter.line(f"stopped by {name} {self.where}: {saved}")
        requeue_if_asked(self.world, self.reporter.line)
        self.reporter.close()
        raise TrainingStopped(self.signal)

    def contexts(self) -> Iterator[AbstractContextManager[Any]]:
        """Further contexts in which the training runs."""
        yield nullcontext()

    def check_schedule(self) -> str:
        """A line for a schedule whose length is not the training's, else ""."""
        return ""

    def begin(self) -> None:
        """The training begins, or goes on from a checkpoint that was read."""

    def announce(self, note: str) -> None:
        """Print who trains; `note` is what `check_schedule` gave."""

    def release(self) -> None:
        """Let go of what steps need, after an error too."""

    def end(self) -> None:
        """The training has ended without an error."""

    @property
    def where(self) -> str:
        """Where the training stands, in words."""
        if self.position is None:
            return f"after {self.period} {self.epoch}"
        return f"after optimizer step {self.global_step}, in {self.period} {self.epoch + 1}"

    # ------------------------------------------------------------------ what all ranks decide

    def stop(self, reason: str, now: bool = False) -> None:
        """End the training; to be called on every rank, or on none.

        Args:
            reason: is printed.
            now: after the current iteration, and not after the current epoch. The unfinished epoch
                is not evaluated and not in the history; with a logdir, a checkpoint is saved from
                which it can go on.
        """
        self.stop_reason = reason
        self._stop_now = now

    def stop_after(self, seconds: float) -> None:
        """End the training once so many seconds have passed; to be called on every rank.

        It ends after an iteration, the same on every rank, as `stop` with `now` does.
        """
        self.agreement.stop_after(seconds, self.global_step + self.evaluated)

    @property
    def ended(self) -> bool:
        """Whether no further epoch begins."""
        return self.stop_reason is not None or bool(self.signal)

    def save(self, values: Values | None = None, best: bool = False) -> None:
        """Save a checkpoint in the middle of an epoch, after the steps of the current iteration.

        Args:
            values: metrics by loader, for the checkpoint's summary.
            best: whether they are the best so far.
        """
        self.unit(lambda: self._save(values, best))
        self.agreement.saved()

    def _save(self, values: Values | None, best: bool) -> None:
        calls.note(("saving a checkpoint after optimizer step", self.global_step))
        with self.times.of(CHECKPOINTS):
            self.checkpoints.save(self.position, best, values)

    def unit(self, do: Callable[[], Any]) -> Any:
        """Do what all ranks do together."""
        return do()

    def ask(self) -> Decision:
        """A round of the agreement."""
        step = self.global_step + self.evaluated
        return Decision(*self.unit(lambda: astuple(self.agreement.ask(step))))

    def check_finite(self) -> None:
        """Raise `NonFiniteLossError` for weights that a NaN has reached, which must not become the
        newest checkpoint."""

    def after_iteration(self) -> None:
        """Do what is due between two iterations."""
        if self.global_step + self.evaluated >= self.agreement.next:
            self.agree()
        if self._stop_now:
            if self.settings.logdir is not None:
                self.check_finite()
                self.save()
            raise TrainingStopped(0)

    def agree(self) -> None:
        """Do what the ranks decide together: save, or save and leave.

        Raises:
            TrainingStopped: the training ends here.
        """
        decision = self.ask()
        position = self.position
        evaluates = position is not None and (position.evaluating or position.evaluating_between)
        within = self.around_save if evaluates else None
        if decision.save or decision.signal:
            # A checkpoint, and what is handed back, hold the weights of the training.
            if within is not None:
                within[0]()
            if self.settings.logdir is not None:
                self.check_finite()
                self.save()
        if decision.signal:
            self.signal = decision.signal
            raise TrainingStopped(decision.signal)
        if decision.save and within is not None:
            within[1]()
        if decision.over:
            self.stop(TIME_OVER, now=True)
        if decision.changed and not evaluates and self.elastic is not None:
            self.elastic.take_in()

    def between(self, steps: Iterator[Any]) -> Iterator[Any]:
        """The steps of an evaluation, with the rounds of the agreement between them: a signal need
        not wait for its end."""
        if self.agreement.next == math.inf:
            yield from steps
            return
        for step in steps:
            yield step
            self.evaluated += 1
            if self.global_step + self.evaluated >= self.agreement.next:
                self.agree()
