"""Tensors as MPI sees them: memory without a copy where that can be, dtypes, operations, and
pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from allhands.errors import UserError

# Long messages travel in pieces that stay in the cache.
PIECE_BYTES = 1 << 20
# Those of all-reduce and reduce: for 25 MB between two ranks of a host, the fastest or nearly so
# (benchmarks/mpi_allreduce.py).
REDUCED_BYTES = {"Open MPI": 1 << 19, "": 1 << 22}
# MPI before version 4 counts in 32 bits.
LARGEST_COUNT = (1 << 31) - 1

_OPERATIONS = {
    "SUM": "SUM",
    "AVG": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_DATATYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "UINT8_T",
}
# Truth values are bytes of 0 and 1: their sum is "or", as nccl has it, and their product is "and".
_OF_BOOL = {"SUM": "MAX", "PRODUCT": "MIN"}


class Reduction(NamedTuple):
    """How a dtype is reduced: MPI's operation and datatype, the dtype it is computed in (None: its
    own), AVG's division."""

    operation: Any
    datatype: Any
    wide: torch.dtype | None
    divide: bool


def reduction(what: str, op: Any, dtype: torch.dtype, MPI: Any) -> Reduction:
    """Raises `UserError`, naming both, for an operation that MPI does not have or that means
    nothing for this dtype."""
    name = next((name for name in _OPERATIONS if op == getattr(ReduceOp, name)), None)
    known = ", ".join(_OPERATIONS)
    if name is None:
        asked = "PREMUL_SUM" if op == ReduceOp.PREMUL_SUM else str(op)
        if asked == "PREMUL_SUM":
            instead = "multiply the tensor by the factor first, and write ReduceOp.SUM"
        else:
            instead = f"write one of {known}"
        raise UserError(f"{what}: ReduceOp.{asked} does not exist over MPI; {instead}")
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else None
    datatype = _DATATYPES.get(wide or dtype)
    if datatype is None:
        raise UserError(
            f"{what}: {dtype} cannot be reduced over MPI; convert the tensor, e.g. to torch.float32"
        )
    if dtype.is_floating_point and name in {"BAND", "BOR", "BXOR"}:
        raise UserError(
            f"{what}: ReduceOp.{name} needs whole numbers, but the tensor is {dtype}; convert it, "
            "or write ReduceOp.SUM"
        )
    if name == "AVG" and dtype == torch.bool:
        raise UserError(
            f"{what}: ReduceOp.AVG of torch.bool is no truth value; convert the tensor to "
            "torch.float32"
        )
    operation = _OF_BOOL.get(name, _OPERATIONS[name]) if dtype == torch.bool else _OPERATIONS[name]
    return Reduction(getattr(MPI, operation), getattr(MPI, datatype), wide, name == "AVG")


def average(tensor: torch.Tensor, size: int) -> None:
    """Divide a sum over `size` ranks, in place; whole numbers are rounded towards zero."""
    if tensor.dtype.is_floating_point:
        tensor.div_(size)
    else:
        tensor.div_(size, rounding_mode="trunc")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def pieces(total: int, largest: int) -> Iterator[tuple[int, int]]:
    """`(start, stop)` of runs of at most `largest` of `total` things; none of 0."""
    return ((start, min(start + largest, total)) for start in range(0, total, max(largest, 1)))


def memory(tensor: torch.Tensor, MPI: Any) -> Any:
    """The memory of a contiguous tensor, for mpi4py. The tensor must live until MPI is done with
    it."""
    return (MPI.buffer if hasattr(MPI, "buffer") else MPI.memory).fromaddress(
        tensor.data_ptr(), tensor.nbytes
    )


class Wire:
    """The memory that travels for one tensor.

    It is the tensor's own when that is contiguous and MPI can read it. A tensor with gaps is
    copied; one of a GPU is copied to pinned memory unless the MPI library takes GPU memory
    (`direct`). Made when the operation is called, on the caller's CUDA stream; `begin` and `end`
    run on the thread of the communicator. `read`: whether what the tensor holds is sent.
    """

    def __init__(self, tensor: torch.Tensor, direct: bool, read: bool = True) -> None:
        self.tensor = tensor.detach()
        self.memory = self.tensor
        self._begun: Any = None
        plain = (
            self.tensor.is_contiguous() and not self.tensor.is_conj() and not self.tensor.is_neg()
        )
        self._copies, self._read = not plain, read
        if self.tensor.is_cuda:
            if not direct:
                self._copies = True
                self.memory = torch.empty(
                    self.tensor.shape, dtype=self.tensor.dtype, pin_memory=True
                )
                if read:
                    self.memory.copy_(self.tensor, non_blocking=True)
            elif not plain:
                self.memory = self.tensor.resolve_conj().resolve_neg().contiguous()
            self._begun = torch.cuda.Event()
            self._begun.record(torch.cuda.current_stream(self.tensor.device))

    def begin(self) -> torch.Tensor:
        """Wait for what was queued on the GPU, or copy; the contiguous memory."""
        if self._begun is not None:
            self._begun.synchronize()
        elif self._copies:
            dense = torch.empty(self.tensor.shape, dtype=self.tensor.dtype)
            self.memory = dense.copy_(self.tensor) if self._read else dense
        return self.memory

    def end(self) -> None:
        """Bring what was received to the tensor. On a GPU it is there when this returns."""
        if not self._copies:
            return
        if not self.tensor.is_cuda:
            self.tensor.copy_(self.memory)
            return
        stream = torch.cuda.Stream(self.tensor.device)
        with torch.cuda.stream(stream):
            self.tensor.copy_(self.memory, non_blocking=True)
        stream.synchronize()


_large: dict[int, Any] = {}


def message(tensor: torch.Tensor, MPI: Any) -> list[Any]:
    if tensor.nbytes <= LARGEST_COUNT:
        return [memory(tensor, MPI), tensor.nbytes, MPI.BYTE]
    if tensor.nbytes not in _large:
        many, rest = divmod(tensor.nbytes, 1 << 30)
        block = MPI.BYTE.Create_contiguous(1 << 30)
        whole = block.Create_contiguous(many)
        datatype = MPI.Datatype.Create_struct(
            [1, rest], [0, many << 30], [whole, MPI.BYTE]
        ).Commit()
        block.Free()
        whole.Free()
        _large[tensor.nbytes] = datatype
    return [memory(tensor, MPI), 1, _large[tensor.nbytes]]
