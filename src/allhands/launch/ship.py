"""Carries Python objects from the process of the user to the workers: one file, whose tensors all
workers share.

The objects travel as one cloudpickle, so everything that was one object stays one (the parameters
that an optimizer updates are the model's), and functions and classes of `__main__` travel by value.
The bytes of tensors and numpy arrays lie beside the pickle. Workers map them copy-on-write: N
workers read one copy of a data set, and what a worker writes is its own. The file is private to the
user and is only ever read by the processes that the writer started. What these hand back
(`handback`) is written and read in the same way.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import functools
import importlib
import io
import json
import mmap
import os
import pickle
import secrets
import shutil
import struct
import sys
import tempfile
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from allhands.errors import UserError
from allhands.launch.optimizer_state import whole_state

_MAGIC = b"allhands"
# Magic, offset of the pickle, its length, length of the index after it.
_HEADER = struct.Struct("<8sQQQ")
_ALIGN = 64
# Gives the number by which the reader knows an object or a storage; None: it travels whole.
_Refer = Callable[[Any], int | None]
# Smaller buffers are not worth a mapping of their own.
_SMALL = 4096
# Memory that stays free in /dev/shm beside the file.
_MARGIN = 64 << 20


class Blobs:
    """The raw memory to be written beside the pickle, and where each part will lie."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Any]] = []  # offset, memoryview or torch storage
        self.end = _HEADER.size
        # Offset, length, read-only; of numpy arrays in pickle order.
        self.buffers: list[tuple[int, int, bool]] = []

    def add(self, nbytes: int, part: Any) -> int:
        offset = -(-self.end // _ALIGN) * _ALIGN
        self.parts.append((offset, part))
        # Empty ones too have a place of their own, which names them.
        self.end = offset + max(nbytes, 1)
        return offset


@dataclass
class Numbered:
    """The objects of one file by their numbers, and its storages by their offsets: alike where it
    is written and read."""

    objects: dict[int, Any] = field(default_factory=dict)
    storages: dict[int, Any] = field(default_factory=dict)
    original: Any = None  # on arrival, the bytes as they came

    def is_unchanged(self, offset: int, storage: Any) -> bool:
        """Whether a storage, which arrived at `offset`, has the bytes with which it came."""
        import torch

        nbytes = storage.nbytes()
        if nbytes != self.storages[offset].nbytes() or nbytes == 0:
            return False
        came = torch.frombuffer(self.original, dtype=torch.uint8, count=nbytes, offset=offset)
        return torch.equal(torch.empty(0, dtype=torch.uint8).set_(storage), came)


@functools.cache
def _pickler_class(with_torch: bool) -> Any:
    """The pickler, defined when it is first needed, because cloudpickle and torch are imported only
    then."""
    import cloudpickle

    torch = sys.modules.get("torch") if with_torch else None
    untyped: Any = torch.storage.UntypedStorage if torch else ()
    storages: Any = (torch.storage.TypedStorage, untyped) if torch else ()
    reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]

    def reduce_code_with_file(code: types.CodeType) -> tuple[Any, ...]:
        # cloudpickle drops the file name, without which a worker's traceback shows no source lines.
        make, parts = reduce_code(code)
        return make_code, (make, parts, code.co_filename)

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar[Any] = ChainMap(
            {types.CodeType: reduce_code_with_file}, cloudpickle.Pickler.dispatch_table
        )

        def __init__(
            self,
            file: io.BufferedIOBase,
            blobs: Blobs,
            refer: _Refer | None = None,
            same: _Refer | None = None,
        ) -> None:
            super().__init__(file, protocol=5, buffer_callback=self.keep_beside)
            self.blobs = blobs
            self.refer, self.same = refer, same
            # Of a storage: offset, length (-1: the reader's own, at that offset).
            self.known: dict[int, tuple[int, int]] = {}
            self.alive: list[Any] = []  # an address names a storage only while the storage lives

        def persistent_id(self, value: Any) -> Any:
            if self.refer is not None and (number := self.refer(value)) is not None:
                return number
            if not isinstance(value, storages):
                return None
            typed = not isinstance(value, untyped)
            raw = value._untyped_storage if typed else value
            if raw.device.type == "meta":
                return None
            if raw._cdata not in self.known:
                self.alive.append(raw)
                offset = self.same(raw) if self.same is not None else None
                self.known[raw._cdata] = (
                    (self.blobs.add(raw.nbytes(), raw), raw.nbytes())
                    if offset is None
                    else (offset, -1)
                )
            kind = str(value.dtype).removeprefix("torch.") if typed else "uint8"
            return *self.known[raw._cdata], kind

        def reducer_override(self, value: Any) -> Any:
            # Modules that replace themselves by an object of a class of their own
            # (torch.backends.cudnn) are still found by name.
            if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
                name = value.__name__
            else:
                name = ""
            if name and sys.modules.get(name) is value:
                return importlib.import_module, (name,)
            parametrize = sys.modules.get("torch.nn.utils.parametrize")
            if (
                torch
                and parametrize
                and isinstance(value, torch.nn.Module)
                and parametrize.is_parametrized(value)
            ):
                # PyTorch makes a class for each such module, and forbids to pickle it.
                base: Any = type(value).__bases__[0]
                names = list(value.parametrizations)
                return make_parametrized, (base, names), base.__getstate__(value)
            if (state := whole_state(value)) is not None:
                return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]
            return super().reducer_override(value)

        def keep_beside(self, buffer: pickle.PickleBuffer) -> bool:
            """False takes the buffer out of the pickle."""
            view = buffer.raw()
            if view.nbytes < _SMALL:
                return True
            self.blobs.buffers.append(
                (self.blobs.add(view.nbytes, view), view.nbytes, view.readonly)
            )
            return False

    return Pickler


