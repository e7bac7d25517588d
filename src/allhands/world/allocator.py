"""How much freed memory a process keeps for its next step."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

# Numbers of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Bytes of freed memory that the process keeps at most.
KEPT = 1 << 28
# Bytes from which a block is given back as soon as it is freed: the largest that glibc comes to by
# itself.
_LARGE = 1 << 25
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Let glibc keep up to `KEPT` bytes of freed memory.

    A step frees what its passes have allocated, and the next one allocates as much again. By
    itself, glibc gives the memory back to the system in between, which clears every page anew: a
    tenth of a step of a small convolutional network on a processor.

    Args:
        environ: where it sets one of glibc's thresholds, everything stays as it is.

    Returns:
        Whether it was done; False also where the C library is another.
    """
    if any(name in environ for name in _VARIABLES) or "glibc.malloc" in environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(option, value) == 1
        for option, value in ((_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, KEPT))
    )
