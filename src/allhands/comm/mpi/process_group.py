"""The process group: torch.distributed's operations over one MPI communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allhands.comm.mpi.buffers import Wire, message, reduction
from allhands.comm.mpi.futures import Callbacks, depth
from allhands.comm.mpi.moves import Moves, check_length
from allhands.comm.mpi.operand_checks import (
    at_root,
    check_parts,
    check_root,
    check_splits,
    complex_as_pairs,
    dense,
    shape_of,
)
from allhands.comm.mpi.work import Channel, Work, poller
from allhands.errors import UserError, WorldError

Tensors = Sequence[torch.Tensor]


# torch's stubs declare overloads which nothing in torch calls on a group that is written in Python.
_Base: Any = dist.ProcessGroup


class MPIGroup(_Base):
    """A `torch.distributed` process group over an MPI communicator; made by
    ``init_process_group("mpi")`` and ``new_group``.

    `channels` run its collectives: the first what the program calls, the second what callbacks of
    futures call; the first one's communicator also carries sends and receives. `timeout` bounds
    each operation, in seconds; `cuda_aware` says that the MPI library takes GPU memory, which is
    otherwise staged through pinned memory. The names of the methods are torch's.

    Every operation returns its `Work` at once, or raises `UserError` for what can be seen to be
    wrong here and now.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, channels: Sequence[Channel], timeout: float, cuda_aware: bool) -> None:
        moves = channels[0].moves
        super().__init__(moves.rank, moves.size)
        self.MPI, self.comm, self.tag = moves.MPI, moves.comm, moves.tag
        self.channels, self.timeout = tuple(channels), timeout
        self._callbacks = Callbacks()
        self.closed = False
        self.stuck: WorldError | None = None  # the failed operation that a thread is still in
        self._direct = cuda_aware
        self._group_name = self._group_desc = "undefined"

    # What torch asks of a group.

    def getBackendName(self) -> str:
        return "mpi"

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

    def getGroupName(self) -> str:
        return self._group_name

    def getGroupDesc(self) -> str:
        return self._group_desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> MPIGroup:
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def abort(self) -> None:
        self._close("the group was aborted")

    def shutdown(self) -> None:
        """End the group, after what was called on it is complete or has failed."""
        if self.closed:
            return
        for channel in self.channels:
            if not channel.close():
                self.stuck = channel.broken
            elif channel.broken is None:
                channel.moves.comm.Free()
        self._callbacks.close()
        self._close("the group was destroyed")

    def _close(self, why: str) -> None:
        self.closed = True
        for channel in self.channels:
            channel.broken = channel.broken or WorldError(why)

    # Reductions.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._all_reduce("all_reduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._all_reduce("all_reduce", tensors, opts or dist.AllreduceCoalescedOptions())

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any) -> Work:
        if any(tensor.layout == torch.sparse_coo for tensor in tensors):
            return self._sparse_all_reduce(name, tensors, opts)
        numbers = complex_as_pairs(name, tensors, opts.reduceOp)
        wires, kinds = self._wires(name, numbers), self._kinds(name, numbers, opts.reduceOp)

        def run(moves: Moves) -> None:
            for wire, kind in zip(wires, kinds, strict=True):
                moves.reduce(wire.begin(), kind)
                wire.end()

        return self._submit(name, tensors, opts, run)

    def _sparse_all_reduce(self, name: str, tensors: Tensors, opts: Any) -> Work:
        (tensor,) = tensors
        if opts.reduceOp != dist.ReduceOp.SUM or tensor.is_cuda:
            raise UserError(
                f"{name} of a sparse tensor over MPI: only ReduceOp.SUM on the CPU; pass "
                "tensor.to_dense()"
            )
        return self._submit(name, tensors, opts, lambda moves: moves.sparse_sum(tensor))

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.ReduceOptions()
        root = check_root(self, "reduce", opts.rootRank)
        numbers = complex_as_pairs("reduce", tensors, opts.reduceOp)
        wires, kinds = self._wires("reduce", numbers), self._kinds("reduce", numbers, opts.reduceOp)

        def run(moves: Moves) -> None:
            for wire, kind in zip(wires, kinds, strict=True):
                moves.reduce(wire.begin(), kind, root)
                if root == self.rank():
                    wire.end()

        return self._submit("reduce", tensors, opts, run)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        return self._reduce_scatter(
            "reduce_scatter", outputs, [list(rows) for rows in inputs], opts
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        return self._reduce_scatter("reduce_scatter_tensor", outputs, inputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._reduce_scatter("reduce_scatter_tensor", [output], [input], opts)

    # torch's names before 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, name: str, outputs: Tensors, inputs: Sequence[Any], opts: Any
    ) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        rows = []
        for output, given in zip(outputs, inputs, strict=True):
            check_parts(self, name, "input", given, output, "output")
            parts = given if isinstance(given, list) else [given]
            rows.append(self._wires(name, complex_as_pairs(name, parts, opts.reduceOp)))
        numbers = complex_as_pairs(name, outputs, opts.reduceOp)
        sinks = self._wires(name, numbers, read=False)
        kinds = self._kinds(name, numbers, opts.reduceOp)

        def run(moves: Moves) -> None:
            for sink, wires, kind in zip(sinks, rows, kinds, strict=True):
                moves.reduce_scatter(sink.begin(), self._parts(wires), kind)
                sink.end()

        return self._submit(name, outputs, opts, run)

    # Data that moves.

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        root = check_root(self, "broadcast", opts.rootRank)
        wires = self._wires("broadcast", tensors, read=root == self.rank())

        def run(moves: Moves) -> None:
            for wire in wires:
                moves.broadcast(wire.begin(), root)
                if root != self.rank():
                    wire.end()

        return self._submit("broadcast", tensors, opts, run)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self._all_gather("all_gather", [list(parts) for parts in outputs], inputs, opts)

    allgather_coalesced = allgather

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        return self._all_gather("all_gather_into_tensor", outputs, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._all_gather("all_gather_into_tensor", [output], [input], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, name: str, outputs: Sequence[Any], inputs: Tensors, opts: Any) -> Work:
        sources, sinks = self._wires(name, inputs), []
        for given, own in zip(outputs, inputs, strict=True):
            check_parts(self, name, "output", given, own, "input")
            sinks.append(
                self._wires(name, given if isinstance(given, list) else [given], read=False)
            )

        def run(moves: Moves) -> None:
            for source, wires in zip(sources, sinks, strict=True):
                own = source.begin()
                moves.all_gather(self._parts(wires), own)
                for wire in wires:
                    wire.end()

        return self._submit(
            name, outputs if name == "all_gather_into_tensor" else outputs[0], opts, run
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.GatherOptions()
        (own,) = inputs
        root = check_root(self, "gather", opts.rootRank)
        parts = at_root(self, "gather", "gather_list", outputs, root, own)
        source, sinks = self._wires("gather", [own]), self._wires("gather", parts, read=False)

        def run(moves: Moves) -> None:
            sent: list[torch.Tensor | None] = [None] * self.size()
            sent[root] = source[0].begin()
            received = [sink.begin() for sink in sinks] if sinks else [None] * self.size()
            moves.exchange(received, sent)
            for sink in sinks:
                sink.end()

        return self._submit("gather", parts, opts, run)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        opts = opts or dist.ScatterOptions()
        (own,) = outputs
        root = check_root(self, "scatter", opts.rootRank)
        parts = at_root(self, "scatter", "scatter_list", inputs, root, own)
        sources, sink = self._wires("scatter", parts), self._wires("scatter", [own], read=False)[0]

        def run(moves: Moves) -> None:
            received: list[torch.Tensor | None] = [None] * self.size()
            received[root] = sink.begin()
            sent = [source.begin() for source in sources] if sources else [None] * self.size()
            moves.exchange(received, sent)
            sink.end()

        return self._submit("scatter", [own], opts, run)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for what, given in (("output", outputs), ("input", inputs)):
            if len(given) != self.size():
                raise UserError(
                    f"all_to_all over {self.size()} ranks needs as many {what} tensors, but got "
                    f"{len(given)}"
                )
        sources = self._wires("all_to_all", inputs)
        sinks = self._wires("all_to_all", outputs, read=False)

        def run(moves: Moves) -> None:
            moves.exchange([sink.begin() for sink in sinks], [source.begin() for source in sources])
            for sink in sinks:
                sink.end()

        return self._submit("all_to_all", outputs, opts, run)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        name = "all_to_all_single"
        if output.dtype != input.dtype:
            raise UserError(
                f"{name}: the output is {output.dtype} but the input {input.dtype}; give both one "
                "dtype"
            )
        into = check_splits(self, name, "output", output, output_splits)
        out_of = check_splits(self, name, "input", input, input_splits)
        sink, source = self._wires(name, [output], read=False)[0], self._wires(name, [input])[0]

        def run(moves: Moves) -> None:
            moves.exchange(sink.begin().split(into), source.begin().split(out_of))
            sink.end()

        return self._submit(name, [output], opts, run)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        return self._submit("barrier", [], opts, lambda moves: moves.comm.Barrier())

    # From one rank to another.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        work, wire = self._one_to_one("send to", tensor, dst, tag, read=True)
        request = self.comm.Isend(message(wire.begin(), self.MPI), dst, tag)

        def finish(status: Any) -> None:
            del status, wire.memory  # not before: MPI reads it

        poller.add(work, request, finish, self.channels[0])
        return work

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        work, wire = self._one_to_one("recv from", tensor, src, tag, read=False)
        work.receives = True
        buffer = wire.begin()
        request = self.comm.Irecv(
            message(buffer, self.MPI), self.MPI.ANY_SOURCE if src < 0 else src, tag
        )

        def finish(status: Any) -> None:
            work.source = status.Get_source()
            check_length(status.Get_elements(self.MPI.BYTE), buffer.nbytes, work.source)
            wire.end()

        poller.add(work, request, finish, self.channels[0])
        return work

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)

    def _one_to_one(
        self, name: str, tensor: torch.Tensor, peer: int, tag: int, read: bool
    ) -> tuple[Work, Wire]:
        if peer >= self.size():
            raise UserError(
                f"{name} group rank {peer}, but the group has ranks 0 to {self.size() - 1}"
            )
        if not 0 <= tag < self.tag:
            raise UserError(
                f"{name} group rank {peer}: tag={tag}, but this MPI library has tags from 0 to "
                f"{self.tag - 1}"
            )
        if self.closed:
            raise WorldError(f"{name} group rank {peer}: {self.channels[0].broken}")
        (wire,) = self._wires(name, [tensor], read)

        def what() -> str:
            return (
                f"{name} {'any rank' if peer < 0 else f'group rank {peer}'}, tag {tag} "
                f"({shape_of(tensor)}), {self._where()}"
            )

        return Work(what, [tensor], self.timeout, self._callbacks, peer), wire

    # What the operations share.

    def _submit(
        self, name: str, outputs: Sequence[Any], opts: Any, run: Callable[[Moves], None]
    ) -> Work:
        told = getattr(opts, "timeout", None)
        own = told.total_seconds() if told is not None else 0.0
        channel = self.channels[min(depth(), len(self.channels) - 1)]
        number = channel.started
        first = next(iter(outputs), None)

        def what() -> str:
            return (
                f"{name} number {number}{f' ({shape_of(first)})' if first is not None else ''}, "
                f"{self._where()}"
            )

        work = Work(
            what, list(outputs), own if own > 0 else self.timeout, self._callbacks, number=number
        )
        channel.submit(work, run)
        return work

    def _where(self) -> str:
        ranks = self.channels[0].members
        members = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
        return (
            f"on rank {ranks[self.rank()]} ({self.MPI.Get_processor_name()}), in the mpi group "
            f"of ranks {members}"
        )

    def _wires(self, name: str, tensors: Tensors, read: bool = True) -> list[Wire]:
        return [Wire(dense(name, tensor), self._direct, read) for tensor in tensors]

    def _kinds(self, name: str, tensors: Tensors, op: Any) -> list[Any]:
        return [reduction(name, op, tensor.dtype, self.MPI) for tensor in tensors]

    def _parts(self, wires: Sequence[Wire]) -> Sequence[torch.Tensor]:
        """One part a rank, of one tensor a rank or of one tensor of all."""
        begun = [wire.begin() for wire in wires]
        return begun if len(begun) > 1 else list(begun[0].reshape(self.size(), -1))
