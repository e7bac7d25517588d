"""A rank's side of rounds: see `rounds`."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allhands.horovod.exceptions import HorovodInternalError
from allhands.horovod.link import Link
from allhands.horovod.rounds import Parts

_A_WHILE = timedelta(seconds=1)
_GRACE_S = 10.0  # what a GPU still has to do when nothing works any more is over by then, or waits for a rank that does not come


class Lane:
    """Where one process set's rounds run, one after another.

    Attributes:
        group: of torch; there from the first round on that is agreed.
        busy: this rank has promised a round, and has neither given all of its parts nor been declined.
        answer: of the round that was promised last: None until it is known; True: it is agreed; False: it is declined.
    """

    def __init__(self, set_id: int, link: Link) -> None:
        self._set_id, self._link = set_id, link
        self._answered = threading.Event()
        self._error = ""
        self._works: list[Any] = []  # of the last round
        self.group: Any = None
        self.busy = False
        self.answer: bool | None = None

    def promise(self, parts: Parts) -> None:
        """This rank will give all of these allreduces, in this order, without being asked again."""
        self.busy, self.answer = True, None
        self._works = []
        self._answered.clear()
        if self._error:
            raise HorovodInternalError(self._error)
        self._link.promise(self._set_id, parts)

    def wait(self) -> bool:
        """The answer.

        Raises:
            HorovodInternalError: nothing works any more.
        """
        self._answered.wait()
        if self._error:
            raise HorovodInternalError(self._error)
        return bool(self.answer)

    def begin(self, tensor: torch.Tensor) -> int:
        """Begin to add the next part up over the ranks, in place; its place in the round.

        Raises:
            HorovodInternalError: nothing works any more.
        """
        if self._error:
            raise HorovodInternalError(self._error)
        try:
            self._works.append(dist.all_reduce(tensor, group=self.group, async_op=True))
        except (RuntimeError, ValueError) as error:
            raise self._failed(error) from error
        return len(self._works) - 1

    def kept(self) -> None:
        """All parts have begun."""
        self.busy = False

    def end(self, place: int, device: torch.device) -> None:
        """Wait for a part; on a GPU, only its current stream does.

        Raises:
            HorovodInternalError: it failed, or nothing works any more.
        """
        works = self._works
        if place >= len(works):  # given up
            raise HorovodInternalError(self._error)
        work = works[place]
        if device.type == "cuda":
            work.wait()
            return
        while True:
            over = work.is_completed()
            try:
                work.wait(_A_WHILE)
                return
            except RuntimeError as error:  # a while has passed, or it failed
                if self._error or over:
                    raise self._failed(error) from error

    def _failed(self, error: Exception) -> HorovodInternalError:
        if not self._error:
            self._error = f"the connections of the ranks failed: {error}"
            self._link.stop_all(self._error)
        return HorovodInternalError(self._error)

    # ------------------------------------------------------------------ called by the engine's thread

    def told(self, go: bool) -> None:
        """The answer has come."""
        if not go:
            self.busy = False
        self.answer = go
        self._answered.set()

    def fail(self, text: str) -> None:
        """Nothing works any more."""
        self._error = self._error or text
        self._answered.set()

    def give_up(self, on_gpu: bool) -> None:
        """End what waits for a rank that does not come, after `fail`.

        On a GPU it leaves nothing of use, and the next call of this rank says that nothing works any more. On the CPU a rank
        that is done with its part closes its connections, which ends the others' waiting.
        """
        over = time.monotonic() + _GRACE_S
        while not (done := all(work.is_completed() for work in self._works)) and on_gpu and time.monotonic() < over:
            time.sleep(0.1)
        with contextlib.suppress(Exception):
            if on_gpu and not done:
                backend = self.group._get_backend(torch.device("cuda"))
                (backend if hasattr(backend, "abort") else self.group).abort()
            elif not on_gpu and done and self.group is not None:
                self._works, group, self.group = [], self.group, None
                dist.destroy_process_group(group)
