"""What happened when: a trace for chrome://tracing or Perfetto, written by rank 0."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

from allhands.errors import UserError
from allhands.horovod.operation_request import Key


class Timeline:
    """Records of one process; all but rank 0's write nothing.

    Each operation has a line of its own. NEGOTIATE_… lasts from this rank's call until all ranks
    have made theirs; the operation itself follows. Its times on a GPU are those of the queueing.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._lines: dict[str, int] = {}

    def start(self, path: str) -> None:
        """Begin a file.

        Raises:
            UserError: it cannot be written, or another one is being written.
        """
        if self._rank != 0:
            return
        with self._lock:
            if self._file is not None:
                raise UserError(
                    "a timeline is being written already; call hvd.stop_timeline() first"
                )
            try:
                # Until `stop`; whole lines, so that it can be read while it is written.
                self._file = open(path, "w", 1, encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise UserError(
                    f"the timeline {path!r} cannot be written: {error.strerror}"
                ) from None
            self._file.write("[\n")
            self._lines.clear()

    def stop(self) -> None:
        """End the file, if there is one."""
        with self._lock:
            if self._file is not None:
                self._file.write("{}]\n")
                self._file.close()
                self._file = None

    def asked(self, key: Key) -> None:
        """This rank has called an operation."""
        if self._file is not None:
            self._write("B", [key], f"NEGOTIATE_{key[1].upper()}")

    def began(self, keys: Sequence[Key]) -> None:
        """All ranks have called these operations, and they begin."""
        if self._file is not None:
            self._write("E", keys, "")
            self._write("B", keys, keys[0][1].upper())

    def began_round(self, key: Key) -> None:
        """This part of a round, which all ranks have agreed on before it was called, begins."""
        if self._file is not None:
            self._write("B", [key], key[1].upper())

    def ended(self, keys: Sequence[Key]) -> None:
        """They are over."""
        if self._file is not None:
            self._write("E", keys, "")

    def _write(self, phase: str, keys: Sequence[Key], name: str) -> None:
        at = time.monotonic() * 1e6
        with self._lock:
            if self._file is None:
                return
            for _, kind, tensor in keys:
                label = f"{kind} {tensor}"
                if label not in self._lines:
                    self._lines[label] = len(self._lines) + 1
                    self._put(
                        {
                            "name": "process_name",
                            "ph": "M",
                            "pid": self._lines[label],
                            "args": {"name": label},
                        }
                    )
                event = {"ph": phase, "ts": at, "pid": self._lines[label], "tid": 0}
                self._put({**event, "name": name} if name else event)

    def _put(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(event) + ",\n")
