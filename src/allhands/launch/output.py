"""Where the output of the workers goes: the console, a file a rank, and a short memory for the
report of a failure."""

from __future__ import annotations

import collections
import os
import sys
from pathlib import Path
from typing import IO, Any

from allhands.errors import UserError

KEPT_LINES = 20


class Output:
    """Merges the workers' lines.

    Raises:
        UserError: `log_dir` cannot be written.
    """

    def __init__(self, prefix: bool = True, log_dir: str | os.PathLike[str] | None = None) -> None:
        self._prefix = prefix
        self._muted = False
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._logs: dict[int, IO[bytes]] = {}
        self._marks: dict[int, bytes] = {}
        self._tails: dict[int, collections.deque[bytes]] = {}
        if self._log_dir is not None:
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                # Opened at once, so that a folder that cannot be written is told before anything
                # starts.
                self._open_log(0)
            except OSError as error:
                raise UserError(
                    f"cannot write to the log folder {str(self._log_dir)!r}: {error.strerror}"
                ) from error

    def place(self, rank: int, host: str) -> None:
        """Where a rank runs from now on; "" when all run here. Its lines begin with `[host rank] `
        or `[rank] `.

        What an earlier attempt printed last is forgotten.
        """
        self._tails.pop(rank, None)
        name = str(rank) if rank >= 0 else f"server {-rank - 1}"
        self._marks[rank] = f"[{host} {name}] ".replace("[ ", "[").encode()

    def log_path(self, rank: int) -> Path | None:
        """The file with everything that a rank printed, when there is one."""
        name = f"rank-{rank}.log" if rank >= 0 else f"server-{-rank - 1}.log"
        return self._log_dir / name if self._log_dir is not None else None

    def _open_log(self, rank: int) -> IO[bytes] | None:
        path = self.log_path(rank)
        if path is not None and rank not in self._logs:
            self._logs[rank] = path.open("wb")  # once a job: a restarted rank goes on in it
        return self._logs.get(rank)

    def write(self, rank: int, fd: int, lines: bytes) -> None:
        """Show whole lines of one rank; `fd` is 1 for stdout and 2 for stderr.

        Raises:
            BrokenPipeError: nobody reads our stdout any more.
        """
        tail = self._tails.setdefault(rank, collections.deque(maxlen=KEPT_LINES))
        tail.extend(lines[:-1].rsplit(b"\n", KEPT_LINES)[-KEPT_LINES:])
        try:
            log = self._open_log(rank)
            if log is not None:
                log.write(lines)
                log.flush()
        except OSError as error:
            path, self._log_dir = self.log_path(rank), None
            self._logs.clear()
            show(
                sys.stderr,
                f"allhands: cannot write {path}: {error.strerror}; the log files end "
                "here\n".encode(),
            )
        if self._muted:
            return
        if self._prefix:
            mark = self._marks.get(rank) or b"[%d] " % rank
            lines = mark + lines[:-1].replace(b"\n", b"\n" + mark) + b"\n"
        show(sys.stdout if fd == 1 else sys.stderr, lines)

    def mute(self) -> None:
        """Show nothing any more; the files and the memory go on."""
        self._muted = True

    def tail(self, rank: int) -> list[bytes]:
        """The last lines of a rank, stdout and stderr together."""
        return list(self._tails.get(rank, ()))

    def close(self) -> None:
        """Close the log files."""
        for log in self._logs.values():
            try:
                log.close()
            except OSError:
                pass
        self._logs.clear()


def show(stream: Any, data: bytes) -> None:
    """Write bytes to a text stream unchanged, or as near as a stream without bytes (a notebook's)
    allows.

    Raises:
        BrokenPipeError: nobody reads our stdout any more. For stderr there is nobody left to tell,
            so it is dropped.
    """
    if stream is None:
        return
    try:
        stream.flush()
        raw = getattr(stream, "buffer", None)
        if raw is not None:
            raw.write(data)
        else:
            stream.write(data.decode("utf-8", "replace"))
        stream.flush()
    except BrokenPipeError:
        if stream is not sys.stderr:
            raise


def silence_stdout() -> None:
    """Keep Python from complaining about the same closed pipe again when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
