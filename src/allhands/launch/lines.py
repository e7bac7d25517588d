"""Cuts a stream of bytes into whole lines, so that the lines of several workers can be merged
without tearing."""

from __future__ import annotations

import time

# A line longer than this is passed on in pieces rather than held in memory.
LONGEST = 32 << 20

# A progress bar rewrites one line with carriage returns and may not end it for hours. Its state is
# shown as a line of its own this often.
PROGRESS_EVERY = 5.0


def _visible(line: bytes) -> bytes:
    """What a terminal shows of a line that was rewritten with carriage returns: the text after the
    last one."""
    if b"\r" not in line:
        return line
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class LineCutter:
    """Holds the unfinished line of one stream."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._rewritten = False
        self._shown_at = time.monotonic()

    def feed(self, data: bytes) -> bytes:
        """The whole lines that `data` completes (each ends with a newline), or nothing."""
        self._rewritten = self._rewritten or b"\r" in data
        end = data.rfind(b"\n")
        if end < 0:
            self._rest += data
            if self._rewritten:
                return self._progress()
            return self.flush() if len(self._rest) > LONGEST else b""
        whole = bytes(self._rest) + data[: end + 1]
        self._rest = bytearray(data[end + 1 :])
        if self._rewritten:
            whole = b"\n".join(_visible(line) for line in whole.split(b"\n"))
            self._rewritten = b"\r" in self._rest
        self._shown_at = time.monotonic()
        return whole

    def _progress(self) -> bytes:
        # Only the newest state is kept; what stands before it has been overwritten on a terminal
        # too.
        done, _, newest = bytes(self._rest).rstrip(b"\r").rpartition(b"\r")
        if done:
            self._rest = bytearray(b"\r" + newest)
        now = time.monotonic()
        if now - self._shown_at < PROGRESS_EVERY or not newest:
            return b""
        self._shown_at = now
        return newest + b"\n"

    def flush(self) -> bytes:
        """The unfinished line, ended with a newline, or nothing."""
        rest, self._rest, self._rewritten = _visible(bytes(self._rest)), bytearray(), False
        return rest + b"\n" if rest else b""
