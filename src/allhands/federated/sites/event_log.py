"""What happens in a run across sites, as it happens: one JSON object a line in ``events.jsonl``.

Every line has ``time`` (seconds since 1970) and ``kind``. The kinds, with what else a line has:

- ``begin``: sites (names in the order of the clients), needed, per_round, rounds, round (of the
  first one), algorithm
- ``waiting``: connected, missing (names), needed, seconds (waited so far)
- ``stranger``: node, reason: a node that is no site of this run
- ``greeted``: site, samples, tests: it has the same model and settings, and takes part from the
  next round
- ``refused``: site, reason: it differs, and is not asked to train
- ``left``: site, reason
- ``round``: round, cohort (names that are asked), absent (names that were drawn and are not there)
- ``update``: site, round, samples, steps, loss, norm, seconds (of its training), waited (until it
  was here), bytes
- ``bad``: site, round, reason: its update was refused
- ``failed``: site, round, reason: it has sent an error
- ``late``: site, round, seconds: it has sent nothing in time
- ``dropped``: site, round, reason: a reply that nobody waits for any more
- ``evaluated``: site, round, count, loss, accuracy where targets are classes
- ``round_end``: round, brought (names), seconds, loss, values (by loader), unchanged, dropped (of
  the whole run)
- ``end``: rounds, reason ("finished", or why not)

Rounds count from 0.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class EventLog:
    """Appends to the file; every line is whole and on its way to the disk when `say` returns.

    Args:
        path: of the file, which is opened with the first event, once the files of an earlier run
            were moved aside; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    def say(self, kind: str, **fields: Any) -> None:
        """Write one event. A number that is no number (NaN, infinity) is written as null, for JSON
        has none."""
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        line = {
            "time": time.time(),
            "kind": kind,
            **{key: _plain(value) for key, value in fields.items()},
        }
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing more is said."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


class EventReader:
    """Reads the file while it grows, from its beginning or from its present end.

    Args:
        path: of the file, which need not be there yet.
        from_end: pass over what is in it already.
    """

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path, self._at = path, 0
        if from_end and path.exists():
            self._at = path.stat().st_size

    def news(self) -> list[dict[str, Any]]:
        """The events since the last call; a line that is not whole yet comes with a later one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            # An earlier run's file was moved aside, and this is another.
            if os.fstat(file.fileno()).st_size < self._at:
                self._at = 0
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


def follow(path: Path, interval: float = 0.2, from_end: bool = False) -> Iterator[dict[str, Any]]:
    """All events as they come, until one of the kind ``end``, which is the last.

    Args:
        path: of the file, which need not be there yet.
        interval: seconds between two looks.
        from_end: pass over what is in it already.
    """
    follower = EventReader(path, from_end)
    while True:
        for event in follower.news():
            yield event
            if event["kind"] == "end":
                return
        time.sleep(interval)
