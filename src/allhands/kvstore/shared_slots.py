"""Memory through which a worker's values go to a server of the same host in turns: so small that it
stays in the processor's cache, where memory of each value's own is written, read and written back
once more in every exchange."""

from __future__ import annotations

import queue
import threading

import torch

from allhands.kvstore.placement import CHUNK_BYTES
from allhands.kvstore.shared_memory import SharedMemory

SLOTS = 6
#: Smaller values stay in the cache anyway, and waiting for a slot would cost more than it gives.
SMALLEST = 1 << 18
#: Seconds that a value waits for a slot. Those of others may come in another order, and a worker
#: may be late, so that no wait for them may be longer than what it spares.
PATIENCE = 0.004


class SharedSlots:
    """The slots of one worker and one server, as the worker sees them.

    A slot belongs to a value from `take` until the new value has come, which the server sends after
    it has read the pushed one for the last time.
    """

    def __init__(self) -> None:
        self.memory = SharedMemory(SLOTS * CHUNK_BYTES)
        self._lock = threading.Lock()
        # The one that was used last is the one in the cache.
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for number in range(SLOTS):
            self._free.put(number)
        self._taken: dict[int, tuple[int, int]] = {}
        self._wait = True

    def take(
        self, chunk: int, version: int, values: torch.Tensor
    ) -> tuple[int, torch.Tensor] | None:
        """A slot for a push, and its memory as a tensor like `values`; None where the value is to
        lie elsewhere.

        Args:
            chunk: which one is pushed.
            version: that the chunk has when the slot is free again.
            values: 1-D.
        """
        if not SMALLEST <= values.nbytes <= CHUNK_BYTES:
            return None
        try:
            slot = self._free.get(self._wait, PATIENCE)
        except queue.Empty:
            self._wait = False  # the others are late; go on until one of them has come
            return None
        with self._lock:
            self._taken[chunk] = slot, version
        return slot, self.memory.view(slot * CHUNK_BYTES, len(values), values.dtype)

    def give_back(self, chunk: int, version: int) -> None:
        """The value of a chunk has come in this version."""
        with self._lock:
            if chunk not in self._taken or self._taken[chunk][1] > version:
                return
            slot, _ = self._taken.pop(chunk)
        self._wait = True
        self._free.put(slot)
