"""A file that is written past the system's cache.

A write through the cache copies every byte once more and leaves the disk's writing to a thread of
the kernel. Both take a core from the training. The bytes of a checkpoint are not read again soon,
so that the cache has no use for them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

# Bytes that go to the disk at once: a multiple of every alignment that a file system asks for.
_PIECE = 1 << 22
# Absent on systems that have no such writing; then all goes through the cache.
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """A new file of bytes, with what PyTorch's checkpoint writer calls.

    Where the file system refuses to write past its cache, the file is written through it.

    Args:
        path: the file; replaced when it exists.
        checksum: gets every byte in the order of the file; has ``update``, as `hashlib`'s objects.

    Raises:
        OSError: the disk is full, or the folder is absent.
    """

    def __init__(self, path: Path, checksum: Any) -> None:
        self.checksum = checksum
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._handle = os.open(path, flags | _DIRECT, 0o666)
            self._direct = bool(_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._handle = os.open(path, flags, 0o666)
            self._direct = False
        # Memory that begins at a page, as the system asks.
        self._piece = np.frombuffer(mmap.mmap(-1, _PIECE), np.uint8)
        self._held = self._written = 0

    def write(self, data: Any) -> int:
        """Append bytes.

        Raises:
            OSError: they could not be written.
        """
        given = np.frombuffer(data, np.uint8)
        taken = 0
        while taken < len(given):
            length = min(_PIECE - self._held, len(given) - taken)
            # NumPy's copy leaves the interpreter to the training, a memoryview's does not.
            np.copyto(self._piece[self._held : self._held + length], given[taken : taken + length])
            self._held += length
            taken += length
            if self._held == _PIECE:
                self._put()
        return taken

    def tell(self) -> int:
        """Bytes so far."""
        return self._written + self._held

    def flush(self) -> None:
        """Nothing: the last bytes, which fill no piece, are written by `close`."""

    def close(self) -> None:
        """Write what is left, and have the system write the file to the disk.

        Raises:
            OSError: it could not be written.
        """
        if self._handle < 0:
            return
        try:
            self._through_cache()
            self._put()
            os.fsync(self._handle)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file as it is."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _put(self) -> None:
        """Write the piece."""
        piece = self._piece.data[: self._held]
        self.checksum.update(piece)
        done = 0
        while done < self._held:
            try:
                done += os.pwrite(self._handle, piece[done:], self._written + done)
            except OSError as error:
                if not self._direct or error.errno not in _REFUSED:
                    raise
                self._through_cache()
        self._written += self._held
        self._held = 0

    def _through_cache(self) -> None:
        """From here on, write through the cache, which takes any number of bytes."""
        if self._direct:
            flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~_DIRECT)
            self._direct = False
