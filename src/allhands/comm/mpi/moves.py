"""What each collective does on the thread of its communicator, on contiguous memory of one length
on all ranks.

Long tensors run in pieces, half-precision reductions through float32. What only moves is moved as
bytes, so that any dtype can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from allhands.comm.mpi.buffers import (
    PIECE_BYTES,
    REDUCED_BYTES,
    Reduction,
    as_bytes,
    average,
    memory,
    message,
    overlap,
    pieces,
)
from allhands.errors import WorldError


def check_length(came: int, expected: int, peer: int) -> None:
    """Raise `WorldError` for a message whose length, in bytes, is not what its receiver has room
    for."""
    if came != expected:
        raise WorldError(
            f"group rank {peer} sent {came} bytes where {expected} were expected; both sides must "
            "name the same shape and dtype"
        )


class Moves:
    """The collectives of one communicator. `tag` is kept from the user, for the messages of
    collectives."""

    def __init__(self, MPI: Any, comm: Any, tag: int) -> None:
        self.MPI, self.comm, self.tag = MPI, comm, tag
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.piece_bytes = PIECE_BYTES
        self.reduced_bytes = next(
            b for name, b in REDUCED_BYTES.items() if name in MPI.Get_library_version()
        )

    def reduce(self, tensor: torch.Tensor, kind: Reduction, root: int | None = None) -> None:
        """Reduce in place on all ranks, or on rank `root` alone, which leaves the others' tensors
        as they were."""
        flat = tensor.reshape(-1)
        receives = root is None or root == self.rank
        for start, stop in pieces(flat.numel(), self.reduced_bytes // max(flat.itemsize, 4)):
            part = flat[start:stop]
            used = part if kind.wide is None else part.to(kind.wide)
            buffer = [memory(used, self.MPI), used.numel(), kind.datatype]
            if root is None:
                self.comm.Allreduce(self.MPI.IN_PLACE, buffer, kind.operation)
            elif receives:
                self.comm.Reduce(self.MPI.IN_PLACE, buffer, kind.operation, root)
            else:
                self.comm.Reduce(buffer, None, kind.operation, root)
            if receives and kind.divide:
                average(used, self.size)
            if receives and used is not part:
                part.copy_(used)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        flat = as_bytes(tensor)
        for start, stop in pieces(flat.numel(), self.piece_bytes):
            self.comm.Bcast([memory(flat[start:stop], self.MPI), stop - start, self.MPI.BYTE], root)

    def all_gather(self, outputs: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """`outputs[r]` becomes rank r's `own`; `own` may be the place of this rank in `outputs`."""
        source, sinks = as_bytes(own), [as_bytes(output) for output in outputs]
        if any(overlap(source, sink) for sink in sinks):
            source = source.clone()
        room = torch.empty(
            self.size, min(self.piece_bytes, source.numel()), dtype=torch.uint8, device=own.device
        )
        for start, stop in pieces(source.numel(), self.piece_bytes):
            gathered = room.reshape(-1)[: self.size * (stop - start)].view(self.size, -1)
            part = source[start:stop]
            buffer = [memory(part, self.MPI), part.numel(), self.MPI.BYTE]
            self.comm.Allgather(buffer, [memory(gathered, self.MPI), part.numel(), self.MPI.BYTE])
            for sink, row in zip(sinks, gathered, strict=True):
                sink[start:stop].copy_(row)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], kind: Reduction
    ) -> None:
        """`output` becomes the reduction of all ranks' `inputs[own rank]`."""
        flat = output.reshape(-1)
        rows = [
            row.reshape(-1).clone() if overlap(row, output) else row.reshape(-1) for row in inputs
        ]
        largest = max(1, self.piece_bytes // (max(flat.itemsize, 4) * self.size))
        dtype = kind.wide or flat.dtype
        for start, stop in pieces(flat.numel(), largest):
            sent = torch.empty(self.size, stop - start, dtype=dtype, device=flat.device)
            for place, row in zip(sent, rows, strict=True):
                place.copy_(row[start:stop])
            part = flat[start:stop]
            used = part if kind.wide is None else torch.empty_like(part, dtype=dtype)
            arguments = [memory(sent, self.MPI), part.numel(), kind.datatype]
            self.comm.Reduce_scatter_block(
                arguments, [memory(used, self.MPI), part.numel(), kind.datatype], kind.operation
            )
            if kind.divide:
                average(used, self.size)
            if used is not part:
                part.copy_(used)

    def exchange(
        self, outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]
    ) -> None:
        """Send `inputs[r]` to rank r, receive `outputs[r]` from it; None or nothing in a tensor is
        no message.

        What r sends here and what this rank expects of it must have one length, which may differ
        from rank to rank.
        """
        own_in, own_out = inputs[self.rank], outputs[self.rank]
        if own_in is not None and own_out is not None and own_out.data_ptr() != own_in.data_ptr():
            as_bytes(own_out).copy_(as_bytes(own_in))
        # Each rank starts with its neighbour, so that not all of them send to rank 0 first.
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        received = [
            (peer, out) for peer in peers if (out := outputs[peer]) is not None and out.nbytes
        ]
        requests = [
            self.comm.Irecv(message(out, self.MPI), peer, self.tag) for peer, out in received
        ]
        requests += [
            self.comm.Isend(message(tensor, self.MPI), peer, self.tag)
            for peer in peers
            if (tensor := inputs[peer]) is not None and tensor.nbytes
        ]
        statuses = [self.MPI.Status() for _ in requests]
        self.MPI.Request.Waitall(requests, statuses)
        for (peer, out), status in zip(received, statuses, strict=False):
            check_length(status.Get_elements(self.MPI.BYTE), out.nbytes, peer)

    def sparse_sum(self, tensor: torch.Tensor) -> None:
        """Sum a sparse COO tensor of the CPU over the ranks, in place; each rank may have other
        entries."""
        entries = tensor.coalesce()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.all_gather(counts, torch.tensor([entries.values().shape[0]]))
        gathered: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rank, count in enumerate(int(count) for count in counts):
            mine = rank == self.rank
            if mine:
                indices = entries.indices().contiguous()
            else:
                indices = entries.indices().new_empty(tensor.sparse_dim(), count)
            if mine:
                values = entries.values().contiguous()
            else:
                values = entries.values().new_empty(count, *entries.values().shape[1:])
            self.broadcast(indices, rank)
            self.broadcast(values, rank)
            gathered.append((indices, values))
        where, what = zip(*gathered, strict=True)
        total = torch.sparse_coo_tensor(
            torch.cat(where, dim=1), torch.cat(what), tensor.shape, check_invariants=False
        )
        tensor.copy_(total.coalesce())
