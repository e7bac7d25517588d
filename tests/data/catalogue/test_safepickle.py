from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allhands.data.catalogue.safepickle import load_batch
from allhands.errors import UserError


def python2_pickle(entries: dict[bytes, Any]) -> bytes:
    """Protocol 2 as Python 2 wrote it: its strings, array data included, are byte strings, not
    calls of _codecs.encode."""

    def string(value: bytes) -> bytes:
        return (
            b"U" + bytes([len(value)]) + value
            if len(value) < 256
            else b"T" + len(value).to_bytes(4, "little") + value
        )

    def integer(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    def item(value: Any) -> bytes:
        if isinstance(value, bytes):
            return string(value)
        if isinstance(value, list):
            return b"](" + b"".join(map(item, value)) + b"e"
        if isinstance(value, int):
            return integer(value)
        rows = b"".join(map(integer, value.shape))
        made = (
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t"
            + string(b"b")
            + b"tR"
        )
        dtype = b"cnumpy\ndtype\n(" + string(value.dtype.str[1:].encode()) + b"K\x00K\x01tR"
        dtype += (
            b"(K\x03"
            + string(value.dtype.str[:1].encode())
            + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        )
        return made + b"(K\x01(" + rows + b"t" + dtype + b"\x89" + string(value.tobytes()) + b"tb"

    return (
        b"\x80\x02}("
        + b"".join(string(key) + item(value) for key, value in entries.items())
        + b"u."
    )


def test_the_imitation_is_right() -> None:
    data = np.arange(6, dtype=np.uint8).reshape(2, 3)
    read = pickle.loads(python2_pickle({b"data": data, b"labels": [3, 1]}), encoding="bytes")
    assert np.array_equal(read[b"data"], data)
    assert read[b"labels"] == [3, 1]


@pytest.mark.parametrize("dtype", ["u1", "<i4", ">f4", "<f8"])
def test_reads_what_python_2_wrote(tmp_path: Path, dtype: str) -> None:
    data = np.arange(600).reshape(2, 300).astype(dtype)
    path = tmp_path / "batch"
    path.write_bytes(
        python2_pickle({b"data": data, b"labels": [3, 1], b"batch_label": b"training batch 1 of 5"})
    )
    read = load_batch(path)
    assert np.array_equal(read["data"], data)
    assert (read["labels"], read["batch_label"]) == ([3, 1], b"training batch 1 of 5")


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_reads_what_python_3_writes(tmp_path: Path, protocol: int) -> None:
    data = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({b"data": data, b"fine_labels": [3, 1]}, protocol))
    read = load_batch(path)
    assert np.array_equal(read["data"], data)
    assert read["fine_labels"] == [3, 1]


class _Runs:
    """Unpickled in the ordinary way, this makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_refuses_to_run_anything(tmp_path: Path, protocol: int) -> None:
    mark, path = tmp_path / "ran", tmp_path / "batch"
    path.write_bytes(pickle.dumps({b"data": _Runs(mark)}, protocol))
    with pytest.raises(UserError, match=r"batch \(\d+ bytes\).*posix\.mkdir"):
        load_batch(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists()  # so the test would have seen it


MALICIOUS = {
    "builtins.eval": b"cbuiltins\neval\n(X\x05\x00\x00\x001 + 1tR.",
    "Python 2's name of it": b"c__builtin__\neval\n(U\x051 + 1tR.",
    "an attribute of an admitted name": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__class__\x93.",
    "a numpy function": b"cnumpy\nload\n(U\x01xtR.",
    "a class by INST": b"(S'x'\nios\nsystem\n.",
    "a persistent id": b"Pexample\n.",
    "an extension code": b"\x82\x01.",
    "an object array": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    b"(K\x01(K\x01tcnumpy\ndtype\n"
    b"(U\x02O8K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb\x89](NetbU\x01d",
}


@pytest.mark.parametrize("text", MALICIOUS.values(), ids=MALICIOUS)
def test_refuses_other_names(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "batch"
    if text.endswith(b"U\x01d"):  # an array as the value of a dictionary
        text = b"\x80\x02}(U\x01d" + text[:-3] + b"u."
    path.write_bytes(text)
    with pytest.raises(UserError, match="was not loaded"):
        load_batch(path)


def test_an_array_must_fill_its_shape(tmp_path: Path) -> None:
    whole = python2_pickle({b"data": np.zeros((2, 3), np.uint8)})
    path = tmp_path / "batch"
    path.write_bytes(whole.replace(b"J\x03\x00\x00\x00t", b"J\x04\x00\x00\x00t"))
    with pytest.raises(UserError, match="was not loaded"):
        load_batch(path)


@pytest.mark.parametrize("keep", [0, 1, 20, -1])
def test_a_cut_off_file_is_named_with_its_size(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "batch"
    path.write_bytes(python2_pickle({b"data": np.zeros((2, 300), np.uint8)})[:keep])
    with pytest.raises(
        UserError, match=rf"{path} \({path.stat().st_size:,} bytes\) is not a whole data batch"
    ):
        load_batch(path)


def test_other_contents_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(UserError, match="a list, not a dictionary"):
        load_batch(path)
