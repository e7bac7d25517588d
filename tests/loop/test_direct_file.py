"""A file that is written past the system's cache."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from allhands.loop.checkpoint import direct_file
from allhands.loop.checkpoint.direct_file import DirectFile

PIECE = 1 << 14


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "_PIECE", PIECE)


def written(path: Path, parts: list[bytes]) -> DirectFile:
    file = DirectFile(path, hashlib.sha256())
    for number, part in enumerate(parts):
        assert file.tell() == sum(map(len, parts[:number]))
        assert file.write(memoryview(part)) == len(part)
    file.close()
    assert path.read_bytes() == b"".join(parts)
    assert file.checksum.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    return file


@pytest.mark.parametrize(
    "lengths", [[], [0], [1], [PIECE], [PIECE - 1, 2], [3 * PIECE + 5], [7, PIECE, 4 * PIECE, 11]]
)
def test_every_byte_is_in_the_file_and_in_the_checksum(tmp_path: Path, lengths: list[int]) -> None:
    (tmp_path / "file").write_bytes(b"what was there before is longer" * PIECE)
    written(tmp_path / "file", [os.urandom(length) for length in lengths])


def test_pieces_pass_the_cache_and_the_rest_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    write, seen = os.pwrite, []

    def looking(handle: int, data: Any, offset: int) -> int:
        direct = bool(fcntl.fcntl(handle, fcntl.F_GETFL) & direct_file._DIRECT)
        seen.append((len(data), offset, direct))
        return write(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", looking)
    written(tmp_path / "file", [bytes(PIECE + 3)])
    assert seen in ([(PIECE, 0, True), (3, PIECE, False)], [(PIECE, 0, False), (3, PIECE, False)])


@pytest.mark.parametrize("where", ["open", "pwrite"])
def test_a_file_system_that_refuses_is_written_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    import fcntl

    real, refused = getattr(os, where), []

    def refusing(given: Any, *rest: Any) -> Any:
        flags = rest[0] if where == "open" else fcntl.fcntl(given, fcntl.F_GETFL)
        if flags & direct_file._DIRECT:
            refused.append(given)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(given, *rest)

    monkeypatch.setattr(os, where, refusing)
    written(tmp_path / "file", [os.urandom(3 * PIECE + 1)])
    assert len(refused) == 1


def test_parts_of_a_piece_that_the_system_takes_are_followed_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda handle, data, offset: write(handle, data[: PIECE // 2], offset)
    )
    written(tmp_path / "file", [os.urandom(2 * PIECE + 9)])


def test_a_full_disk_is_told_and_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    file = DirectFile(tmp_path / "file", hashlib.sha256())
    with pytest.raises(OSError, match="No space left"):
        file.write(bytes(PIECE))
    with pytest.raises(OSError, match="No space left"):
        file.close()
    file.close()  # once is enough
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "absent" / "file", hashlib.sha256())