def pickler(
    body: io.BytesIO, blobs: Blobs, refer: _Refer | None = None, same: _Refer | None = None
) -> Any:
    """Writes objects to `body`, and their memory to `blobs`, by ``dump``, which may be called
    several times.

    Args:
        body: gets the pickle.
        blobs: gets the memory.
        refer: numbers of objects that the reader has.
        same: offsets of storages that the reader has.
    """
    return _pickler_class("torch" in sys.modules)(body, blobs, refer, same)


def _pickle(value: Any, numbered: Numbered | None = None) -> tuple[io.BytesIO, Blobs]:
    body, blobs = io.BytesIO(), Blobs()
    writer = pickler(body, blobs)
    writer.dump(value)
    if numbered is not None:
        numbered.objects.update(writer.memo.copy().values())
        numbered.storages.update((writer.known[raw._cdata][0], raw) for raw in writer.alive)
    return body, blobs


def make_parametrized(base: Any, names: list[str]) -> Any:
    """A module of a class, some of whose tensors are computed by parametrizations; it gets its
    state later.

    Uses two private functions of `torch.nn.utils.parametrize`, since the public one computes the
    tensors anew.
    """
    from torch.nn.utils import parametrize

    module = base.__new__(base)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def make_code(
    make: Callable[..., types.CodeType], parts: tuple[Any, ...], filename: str
) -> types.CodeType:
    """Rebuild a function's code with the name of its file. Called by `load`."""
    return make(*parts).replace(co_filename=filename)


def can_pickle(value: Any) -> Exception | None:
    """Try to pickle a value without writing any tensor; the error if it cannot be done."""
    try:
        _pickle(value)
    except Exception as error:
        return error
    return None


def make_directory(nbytes: int = 0) -> str:
    """A new private folder for `nbytes` of data: in shared memory if they fit, else on disk. The
    caller removes it."""
    for base in ("/dev/shm", None):
        try:
            if base and shutil.disk_usage(base).free < nbytes + _MARGIN:
                continue
            return tempfile.mkdtemp(prefix="allhands-", dir=base)
        except OSError:
            if base is None:
                raise
    raise AssertionError("unreachable")


