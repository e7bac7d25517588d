"""The workers of one host: what they say to one another, how they add up, and who of them is
lost."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allhands.errors import AllhandsError, UserError, WorldError
from allhands.kvstore.wait_state import WaitState
from allhands.launch import worker

_BEAT_EVERY = 1.0
_LOOK_EVERY = 0.3
_LEFT = b"left"
_START_TIMEOUT = timedelta(seconds=300)
# A worker may compute, or wait for the servers, as long as it likes; one that is lost is noticed by
# its missing beats.
_ANY_TIME = timedelta(days=7)


class HostGroup:
    """The workers of one host as one member of a store: the first of them, the leader, speaks for
    all.

    Values travel over process groups of their own, gloo for tensors of the CPU and nccl for those
    of GPUs. All workers make the same calls in the same order. Each worker writes a beat into the
    job's store once a second.

    Args:
        store: a store of torch.distributed which only the workers of this host use.
        ranks: their ranks.
        rank: this worker's.
        lease: seconds without a beat after which a worker is lost.

    Attributes:
        ranks: sorted; sums are made in this order.
        place: this worker's index in `ranks`; the leader's is 0.
        wait_state: where this worker waits; its `failure` says who was lost.
        stores: the stores that these workers share, by number.

    Raises:
        WorldError: a worker does not come within five minutes.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, lease: float) -> None:
        self.ranks = sorted(ranks)
        self.place, self.size, self.lease = self.ranks.index(rank), len(ranks), lease
        self.wait_state = WaitState()
        self.stores: list[Any] = []
        self._rank, self._store = rank, store
        store.set(f"about/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
        store.set(f"beat/{rank}", "0")
        try:
            store.wait(
                [f"{what}/{one}" for one in self.ranks for what in ("about", "beat")],
                _START_TIMEOUT,
            )
        except RuntimeError as error:
            raise WorldError(
                f"worker {rank} waits for the workers of its host, which are {_all(self.ranks)}: "
                f"{error}"
            ) from error
        self._about = {one: store.get(f"about/{one}").decode() for one in self.ranks}
        self._groups: dict[str, Any] = {}
        self._room: dict[tuple[Any, ...], torch.Tensor] = {}
        self._group("cpu")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def leads(self) -> bool:
        """Whether this worker is the leader."""
        return self.place == 0

    # ------------------------------------------------------------------ values

    def add_up(self, values: torch.Tensor, total: torch.Tensor) -> None:
        """Write the sum over the host's workers, in the order of their ranks, into the leader's
        `total`.

        Both are 1-D and as long as `padded` says. Each worker adds up one part, so that none
        carries more than another.
        """
        if not len(values):
            return
        received = self.room("received", len(values), values.dtype, values.device)
        group = self._group(values.device.type)
        self._wait(group.alltoall_base(_bytes(received), _bytes(values), [], []), values)
        parts = received.view(self.size, -1)
        for part in parts[1:]:
            parts[0].add_(part)
        into = [[_bytes(part) for part in total.view(self.size, -1)]] if self.leads else []
        self._wait(group.gather(into, [_bytes(parts[0])], dist.GatherOptions()), values)

    def spread(self, values: torch.Tensor) -> None:
        """Overwrite a 1-D tensor with the leader's."""
        if len(values):
            self._wait(self._group(values.device.type).broadcast(_bytes(values), 0), values)

    def padded(self, count: int) -> int:
        """`count`, or the next number that can be cut into as many parts as there are workers."""
        return -(-count // self.size) * self.size

    def room(self, what: str, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor to work in, 1-D. Kept, because new memory of this size costs more than its
        use."""
        kept = self._room.get((what, dtype, device))
        if kept is None or len(kept) < count:
            kept = self._room[what, dtype, device] = torch.empty(count, dtype=dtype, device=device)
        return kept[:count]

    # ------------------------------------------------------------------ words

    def all_of(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all workers, which are alike in form, by place."""
        found = [torch.empty_like(own) for _ in self.ranks]
        self._wait(self._group("cpu").allgather([found], [own]), own)
        return found

    def lead(self, work: Callable[[], Sequence[float] | None]) -> list[float]:
        """Let the leader do something for all; up to three numbers that it gives. Its error is
        everybody's."""
        head, failure = torch.zeros(4, dtype=torch.float64), None
        if self.leads:
            try:
                numbers = work() or ()
                head[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
            except Exception as error:
                failure = error
                head[0] = 2 if isinstance(error, UserError) else 1
        self.spread(head)
        if head[0]:
            told = self.spread_bytes(
                str(failure).encode() if failure is not None else None
            ).decode()
            if failure is not None:
                raise failure
            kind: type[AllhandsError] = UserError if head[0] == 2 else WorldError
            raise kind(told)
        return head[1:].tolist()

    def spread_bytes(self, data: bytes | None) -> bytes:
        """The leader's data; the others pass None."""
        count = torch.tensor([len(data or b"")])
        self.spread(count)
        if data:
            values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            values = torch.empty(int(count), dtype=torch.uint8)
        self.spread(values)
        return bytes(values.numpy())

    # ------------------------------------------------------------------ underneath

    def _group(self, device: str) -> Any:
        """The process group for tensors of this type of device, made at its first use, which is the
        same on all workers."""
        if device not in self._groups:
            store = dist.PrefixStore(device, self._store)
            if device == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _ANY_TIME
                self._groups[device] = dist.ProcessGroupNCCL(store, self.place, self.size, options)
            else:
                self._groups[device] = dist.ProcessGroupGloo(
                    store, self.place, self.size, _ANY_TIME
                )
        return self._groups[device]

    def _wait(self, work: Any, values: torch.Tensor) -> None:
        """Wait for a collective on such values, or for the news that a worker is lost.

        Raises:
            WorldError: which one.
        """
        came: list[bool] = []

        def done(_: Any) -> None:
            with self.wait_state.changed:
                came.append(True)
                self.wait_state.changed.notify_all()

        work.get_future().add_done_callback(done)
        self.wait_state.wait(
            lambda: came, lambda: f"worker {self._rank} waits for the other workers of its host"
        )
        try:
            # Nccl's future comes when the work is queued.
            while values.device.type == "cuda" and not work.is_completed():
                self._check()
                time.sleep(0)
            work.wait()
        except RuntimeError as error:
            # Whose connection it was is known when its beats are missed.
            with self.wait_state.changed:
                self.wait_state.changed.wait_for(
                    lambda: self.wait_state.failure is not None, self.lease + 2 * _LOOK_EVERY
                )
            self._lost(f"a worker of this host (they are {_all(self.ranks)}) is lost: {error}")
            self._check()

    def _check(self) -> None:
        failure = self.wait_state.failure
        if failure is not None:
            raise type(failure)(*failure.args) from failure

    def _watch(self) -> None:
        others = [one for one in self.ranks if one != self._rank]
        seen: dict[int, bytes] = {}
        heard = dict.fromkeys(others, time.monotonic())
        beats, told = 0, 0.0
        while others and not self._ending.wait(_LOOK_EVERY) and self.wait_state.failure is None:
            try:
                if time.monotonic() - told >= _BEAT_EVERY:
                    beats, told = beats + 1, time.monotonic()
                    self._store.set(f"beat/{self._rank}", str(beats))
                found = self._store.multi_get([f"beat/{one}" for one in others])
            except RuntimeError as error:
                self._lost(f"worker {self._rank} does not reach the job's store any more: {error}")
                return
            now = time.monotonic()
            for one, beat in zip(others, found, strict=True):
                if seen.get(one) != beat or beat == _LEFT:
                    seen[one], heard[one] = beat, now
                elif now - heard[one] > self.lease:
                    who, all_ = f"worker {one} ({self._about[one]})", _all(self.ranks)
                    self._lost(
                        f"{who} is lost: it was killed, it crashed, is stopped or hangs, and gave "
                        f"no sign of life for {self.lease:.1f} s. The workers of a host ({all_}) "
                        "are one member of this store, and end with it"
                    )

    def _lost(self, text: str) -> None:
        """Nothing can go on here, and the servers hear no goodbye."""
        if self.wait_state.failure is not None:
            return
        for group in self._groups.values():
            # A collective that will never end would keep the interpreter from ending, which waits
            # for the groups it takes down.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.wait_state.fail(WorldError(text))
        for store in self.stores:
            store.lost(WorldError(text))

    def close(self) -> None:
        """At the end of the process: say that it ends as it should, if it does."""
        self._ending.set()
        self._thread.join(2.0)
        if (
            self.wait_state.failure is None
            and getattr(sys, "last_type", None) is None
            and not worker.exit_code
        ):
            with contextlib.suppress(RuntimeError):
                self._store.set(f"beat/{self._rank}", _LEFT.decode())


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Backends know few of torch's dtypes."""
    return values.view(torch.uint8)


def _all(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
