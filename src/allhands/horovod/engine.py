"""The collective operations of one rank: submitted by any thread, matched by name over the ranks, run by one thread in one order.

Every operation takes a list of tensors, which travel together and are all or nothing; one tensor is a list of one. It returns a
`Handle` at once. Tensors are torch's, on the CPU or a GPU, and are not to be changed before the handle's `wait` has returned.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allhands.errors import UserError
from allhands.horovod import collectives, objects
from allhands.horovod.checks import Ask
from allhands.horovod.exceptions import HorovodInternalError, NotInitializedError
from allhands.horovod.handles import Handle, OnGPU
from allhands.horovod.jobs import Job, run, zeros
from allhands.horovod.link import Link
from allhands.horovod.matcher import GLOBAL_SET, Key, Matcher
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import Adasum, Average, ReduceOp, Sum
from allhands.horovod.settings import Settings
from allhands.horovod.timeline import Timeline
from allhands.world import DEFAULT_TIMEOUT, World

Tensors = Sequence[torch.Tensor]


class Engine:
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
        self._jobs: dict[Key, Job] = {}
        self._unnamed: Counter[tuple[int, str]] = Counter()
        self._sets: dict[int, ProcessSet] = {}
        self._joining: Handle | None = None
        self._broken = ""
        self._closed = False
        self._process = os.getpid()
        self._buffers = collectives.Buffers()
        self._on_gpu: list[OnGPU] = []
        matcher = None
        if world.rank == 0:
            matcher = Matcher(world.world_size, settings.fusion_threshold, settings.stall_warn, settings.stall_stop)
        group = None if world.is_alone else self._new_group(list(range(world.world_size)))
        self._put_in_use(global_process_set, GLOBAL_SET, list(range(world.world_size)), group)
        self._link = Link(world, store, matcher, settings.cache_capacity)
        self._thread = threading.Thread(target=self._run, name="allhands-horovod", daemon=True)
        self._thread.start()
        if settings.timeline:
            self.timeline.start(settings.timeline)

    # ------------------------------------------------------------------ operations

    def allreduce(
        self, tensors: Tensors, *, name: str | None = None, op: ReduceOp = Average, prescale_factor: float = 1.0,
        postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, outputs: Tensors | None = None,
        tensor_names: Sequence[str] = (),
    ) -> Handle:  # fmt: skip
        """Reduce each tensor over the ranks; the result is post times the reduction of pre times the values.

        `outputs` may be the tensors themselves; None makes new ones. `tensor_names` are for messages.
        """
        ask = self.ask_allreduce(tensors, op, prescale_factor, postscale_factor, process_set, tensor_names)
        made = [torch.empty_like(tensor) for tensor in tensors] if outputs is None else outputs
        return self.begin(name, ask, process_set, tensors, made)

    def ask_allreduce(
        self, tensors: Tensors, op: ReduceOp, pre: float, post: float, process_set: ProcessSet, names: Sequence[str] = (),
        absent: Sequence[int] = (),
    ) -> Ask:  # fmt: skip
        """What `allreduce` asks for, to be given to `begin` again and again, with tensors like these or with one that holds them
        all, one after another. `absent` are the places of tensors that this rank has no value for, and gives zeros.
        """
        if op == Adasum and process_set.size() & (process_set.size() - 1):
            raise UserError(
                f"op Adasum needs a power of two of ranks, and there are {process_set.size()}; set op to hvd.Average, or train "
                "with 2, 4, 8 ... ranks"
            )
        return self._ask("allreduce", tensors, names, absent=tuple(absent), op=op, pre=float(pre), post=float(post))

    def allgather(
        self, tensors: Tensors, *, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """All ranks' rows of each tensor, in the order of the ranks; the first dimension may differ between them."""
        self._need_rows("allgather", tensors)
        return self.begin(name, self._ask("allgather", tensors), process_set, tensors, [])

    def broadcast(
        self, tensors: Tensors, root_rank: int, *, name: str | None = None, process_set: ProcessSet = global_process_set,
        outputs: Tensors | None = None, tensor_names: Sequence[str] = (),
    ) -> Handle:  # fmt: skip
        """Rank `root_rank`'s tensors, on all ranks. It is counted in the whole world, also in a process set."""
        members = process_set._members()
        if root_rank not in members:
            raise UserError(f"broadcast: root_rank={root_rank} is none of the ranks {members}; set root_rank to one of them")
        ask = self._ask("broadcast", tensors, tensor_names, root=int(root_rank))
        made = [torch.empty_like(tensor) for tensor in tensors] if outputs is None else outputs
        return self.begin(name, ask, process_set, tensors, made)

    def alltoall(
        self, tensor: torch.Tensor, splits: Any = None, *, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """The rows that each rank has for this one, and how many came from each (int32).

        `splits`: how many rows go to each rank, in the order of the ranks; None deals them evenly.
        """
        self._need_rows("alltoall", [tensor])
        size = process_set.size()
        given = [int(number) for number in splits] if splits is not None else [len(tensor) // size] * size
        if len(given) != size or min(given) < 0 or sum(given) != len(tensor):
            raise UserError(
                f"alltoall: the splits {given} of {len(tensor)} rows over {size} ranks; set splits to {size} numbers of at "
                f"least 0 whose sum is {len(tensor)}"
            )
        return self.begin(name, self._ask("alltoall", [tensor], splits=tuple(given)), process_set, [tensor], [])

    def reducescatter(
        self, tensors: Tensors, *, name: str | None = None, op: ReduceOp = Average, prescale_factor: float = 1.0,
        postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ) -> Handle:  # fmt: skip
        """This rank's rows of each reduced tensor; the first ranks have one more where they do not divide evenly."""
        self._need_rows("reducescatter", tensors)
        if op not in (Average, Sum):
            raise UserError(f"reducescatter: op {op} is not possible; set op to hvd.Average or hvd.Sum")
        ask = self._ask("reducescatter", tensors, op=op, pre=float(prescale_factor), post=float(postscale_factor))
        return self.begin(name, ask, process_set, tensors, [])

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Wait until all ranks have come here."""
        self.begin(None, Ask("barrier"), process_set, [], []).wait()

    def join(self) -> int:
        """Wait until all ranks have joined, giving zeros to their allreduces meanwhile; the rank that joined last."""
        with self._lock:
            self._check_usable()
            if self._joining is not None:
                raise UserError("join() is called a second time before the first is over; call it once")
            self._joining = handle = Handle("join")
        self._link.join()
        return int(handle.wait())

    def broadcast_object(
        self, obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """Rank `root_rank`'s object, which consists of plain values, containers, tensors and numpy arrays.

        Raises:
            UserError: on all ranks, when it holds something else.
        """
        name = self._named("broadcast_object", name, process_set)
        data = objects.pack(obj) if self.world.rank == root_rank else torch.zeros(0, dtype=torch.uint8)
        length = torch.tensor([len(data)])
        (length,) = self.broadcast([length], root_rank, name=f"{name}.length", process_set=process_set).wait()
        whole = data if self.world.rank == root_rank else torch.zeros(int(length), dtype=torch.uint8)
        (whole,) = self.broadcast([whole], root_rank, name=f"{name}.data", process_set=process_set).wait()
        return objects.unpack(whole)

    def allgather_object(self, obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
        """Every rank's object, in the order of the ranks; see `broadcast_object`."""
        name = self._named("allgather_object", name, process_set)
        data = objects.pack(obj)
        handle = self.allgather([torch.tensor([len(data)]), data], name=name, process_set=process_set)
        lengths, whole = handle.wait()
        return [objects.unpack(part) for part in whole.split(lengths.tolist())]

    def add_set(self, process_set: ProcessSet) -> ProcessSet:
        """Put a process set in use; all ranks call it, with the same ranks."""
        if process_set.process_set_id is not None:
            raise UserError(f"{process_set} is in use already")
        ranks = process_set.ranks or []
        if ranks[-1] >= self.world.world_size:
            raise UserError(f"{process_set}: rank {ranks[-1]} does not exist; the ranks are 0 to {self.world.world_size - 1}")
        same = [other for other in self._sets.values() if other.ranks == ranks]
        if same:
            raise UserError(
                f"a process set of the ranks {ranks} is in use already, number {same[0].process_set_id}; use that one"
            )
        # Without a name, so that ranks which give different ones are told at once.
        self.begin(None, Ask("add_set", splits=tuple(ranks)), global_process_set, [], [], process_set).wait()
        return process_set

    def remove_set(self, process_set: ProcessSet) -> bool:
        """Put a process set away; all ranks call it. False: it is not in use, or the global one."""
        if process_set.process_set_id in (None, GLOBAL_SET):
            return False
        number = process_set.process_set_id
        ask = Ask("remove_set", root=number or 0, splits=tuple(process_set._members()))
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
        self._link.leave(1.0)
        self._thread.join(5.0)
        self._fail_all("hvd.shutdown() was called")
        self.timeline.stop()
        groups = [process_set.group for process_set in self._sets.values() if process_set.group is not None]
        for process_set in self._sets.values():
            process_set.put_away()
        self._sets.clear()
        for group in groups:
            if self.world.backend == "gloo" and dist.is_initialized():  # nccl's wait for ranks that may be gone
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(group)

    # ------------------------------------------------------------------ asking

    def _ask(self, kind: str, tensors: Tensors, names: Sequence[str] = (), **more: Any) -> Ask:
        if not tensors:
            raise UserError(f"{kind}: the list of tensors is empty; give at least one tensor")
        for place, tensor in enumerate(tensors):
            label = repr(names[place]) if names else f"number {place}"
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                raise UserError(f"{kind}: tensor {label} is {_kind(tensor)}, and has to be a dense torch.Tensor")
            if not tensor.is_contiguous():
                raise UserError(f"{kind}: tensor {label} is not contiguous; give tensor.contiguous()")
        devices = {tensor.device.type for tensor in tensors}
        if len(devices) > 1 or not devices <= {"cpu", "cuda"}:
            raise UserError(
                f"{kind}: tensors of one call lie on {' and '.join(sorted(devices))}; they have to be on the CPU, or a GPU"
            )
        if "cuda" in devices and self.world.backend != "nccl" and not self.world.is_alone:
            raise UserError(
                f"{kind}: the tensors are on a GPU, and the ranks are connected by {self.world.backend}; give tensor.cpu(), or "
                "start processes that see one GPU each"
            )
        if "cuda" in devices and not self.world.is_alone and any(tensor.device != self.world.device for tensor in tensors):
            raise UserError(
                f"{kind}: a tensor is on {tensors[0].device}, and this rank's GPU is {self.world.device}; call "
                "torch.cuda.set_device(hvd.local_rank()) before tensors are made"
            )
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        dtypes = tuple(str(tensor.dtype)[6:] for tensor in tensors)
        return Ask(kind, shapes, dtypes, tuple(names), device=devices.pop(), **more)

    def _need_rows(self, kind: str, tensors: Tensors) -> None:
        for tensor in tensors:
            if not tensor.dim():
                raise UserError(f"{kind}: a tensor without dimensions has no rows; give tensor.reshape(1)")

    def _named(self, kind: str, name: str | None, process_set: ProcessSet) -> str:
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
        self, name: str | None, ask: Ask, process_set: ProcessSet, tensors: Tensors, outputs: Tensors,
        made_set: ProcessSet | None = None,
    ) -> Handle:  # fmt: skip
        """Begin what `ask` says; the operations above do it."""
        with self._lock:
            self._check_usable()
            process_set.rank()  # refuses a set that is not in use, or that this rank is not in
            own = self._named(ask.kind, name, process_set)
            key = (process_set.process_set_id or 0, ask.kind, own)
            if key in self._jobs:
                raise UserError(
                    f"{ask.kind} {own!r}: rank {self.world.rank} has begun an operation of this name that is not over; wait for "
                    "it with hvd.synchronize(), or give each its own name"
                )
            ready = None
            if ask.device == "cuda":
                ready = torch.cuda.Event()
                ready.record()
            handle = Handle(f"{ask.kind} {own!r}")
            self._jobs[key] = Job(ask, process_set, list(tensors), list(outputs), handle, ready, made_set)
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
                    self._do(message["run"], message["active"])
                elif "fail" in message:
                    for set_id, kind, name in message["fail"]:
                        self._take((set_id, kind, name)).handle.fail(message["error"])
                elif "joined" in message:
                    self._unnamed.clear()  # ranks that joined early have made fewer calls
                    joining, self._joining = self._joining, None
                    if joining is not None:
                        joining.finish(message["joined"])
                else:
                    self._fail_all(message["broken"])
            if not self._closed:
                self._fail_all("rank 0 is gone without a word: killed, crashed, or its host is down")
        except Exception as error:
            self._fail_all(f"the engine of rank {self.world.rank} failed: {type(error).__name__}: {error}")

    def _take(self, key: Key) -> Job:
        with self._lock:
            return self._jobs.pop(key)

    def _fail_all(self, text: str) -> None:
        with self._lock:
            self._broken = self._broken or text
            handles = [job.handle for job in self._jobs.values()] + ([self._joining] if self._joining is not None else [])
            self._jobs.clear()
            self._joining = None
        for handle in handles:
            handle.fail(text)

    def _do(self, entries: list[dict[str, Any]], active: int) -> None:
        keys: list[Key] = [(entry["key"][0], entry["key"][1], entry["key"][2]) for entry in entries]
        jobs = []
        for key, entry in zip(keys, entries, strict=True):
            with self._lock:
                job = self._jobs.get(key)
            jobs.append(job if job is not None else zeros(Ask.read(entry["ask"]), self._sets[key[0]], self.world.device))
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
            text = f"{jobs[0].ask.kind} {keys[0][2]!r} failed on rank {self.world.rank}: {type(error).__name__}: {error}"
            self._link.stop_all(text)
            return self._fail_all(text)
        self.timeline.ended(keys)
        for key, job, entry, result in zip(keys, jobs, entries, found, strict=True):
            with self._lock:
                self._jobs.pop(key, None)
            job.handle.absent = entry.get("absent", ())
            job.handle.finish(result, on_gpu)
        return None

    def _run_jobs(self, jobs: list[Job], entries: list[dict[str, Any]], active: int) -> list[Any]:
        job = jobs[0]
        if job.ask.kind == "add_set":
            assert job.made_set is not None
            ranks = list(job.ask.splits)
            group = None if self.world.is_alone else self._new_group(ranks)
            self._put_in_use(job.made_set, entries[0]["set"], ranks, group)
        elif job.ask.kind == "remove_set":
            self._sets.pop(job.ask.root).put_away()
        else:
            return run(jobs, entries, active, self._buffers)
        return [None]

    def _new_group(self, ranks: list[int]) -> Any:
        backend = "cpu:gloo,cuda:nccl" if self.world.backend == "nccl" else "gloo"
        group = dist.new_group(ranks, timeout=timedelta(seconds=DEFAULT_TIMEOUT.total_seconds()), backend=backend)
        return group if self.world.rank in ranks and len(ranks) > 1 else None

    def _put_in_use(self, process_set: ProcessSet, number: int, ranks: list[int], group: Any) -> None:
        process_set.put_in_use(number, ranks, self.world.rank, group)
        self._sets[number] = process_set


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of layout {value.layout}"
    return f"a {type(value).__name__}"


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
