"""Memory that a worker and a server of the same host both map, so that values need not travel.

It is anonymous (memfd) and handed over as an open file on the Unix socket: it has no name by which
others could open it, and is gone when both processes are, however they end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

_ALIGNED = 64


@dataclass(frozen=True)
class ChunkOffsets:
    """Where a chunk of `count` numbers lies in the memory that a worker shares, in bytes.

    Attributes:
        region: where values are copied on their way.
        buffer: its part of `KVStore.buffer`, None where that lies elsewhere.
    """

    count: int
    dtype: torch.dtype
    region: int
    buffer: int | None = None


class SharedMemory:
    """Shared memory of `nbytes`; made new, or from a file that was received."""

    def __init__(self, nbytes: int = 0, fd: int | None = None) -> None:
        # A file that was received is mapped whole, but never less than was said.
        nbytes = max(nbytes, mmap.PAGESIZE, 0 if fd is None else os.fstat(fd).st_size)
        if fd is None:
            fd = os.memfd_create("allhands-kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        # Reading beyond the end of a file kills the process, so it must not shrink either.
        elif (
            os.fstat(fd).st_size < nbytes
            or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        ):
            os.close(fd)
            raise ValueError("the shared memory is smaller than announced")
        self.fd, self.nbytes = fd, nbytes
        self._bytes = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)

    def view(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` numbers from byte `offset` on; shape [count]."""
        size = dtype.itemsize
        return self._bytes[offset : offset + count * size].view(dtype)

    def close_file(self) -> None:
        """The mapping stays as long as views of it do; the descriptor is not needed for that."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where parts of so many bytes begin, and how many bytes they take in all."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return starts, end


def copy(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy numbers; both 1-D, on the CPU, of one dtype and without gaps.

    With one thread the C library's copy takes a seventh less time than torch's, which reads what it
    is about to overwrite.
    """
    if torch.get_num_threads() > 1:
        into.copy_(values)
    else:
        np.copyto(
            into.detach().view(torch.uint8).numpy(), values.detach().view(torch.uint8).numpy()
        )


def send_file(link: socket.socket, fd: int) -> None:
    """Hand an open file over; follows a control message that announces it."""
    socket.send_fds(link, [b"f"], [fd])


def receive_file(link: socket.socket) -> int:
    """The open file that was handed over."""
    data, fds, _, _ = socket.recv_fds(link, 1, 1)
    if not data or not fds:
        raise EOFError
    return fds[0]
