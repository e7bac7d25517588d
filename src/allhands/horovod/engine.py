"""The collective operations of one rank: submitted by any thread, matched by name over the ranks,
run by one thread in one order.

Beside them run rounds (see `promise_rounds`), which are agreed as a whole and begun by whoever has
their tensors.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allhands.errors import UserError
from allhands.horovod import collectives
from allhands.horovod.coordinator_link import CoordinatorLink
from allhands.horovod.exceptions import HorovodInternalError, NotInitializedError
from allhands.horovod.handles import Handle, OnGPU
from allhands.horovod.lanes import Lane, abort_unfinished
from allhands.horovod.local_operations import LocalOperation, run, zeros
from allhands.horovod.matcher import GLOBAL_SET, Matcher
from allhands.horovod.operation_request import Key, OperationRequest, failure
from allhands.horovod.operations import Operations, Tensors
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.settings import Settings
from allhands.horovod.timeline import Timeline
from allhands.world import DEFAULT_TIMEOUT, World


class Engine(Operations):
    """Made by `basics.init`, the same on all ranks.

    Args:
        world: the processes; with their torch group, unless there is only one.
        settings: see `settings.Settings`.
        store: for the ranks of this engine alone; None for a process alone.
    """

    def __init__(self, world: World, settings: Settings, store: Any) -> None:
        self.world, self.settings = world, settings
        self.timeline = Timeline(world.rank)
        self._lock = threading.RLock()
        self._jobs: dict[Key, LocalOperation] = {}
        self._unnamed: Counter[tuple[int, str]] = Counter()
        self._sets: dict[int, ProcessSet] = {}
        self._lanes: dict[int, Lane] = {}
        self._joining: Handle | None = None
        self._broken = ""
        self._failed = False  # an operation did, of which rank 0 has yet to tell all ranks
        self._closed = False
        self._process = os.getpid()
        self._buffers = collectives.Buffers()
        self._on_gpu: list[OnGPU] = []
        matcher = None
        if world.rank == 0:
            matcher = Matcher(
                world.world_size,
                settings.fusion_threshold,
                settings.stall_warn,
                settings.stall_stop,
            )
        group = None if world.is_alone else self._new_group(list(range(world.world_size)))
        self._put_in_use(global_process_set, GLOBAL_SET, list(range(world.world_size)), group)
        self._link = CoordinatorLink(world, store, matcher, settings.cache_capacity)
        self._thread = threading.Thread(target=self._run, name="allhands-horovod", daemon=True)
        self._thread.start()
        if settings.timeline:
            self.timeline.start(settings.timeline)

    def join(self) -> int:
        """Wait until all ranks have joined, giving zeros to their allreduces meanwhile; the rank
        that joined last."""
        with self._lock:
            self._check_usable()
            if any(lane.busy for lane in self._lanes.values()):
                raise UserError(
                    "join() between backward() and step(), while gradients are on their way; call "
                    "step() first"
                )
            if self._joining is not None:
                raise UserError(
                    "join() is called a second time before the first is over; call it once"
                )
            self._joining = handle = Handle("join")
        self._link.join()
        return int(handle.wait())

    def lane(self, process_set: ProcessSet) -> Lane | None:
        """Where this process set's rounds run; None while one is on its way, for a rank alone, and
        where nothing is to be remembered (`Settings.cache_capacity`)."""
        with self._lock:
            self._check_usable()
            if process_set.size() == 1 or not self.settings.cache_capacity:
                return None
            number = process_set.process_set_id or 0
            lane = self._lanes.get(number)
            if lane is None:
                lane = self._lanes[number] = Lane(number, self._link, self.world.rank)
            return None if lane.busy else lane

    # ------------------------------------------------------------------ process sets

    def add_set(self, process_set: ProcessSet) -> ProcessSet:
        """Put a process set in use; all ranks call it, with the same ranks."""
        if process_set.process_set_id is not None:
            raise UserError(f"{process_set} is in use already")
        ranks = process_set.ranks or []
        if ranks[-1] >= self.world.world_size:
            raise UserError(
                f"{process_set}: rank {ranks[-1]} does not exist; the ranks are 0 to "
                f"{self.world.world_size - 1}"
            )
        same = [other for other in self._sets.values() if other.ranks == ranks]
        if same:
            raise UserError(
                f"a process set of the ranks {ranks} is in use already, number "
                f"{same[0].process_set_id}; use that one"
            )
        # Without a name, so that ranks which give different ones are told at once.
        self.begin(
            None,
            OperationRequest("add_set", splits=tuple(ranks)),
            global_process_set,
            [],
            [],
            process_set,
        ).wait()
        return process_set

    def remove_set(self, process_set: ProcessSet) -> bool:
        """Put a process set away; all ranks call it. False: it is not in use, or the global one."""
        if process_set.process_set_id in (None, GLOBAL_SET):
            return False
        number = process_set.process_set_id
        ask = OperationRequest("remove_set", root=number or 0, splits=tuple(process_set._members()))
        self.begin(str(number), ask, global_process_set, [], [], process_set).wait()
        return True

    def set_by_id(self, number: int) -> ProcessSet | None:
        """The process set with this number that is in use."""
        return self._sets.get(number)

    def close(self) -> None:
        """End: what waits on this rank fails, and what other ranks ask it for from now on."""
        with self._lock:
            if self._closed or os.getpid() != self._process:  # a fork of it has no part in it
                return
            self._closed = True
        self._link.leave(1.0, [number for number, lane in self._lanes.items() if not lane.busy])
        self._thread.join(5.0)
        self._fail_all("hvd.shutdown() was called")
        self.timeline.stop()
        groups = [process_set.group for process_set in self._sets.values()] + [
            lane.group for lane in self._lanes.values()
        ]
        for process_set in self._sets.values():
            process_set.put_away()
        self._sets.clear()
        if self.world.backend == "gloo":  # nccl's wait for ranks that may be gone
            for group in groups:
                _destroy(group)

    # ------------------------------------------------------------------ asking

    def named(self, kind: str, name: str | None, process_set: ProcessSet) -> str:
        if name is not None:
            return name
        key = (process_set.process_set_id or 0, kind)
        with self._lock:
            self._unnamed[key] += 1
            return f"{kind}.noname.{self._unnamed[key]}"

    def _check_usable(self) -> None:
        if self._closed:
            raise NotInitializedError
        if self._broken:
            raise HorovodInternalError(self._broken)

    def begin(
        self,
        name: str | None,
        ask: OperationRequest,
        process_set: ProcessSet,
        tensors: Tensors,
        outputs: Tensors,
        made_set: ProcessSet | None = None,
    ) -> Handle:
        """Begin what `ask` says; the operations above do it."""
        with self._lock:
            self._check_usable()
            process_set.rank()  # refuses a set that is not in use, or that this rank is not in
            own = self.named(ask.kind, name, process_set)
            key = (process_set.process_set_id or 0, ask.kind, own)
            if key in self._jobs:
                raise UserError(
                    f"{ask.kind} {own!r}: rank {self.world.rank} has begun an operation of this "
                    "name that is not over; wait for "
                    "it with hvd.synchronize(), or give each its own name"
                )
            ready = None
            if ask.device == "cuda":
                ready = torch.cuda.Event()
                ready.record()
            handle = Handle(f"{ask.kind} {own!r}")
            self._jobs[key] = LocalOperation(
                ask, process_set, list(tensors), list(outputs), handle, ready, made_set
            )
        self.timeline.asked(key)
        self._link.ask(key, ask, remember=name is not None)
        return handle

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        if self.world.device.type == "cuda":
            # As well. What this thread queues is ordered by itself, beside the caller's stream.
            torch.cuda.set_device(self.world.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.world.device))
        try:
            for message in self._link.messages():
                if "run" in message:
                    if not self._failed:
                        self._do(message["run"], message["active"])
                elif "fail" in message:
                    for set_id, kind, name in message["fail"]:
                        self._take((set_id, kind, name)).handle.fail(message["error"])
                elif "go" in message or "decline" in message:
                    go = "go" in message
                    # A lane whose first parts fail has told all ranks.
                    with contextlib.suppress(HorovodInternalError):
                        self._lanes[message["go" if go else "decline"]].told(go)
                elif "lane" in message:
                    self._open_lane(message["lane"], message["ranks"])
                elif "kept?" in message:
                    if not self._lanes[message["kept?"]].busy:
                        self._link.kept(message["kept?"])
                elif "joined" in message:
                    self._unnamed.clear()  # ranks that joined early have made fewer calls
                    joining, self._joining = self._joining, None
                    if joining is not None:
                        joining.finish(message["joined"])
                else:
                    self._fail_all(message["broken"])
                    for lane in self._lanes.values():
                        lane.give_up(self.world.backend == "nccl")
                    self._give_up()
            if not self._closed:
                self._fail_all(
                    "rank 0 is gone without a word: killed, crashed, or its host is down"
                )
        except Exception as error:
            self._fail_all(
                f"the engine of rank {self.world.rank} failed: {type(error).__name__}: {error}"
            )

    def _take(self, key: Key) -> LocalOperation:
        with self._lock:
            return self._jobs.pop(key)

    def _fail_all(self, text: str) -> None:
        with self._lock:
            self._broken = self._broken or text
            handles = [job.handle for job in self._jobs.values()] + (
                [self._joining] if self._joining is not None else []
            )
            self._jobs.clear()
            self._joining = None
            lanes = list(self._lanes.values())
        for handle in handles:
            handle.fail(text)
        for lane in lanes:
            lane.fail(text)

    def _give_up(self) -> None:
        """End the waiting of ranks that are in an operation in which another one failed: close the
        connections of the process sets, or abort what this thread has queued on the GPU."""
        if self.world.backend == "gloo":
            for process_set in self._sets.values():
                group, process_set.group = process_set.group, None
                _destroy(group)
        elif self._on_gpu:
            queued = torch.cuda.Event()
            queued.record()
            groups = [process_set.group for process_set in self._sets.values()]
            abort_unfinished([group for group in groups if group is not None], queued.query)

    def _do(self, entries: list[dict[str, Any]], active: int) -> None:
        keys: list[Key] = [(entry["key"][0], entry["key"][1], entry["key"][2]) for entry in entries]
        jobs = []
        for key, entry in zip(keys, entries, strict=True):
            with self._lock:
                job = self._jobs.get(key)
            jobs.append(
                job
                if job is not None
                else zeros(
                    OperationRequest.read(entry["ask"]), self._sets[key[0]], self.world.device
                )
            )
        self.timeline.began(keys)
        on_gpu = None
        try:
            for job in jobs:
                if job.ready is not None:
                    torch.cuda.current_stream().wait_event(job.ready)
            found = self._run_jobs(jobs, entries, active)
            if jobs[0].ask.device == "cuda":
                event = torch.cuda.Event()
                event.record()
                is_new = jobs[0].ask.kind not in ("allreduce", "broadcast")
                on_gpu = OnGPU(event, [(job.tensors, job.outputs) for job in jobs], is_new)
                self._on_gpu = [*(other for other in self._on_gpu if other.is_held()), on_gpu]
        except Exception as error:
            # Others may wait in it for this rank. All get the text that rank 0 hears first, which
            # is this one and not theirs: only then this rank ends their waiting (`_give_up`).
            self._failed = True
            text = failure(jobs[0].ask.kind, keys[0][2], self.world.rank, error)
            return self._link.stop_all(text)
        self.timeline.ended(keys)
        for key, job, entry, result in zip(keys, jobs, entries, found, strict=True):
            with self._lock:
                self._jobs.pop(key, None)
            job.handle.absent = entry.get("absent", ())
            job.handle.finish(result, on_gpu)
        return None

    def _run_jobs(
        self, jobs: list[LocalOperation], entries: list[dict[str, Any]], active: int
    ) -> list[Any]:
        job = jobs[0]
        if job.ask.kind == "add_set":
            assert job.made_set is not None
            ranks = list(job.ask.splits)
            group = None if self.world.is_alone else self._new_group(ranks)
            self._put_in_use(job.made_set, entries[0]["set"], ranks, group)
        elif job.ask.kind == "remove_set":
            self._sets.pop(job.ask.root).put_away()
            self._lanes.pop(job.ask.root, None)
        else:
            return run(jobs, entries, active, self._buffers)
        return [None]

    def _new_group(self, ranks: list[int]) -> Any:
        backend = "cpu:gloo,cuda:nccl" if self.world.backend == "nccl" else "gloo"
        group = dist.new_group(
            ranks, timeout=timedelta(seconds=DEFAULT_TIMEOUT.total_seconds()), backend=backend
        )
        return group if self.world.rank in ranks and len(ranks) > 1 else None

    def _open_lane(self, number: int, ranks: list[int]) -> None:
        group = self._new_group(ranks)  # all ranks of the world make it
        if self.world.rank in ranks:
            # Connects them now: later it would stop whoever begins the first part.
            if self.world.device.type == "cuda":
                dist.all_reduce(torch.zeros(1, device=self.world.device), group=group)
            self._lanes[number].group = group

    def _put_in_use(
        self, process_set: ProcessSet, number: int, ranks: list[int], group: Any
    ) -> None:
        process_set.put_in_use(number, ranks, self.world.rank, group)
        self._sets[number] = process_set


def _destroy(group: Any) -> None:
    if group is not None and dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)


_current: Engine | None = None


def current() -> Engine:
    """The engine of this process.

    Raises:
        NotInitializedError: before ``hvd.init()``, and after ``hvd.shutdown()``.
    """
    if _current is None:
        raise NotInitializedError
    return _current


def set_current(engine: Engine | None) -> None:
    """Called by `basics`."""
    global _current
    _current = engine