def dump(
    value: Any, directory: str | Callable[[int], str], numbered: Numbered | None = None
) -> str:
    """Write a value to a new file.

    Args:
        value: anything that cloudpickle can pickle. PyTorch leaves gradients (`.grad`) behind when
            it pickles a tensor.
        directory: an existing private folder, or a function that makes one for so many bytes.
        numbered: gets the objects that are written.

    Returns:
        The path of the file, for `load` in another process.

    Raises:
        Exception: the value cannot be pickled; whatever its pickling raised.
        UserError: there is no room for it.
    """
    body, blobs = _pickle(value, numbered)
    folder = directory if isinstance(directory, str) else directory(blobs.end + body.tell())
    path = os.path.join(folder, f"shipped-{secrets.token_hex(8)}")
    try:
        write(body, blobs, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise UserError(
            f"cannot write {blobs.end / 2**20:.0f} MiB for the workers to {folder}: "
            f"{error.strerror}; "
            'free some space there, or build the data in the workers (datasets={"get_datasets_fn": '
            "...})"
        ) from error
    return path


def write(body: io.BytesIO, blobs: Blobs, path: str) -> None:
    """Write what a `pickler` has made to a new file."""
    index = json.dumps(blobs.buffers).encode()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(_HEADER.pack(_MAGIC, blobs.end, body.tell(), len(index)))
        for offset, part in blobs.parts:
            file.seek(offset)
            _write(file, part)
        file.seek(blobs.end)
        file.write(body.getbuffer())
        file.write(index)


def _write(file: Any, part: Any) -> None:
    if isinstance(part, memoryview):
        file.write(part)
        return
    storage = part if part.device.type == "cpu" else part.cpu()
    if storage.nbytes():
        # The storage's own memory, without a copy.
        file.write((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))


def load(path: str, numbered: Numbered | None = None) -> Any:
    """The value that `dump` wrote. Tensors, also those of a GPU, arrive as CPU tensors on private,
    copy-on-write memory.

    Args:
        path: the file.
        numbered: gets the objects that are read.

    Raises:
        OSError: the file cannot be read.
        Exception: whatever unpickling raises, such as a module that cannot be imported here.
    """
    reader, _ = _reader(path, numbered, None)
    value = reader.load()
    if numbered is not None:
        numbered.objects.update(reader.memo.copy())
    return value


def load_all(path: str, numbered: Numbered) -> Iterator[Any]:
    """The values that a `pickler` wrote one after another, and that refer to what `numbered`
    has."""
    reader, has_more = _reader(path, None, numbered)
    while has_more():
        yield reader.load()


def _reader(
    path: str, numbered: Numbered | None, known: Numbered | None
) -> tuple[pickle.Unpickler, Callable[[], bool]]:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if numbered is not None:
            numbered.original = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    _, start, length, index_length = _HEADER.unpack_from(mapped)
    view = memoryview(mapped)
    index = json.loads(bytes(view[start + length : start + length + index_length]))
    buffers = [
        view[offset : offset + nbytes].toreadonly() if readonly else view[offset : offset + nbytes]
        for offset, nbytes, readonly in index
    ]
    storages: dict[int, Any] = {} if numbered is None else numbered.storages
    body = io.BytesIO(view[start : start + length])

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, key: Any) -> Any:
            import torch

            if known is not None and isinstance(key, int):
                return known.objects[key]
            offset, nbytes, dtype = key
            if known is not None and nbytes < 0:
                return _typed(known.storages[offset], dtype)
            if offset not in storages:
                storages[offset] = (
                    torch.frombuffer(
                        mapped, dtype=torch.uint8, count=nbytes, offset=offset
                    ).untyped_storage()
                    if nbytes
                    else torch.UntypedStorage(0)
                )
            return _typed(storages[offset], dtype)

    return Unpickler(body, buffers=buffers), lambda: body.tell() < length


def _typed(storage: Any, dtype: str) -> Any:
    """Tensors are rebuilt from typed storages, also those that were pickled with an untyped one."""
    import torch

    return torch.storage.TypedStorage(
        wrap_storage=storage, dtype=getattr(torch, dtype), _internal=True
    )
