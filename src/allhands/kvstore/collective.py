"""`CollectiveStore`: synchronous training without servers. Each worker is the server of 1/N of
every bucket.

A step is a reduce-scatter, the optimizer on this rank's part, and an all-gather: as many bytes as
an all-reduce, with the optimizer's state and its work cut by N. The reduce-scatter is an all-to-all
whose parts are added up in the order of the ranks: as many bytes again, but sums do not depend on
the number of workers' places in a ring, so the result is that of servers, bit for
bit. It is also the faster one on gloo: 45 MB between 2 workers on 2 cores took 15 ms, gloo's own
reduce-scatter 51 ms.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from allhands.comm import all_gather_single, broadcast_tensors
from allhands.errors import UserError
from allhands.kvstore.bucket import KeyBucket
from allhands.kvstore.local_store import LocalStore
from allhands.kvstore.shared_calls import SharedCalls, call_text
from allhands.kvstore.store import Share
from allhands.kvstore.store_modes import Mode
from allhands.world import World, current_world

_log = logging.getLogger(__name__)

# Open stores of this process's world by number. Workers make them in the same order, so that a
# number is the same store on all.
_open: dict[int, CollectiveStore] = {}
_made = 0
_made_in: World | None = None


class CollectiveStore(LocalStore):
    """A store that all workers of a world share, over its torch.distributed group.

    All workers make the same calls in the same order. Each call begins by comparing them, so that
    another order is an error which names both calls. `close`, which also happens at the normal end
    of a script, is the exception: a worker that has no more batches takes part, with no samples, in
    the steps of those that have.

    Args:
        mode: what `create` was given.
        world: the workers.
        twice: see `LocalKeys`.
    """

    def __init__(self, mode: Mode, world: World, twice: bool = False) -> None:
        # gloo exchanges memory of the CPU only.
        device = torch.device("cpu") if world.backend == "gloo" else world.device
        place = None if world.is_alone else device
        super().__init__(mode, world.rank, world.world_size, place, twice)
        self._world = world
        self._closed = False
        self._number = 0
        self._calls: SharedCalls | None = None  # None: this worker is alone
        if not world.is_alone:
            self._enter()

    def _enter(self) -> None:
        global _made, _made_in
        if _made_in is not self._world:
            for store in _open.values():  # of a world that is gone
                atexit.unregister(store._leave)
            _open.clear()
            _made, _made_in = 0, self._world
        self._number = _made
        _made += 1
        _open[self._number] = self
        self._calls = SharedCalls(
            "the workers", range(self.num_workers), self.rank, self._all_of, self._number, _open
        )
        atexit.register(self._leave)

    # ---------------------------------------------------------- what the workers say to one another

    def _meet(self, call: str, about: Any, share: Share | None = None) -> list[float]:
        return self._follow(call, about, share)[1]

    def _meet_in_step(self, about: list[Any], share: Share) -> tuple[list[Any], list[float]]:
        return self._follow("update", about, share)

    def _follow(self, call: str, about: Any, share: Share | None) -> tuple[Any, list[float]]:
        weight = share.weight if share else 0.0
        if self._calls is None:
            return about, [weight]
        if self._closed:
            raise UserError(
                f"{call}: this worker has closed the store; make a new one on all workers"
            )
        found = self._calls.follow(call, about, weight)
        self._present = self._calls.present
        return found

    def _all_of(self, own: torch.Tensor) -> Iterable[torch.Tensor]:
        own = own.to(self._device)
        found = own.new_empty(self.num_workers * len(own))
        all_gather_single(found, own)
        return found.view(self.num_workers, -1).cpu().unbind()

    def _agree_on_keys(self, forms: dict[str, str]) -> None:
        if self._calls is None:
            return
        said, _ = self._calls.say("init", forms)
        for rank, other in enumerate(said):
            if other[:2] != [self._number, "init"]:
                raise UserError(
                    f"the workers do not make the same calls: worker {self.rank} makes keys, "
                    f"worker {rank} is in {call_text(other)}; make the same calls in the same "
                    "order on all of them"
                )
        # Worker 0 is right: its values are taken. It names the first that differs.
        different = [rank for rank, other in enumerate(said) if other != said[0]]
        odd = self.rank if self.rank in different else next(iter(different), 0)
        first, theirs = said[0][2], said[odd][2]
        if first and theirs and not set(first) & set(theirs):
            raise UserError(
                f"the key {_named(first)} is not the same on all workers: worker 0 makes "
                f"{_named(first)} while worker {odd} makes {_named(theirs)}. Without servers, "
                "workers make their keys in the same order: write init([…], […]) with all keys in "
                "one call, in which their order changes nothing, or start servers (allhands launch "
                "-s 1)"
            )
        for name in sorted({*first, *theirs}):
            if first.get(name) != theirs.get(name):
                who = f"this worker ({odd})" if odd == self.rank else f"worker {odd}"
                raise UserError(
                    f"the key '{name}' is not the same on all workers: "
                    f"{_has(who, theirs.get(name))}, "
                    f"{_has('worker 0', first.get(name))}; all workers must make the same keys"
                )

    def _take_first(self, values: torch.Tensor) -> None:
        broadcast_tensors([values], self._world)

    def _sum(self, values: torch.Tensor, bucket: KeyBucket) -> torch.Tensor:
        if self._world.is_alone or not len(values):
            return values
        received = bucket.room(1)
        # Backends know few of torch's dtypes.
        dist.all_to_all_single(received.view(torch.uint8), values.view(torch.uint8))
        parts = received.view(self.num_workers, -1)
        total = parts[0]
        for part in parts[1:]:
            total.add_(part)
        return total

    def _gather(self, bucket: KeyBucket, part: torch.Tensor, whole: torch.Tensor) -> None:
        if self._world.is_alone or bucket.layout is not None:
            super()._gather(bucket, part, whole)
        elif len(part) and self._world.backend == "gloo":
            # 45 MB between 2 workers on 2 cores: 10 ms as broadcasts, 41 ms as gloo's all-gather.
            parts = whole.view(self.num_workers, -1)
            parts[self.rank].copy_(part)
            sent = [
                dist.broadcast(one.view(torch.uint8), rank, async_op=True)
                for rank, one in enumerate(parts)
            ]
            for each in sent:
                each.wait()
        elif len(part):
            all_gather_single(whole.view(torch.uint8), part.contiguous().view(torch.uint8))

    def _total(self, number: float) -> float:
        if self._world.is_alone:
            return number
        total = torch.tensor([number], dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return float(total)

    def _swap(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._world.is_alone:
            return list(tensors)
        counts = torch.tensor([len(one) for one in tensors], device=self._device)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        lengths = theirs.tolist()
        sent = torch.cat(list(tensors)).to(self._device).contiguous()
        width = sent.shape[1:].numel() * sent.element_size()
        received = sent.new_empty(sum(lengths), *sent.shape[1:])
        dist.all_to_all_single(
            received.view(-1).view(torch.uint8),
            sent.view(-1).view(torch.uint8),
            [width * one for one in lengths],
            [width * len(one) for one in tensors],
        )
        return list(received.to(tensors[0].device).split(lengths))

    # ------------------------------------------------------------------ leaving

    def close(self) -> None:
        """Leave the store, when all workers do. Until then this worker takes part in the steps of
        the others, with no samples."""
        if self._closed or self._calls is None:
            return
        atexit.unregister(self._leave)
        try:
            self._calls.leave()
        finally:
            self._closed = True
            _open.pop(self._number, None)

    def abandon(self) -> None:
        """Leave the store without a word to the other workers, of which one is gone. Those that are
        left make their next stores as workers of another world do."""
        global _made_in
        if self._calls is not None and not self._closed:
            atexit.unregister(self._leave)
            self._closed = True
            _open.pop(self._number, None)
        _made_in = None

    def idle(self, about: Any) -> bool:
        """Whether an `update` is that of a worker that has no keys."""
        return not about[0]

    def take_part(self, call: str, about: Any, weights: Sequence[float]) -> None:
        """Do what the others do, with nothing of this worker's own."""
        if call == "update":
            names, *rest = about
            if names:  # else those who are left have no samples either, and are told so
                self._update(names, {}, weights, *rest)
        elif call == "reduce":
            forms, expected = about
            zeros = {
                name: torch.zeros(shape, dtype=getattr(torch, dtype))
                for name, (shape, dtype) in forms.items()
            }
            self._reduce(zeros, weights, expected)

    def _leave(self) -> None:
        """At the normal end of a script; after an error the others see the group end."""
        if current_world() is not self._world or getattr(sys, "last_type", None) is not None:
            return
        try:
            self.close()
        except (UserError, RuntimeError) as error:
            _log.warning("leaving the store: %s", error)


def _named(keys: Iterable[str]) -> str:
    found = list(keys)
    return ", ".join(f"'{name}'" for name in found[:3]) + (
        f" and {len(found) - 3} more keys" if len(found) > 3 else ""
    )


def _has(who: str, form: str | None) -> str:
    return f"{who} has {form}" if form is not None else f"{who} does not have it"
