"""The files of a checkpoint."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.json"


_TRIED = 1 << 20  # bytes
_PIECE = 1 << 22  # bytes that are read at once


class Crc32:
    """A CRC-32, with what `hashlib`'s objects have."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


#: The checksums that a manifest may name. All of them find damage; none is against forgery, since
#: the manifest lies beside the files.
CHECKSUMS: dict[str, Callable[[], Any]] = {"crc32": Crc32, "sha256": hashlib.sha256}


@cache
def fastest_checksum() -> str:
    """The checksum that takes least time here: CRC-32 with a newer zlib, SHA-256 where the
    processor has instructions for it and zlib is an old one."""
    data = bytes(_TRIED)

    def seconds(name: str) -> float:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            CHECKSUMS[name]().update(data)
            times.append(time.perf_counter() - began)
        return min(times)

    return min(CHECKSUMS, key=seconds)


def checksum(path: Path, name: str) -> str:
    """A file's checksum of this name, in hexadecimal."""
    found = CHECKSUMS[name]()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return str(found.hexdigest())


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
