"""A rank's side of rounds: see `promise_rounds`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allhands.horovod.coordinator_link import CoordinatorLink
from allhands.horovod.exceptions import HorovodInternalError
from allhands.horovod.operation_request import failure
from allhands.horovod.promise_rounds import Parts

_log = logging.getLogger(__name__)
_A_WHILE = timedelta(seconds=1)
# what a GPU still has to do when nothing works any more is over by then, or waits for a rank that
# does not come
_GRACE_S = 10.0


class Round:
    """One that this rank has promised.

    Args:
        parts: what it consists of.
        then: called with it by the engine's thread once there is an answer: other ranks may wait
            for what this rank has ready, while it waits for something else.

    Attributes:
        answer: None until it is known; True: it is agreed; False: it is declined.
        works: what has begun of it; to be cleared when nothing is waited for.
        reached: on a GPU, a torch.cuda.Event behind the parts that its stream has waited for; that
            takes no time, so that `works` is cleared while the GPU still works on them.
    """

    def __init__(self, parts: Parts, then: Callable[[Round], None]) -> None:
        self.parts = parts
        self.answer: bool | None = None
        self.works: list[Any] = []
        self.reached: Any = None
        self._then = then
        self._over = threading.Event()

    def wait(self) -> bool | None:
        """The answer; None when nothing works any more."""
        self._over.wait()
        return self.answer

    def told(self, answer: bool | None) -> None:
        """Called by the engine's thread."""
        self.answer = answer
        self._over.set()
        if answer is not None:
            self._then(self)

    def is_over(self) -> bool:
        """Whether nothing waits for it, not even a GPU."""
        return not self.works and (self.reached is None or self.reached.query())


class Lane:
    """Where one process set's rounds run, one after another.

    Attributes:
        group: of torch; there from the first round on that is agreed.
        busy: this rank has promised a round, and has neither begun all of its parts nor been
            declined.
    """

    def __init__(self, set_id: int, link: CoordinatorLink, rank: int) -> None:
        self._set_id, self._link, self._rank = set_id, link, rank
        self._error = ""
        self._is_over = threading.Event()  # `_error` is what all ranks are told
        self._promised: Round | None = None  # and not answered
        self._rounds: list[Round] = []  # that somebody may wait for
        self.group: Any = None
        self.busy = False
        self._device = torch.device("cpu")

    def promise(self, parts: Parts, then: Callable[[Round], None]) -> Round:
        """This rank will begin all of these allreduces, in this order, without being asked
        again."""
        made = Round(parts, then)
        self._rounds = [*(other for other in self._rounds if not other.is_over()), made]
        self.busy, self._promised = True, made
        self.check()
        self._link.promise(self._set_id, parts)
        return made

    def check(self) -> None:
        """Raise `HorovodInternalError` when nothing works any more."""
        if self._error:
            raise HorovodInternalError(self._error)

    def begin(self, tensor: torch.Tensor, of: Round) -> None:
        """Begin to add the next part of an agreed round up over the ranks, in place.

        Raises:
            HorovodInternalError: nothing works any more.
        """
        self.check()
        self._device = tensor.device
        try:
            of.works.append(dist.all_reduce(tensor, group=self.group, async_op=True))
        except (RuntimeError, ValueError) as error:
            raise self._failed(of, len(of.works), error) from error

    def kept(self) -> None:
        """All parts have begun."""
        self.busy = False

    def end(self, of: Round, place: int, device: torch.device) -> None:
        """Wait for the part at this place; on a GPU, only its current stream does.

        Raises:
            HorovodInternalError: it failed, or nothing works any more.
        """
        try:
            work = of.works[place]
        except IndexError:  # given up
            raise HorovodInternalError(self._error) from None
        if device.type == "cuda":
            work.wait()
            of.reached = torch.cuda.Event() if of.reached is None else of.reached
            of.reached.record()
            return
        while True:
            over = work.is_completed()
            try:
                work.wait(_A_WHILE)
                return
            except RuntimeError as error:  # a while has passed, or it failed
                if self._error or over:
                    failed = self._failed(of, place, error)
                    # Another rank's failure may have ended this rank's connections.
                    self._is_over.wait(_GRACE_S)
                    raise HorovodInternalError(self._error) from failed

    def _failed(self, of: Round, place: int, error: Exception) -> HorovodInternalError:
        if not self._error:
            kind, name = of.parts[place][0][1:]
            self._error = failure(kind, name, self._rank, error)
            self._link.stop_all(self._error)
        return HorovodInternalError(self._error)

    # ---------------------------------------------------------------- called by the engine's thread

    def told(self, go: bool) -> None:
        """The answer has come."""
        asked, self._promised = self._promised, None
        if not go:
            self.busy = False
        if asked is not None:
            asked.told(go)

    def fail(self, text: str) -> None:
        """Nothing works any more, and all ranks are told this."""
        self._error = text
        self._is_over.set()
        if self._promised is not None:
            self._promised.told(None)

    def give_up(self, on_gpu: bool) -> None:
        """End what waits for a rank that does not come, after `fail`.

        On a GPU it leaves nothing of use, and the next call of this rank says that nothing works
        any more. On the CPU a rank that is done with its part closes its connections, which ends
        the others' waiting.
        """
        if self.group is None:
            return
        if on_gpu:
            abort_unfinished([self.group], self._gpu_is_done())
        elif all(work.is_completed() for begun in self._rounds for work in list(begun.works)):
            for begun in self._rounds:
                begun.works.clear()
            group, self.group = self.group, None
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)

    def _gpu_is_done(self) -> Callable[[], bool]:
        """What says whether the GPU is done with all parts. A part of which nccl knows that it has
        failed says that it is completed, while the GPU still waits in it."""
        events = [begun.reached for begun in self._rounds if begun.reached is not None]
        works = [work for begun in self._rounds for work in list(begun.works)]
        try:
            if works:
                with torch.cuda.stream(torch.cuda.Stream(self._device)):
                    for work in works:
                        work.wait()  # the stream does
                    events.append(torch.cuda.Event())
                    events[-1].record()
        except RuntimeError:
            return lambda: False
        return lambda: all(event.query() for event in events)


def abort_unfinished(groups: Sequence[Any], is_done: Callable[[], bool]) -> None:
    """Abort groups of nccl in which this GPU waits for a rank that does not come, so that calls
    which wait for the GPU return. What it is done with soon is left alone."""
    over = time.monotonic() + _GRACE_S
    while not is_done():
        if time.monotonic() > over:
            break
        time.sleep(0.1)
    else:
        return
    for group in groups:
        try:
            backend = group._get_backend(torch.device("cuda"))
            (backend if hasattr(backend, "abort") else group).abort()
        except Exception as error:
            _log.warning("a group of nccl could not be aborted: %s", error)
