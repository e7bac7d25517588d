"""The folder of a run's checkpoints: names, links, what is kept, what is found again.

::

    checkpoints/
      epoch-0007/                  the end of an epoch
        state.pt                   numbers, generators, settings of the optimizer
        __0_0.distcp, …            tensors, a file for each rank (torch.distributed.checkpoint)
        index.json                 which tensor lies where
        manifest.json              epoch, step, metrics, versions, and the SHA-256 of every file
      epoch-0008-step-000000412/   in the middle of an epoch
      last -> epoch-0008-step-000000412
      best -> epoch-0007

The newest two are kept, so that a damaged file never is the only one, and those at which a link
points.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from allhands.atomic_write import atomic_write
from allhands.errors import UserError, kind_of, nearest
from allhands.loop.checkpoint import tree
from allhands.loop.checkpoint.files import (
    CHECKSUMS,
    INDEX_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    checksum,
    sync,
)
from allhands.strategies.held import Held, Read

_NAME = re.compile(r"epoch-(\d{4,})(?:-step-(\d{9,}))?")
_OWN = "rank-{}/"
# Held while links are changed or read, by threads of rank 0.
_links_change = threading.Lock()


def name_of(epoch: int, step: int | None) -> str:
    """The folder's name: of the end of `epoch`, or of optimizer step `step` (counted over all
    epochs) within it."""
    return f"epoch-{epoch:04d}" + ("" if step is None else f"-step-{step:09d}")


def own_key(rank: int, name: str) -> str:
    """The name of a tensor that belongs to one rank alone."""
    return _OWN.format(rank) + name


def load(path: str | os.PathLike[str], weights: bool = True) -> dict[str, Any]:
    """Read the state that all ranks share, onto the CPU.

    Args:
        path: a checkpoint's folder, a file in it, ``last`` or ``best``, a ``checkpoints`` folder,
            or a logdir (then its newest); ``~`` is the home folder.
        weights: False leaves marks in the places of the model's and the optimizer's large tensors,
            for `reader`.

    Raises:
        UserError: it is absent, incomplete or damaged; the message names the file and what can be
            used instead.
    """
    path = resolve(path)
    check_files(path)
    try:
        rest = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
        left = ("rank-",) if weights else ("rank-", "model/", "optimizer/")
        return tree.join(rest, _read(path, lambda key: not key.startswith(left)))
    except (KeyError, ValueError, TypeError) as error:  # an index that was not written by us
        raise _unusable(
            path, f"its files do not fit together ({type(error).__name__}: {error})"
        ) from None


def load_own(path: Path, rank: int) -> dict[str, torch.Tensor]:
    """The tensors that rank `rank` alone had stored, by name; the files were checked by `load`."""
    prefix = _OWN.format(rank)
    return {
        key.removeprefix(prefix): value
        for key, value in _read(path, lambda key: key.startswith(prefix)).items()
    }


@contextlib.contextmanager
def reader(path: Path) -> Iterator[Read]:
    """A function ``(value, held)`` that brings the slices that a rank holds of a tensor of the
    checkpoint into ``held.local``.

    `value` is the tensor, or the mark that ``load(path, weights=False)`` left in its place; such a
    one is read at the end of the block, together with all others, and of the files only what this
    rank holds.
    """
    index = json.loads((path / INDEX_FILE).read_text())
    wanted: dict[str, Held] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(value: Any, held: Held) -> None:
        key = tree.path_in(value)
        size = tuple(value.shape) if key is None else tuple(index[key]["size"])
        if size != held.shape:
            raise ValueError(
                f"a tensor {'' if key is None else repr(key) + ' '}of shape {list(size)} and not "
                f"{list(held.shape)}"
            )
        assert held.local is not None
        if key is None:
            held.take(value, held.local)
        elif held.pieces:
            dtype = dtype_named(index[key]["dtype"])
            if held.local.device.type == "cpu" and held.local.dtype == dtype:
                wanted[key] = held
                return
            local = torch.empty(held.local.shape, dtype=dtype, device="cpu")
            copies.append((held.local, local))
            wanted[key] = held.with_local(local)

    from allhands.loop.checkpoint.storage import dtype_named

    yield read
    if wanted:
        from allhands.loop.checkpoint.pieces import read_pieces

        read_pieces(path, wanted)
        for target, source in copies:
            target.copy_(source)


def _read(path: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    from torch.distributed import checkpoint as dcp

    from allhands.loop.checkpoint.storage import Reader, dtype_named

    index = json.loads((path / INDEX_FILE).read_text())
    tensors = {
        key: torch.empty(entry["size"], dtype=dtype_named(entry["dtype"]), device="cpu")
        for key, entry in index.items()
        if wanted(key)
    }
    if tensors:
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            # Each rank reads by itself.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=Reader(path), planner=planner, no_dist=True)
    return tensors


def newest(folder: Path, weights: bool = True) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The newest checkpoint in a ``checkpoints`` folder that is whole: its path, its state (see
    `load`), what was passed over."""
    passed_over: list[str] = []
    for candidate in reversed(found_in(folder)):
        try:
            return candidate, load(candidate, weights), passed_over
        except UserError as error:
            passed_over.append(str(error))
    if passed_over:
        raise UserError(f"no checkpoint in {folder} can be used: " + "; ".join(passed_over))
    return None


def resolve(given: str | os.PathLike[str]) -> Path:
    """A checkpoint's folder, from that folder, a file in it, ``last``/``best``, a ``checkpoints``
    folder or a logdir.

    A checkpoint may also be named beside the ``checkpoints`` folder that it is in: ``logdir/best``.

    Raises:
        UserError: there is none; names the nearest that there is.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise UserError(
            f"a checkpoint is named by a path, and this is {kind_of(given)}; write "
            "'logdir/checkpoints/last'"
        )
    path = Path(given).expanduser()
    if path.name in (STATE_FILE, MANIFEST_FILE, INDEX_FILE):
        path = path.parent
    if not path.exists() and (path.parent / "checkpoints").is_dir():
        path = path.parent / "checkpoints" / path.name
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if found_in(path) and not (path / MANIFEST_FILE).exists():
        last = path / "last"
        path = last if last.exists() else found_in(path)[-1]
    if not path.exists():
        raise UserError(f"there is no checkpoint at {path}{_instead(path)}")
    if path.is_file():
        raise UserError(
            f"{path} is a file; give the folder of a checkpoint, such as logdir/checkpoints/last, "
            f"which holds {STATE_FILE}"
        )
    if not (path / MANIFEST_FILE).exists() and not any(path.iterdir()):
        raise UserError(f"there is no checkpoint in {path}, which is empty{_instead(path)}")
    return path.resolve()


def _instead(path: Path) -> str:
    """What could have been meant by a path at which nothing is."""
    beside = path.parent
    if not beside.is_dir():
        near = nearest(
            beside.name, [entry.name for entry in _entries(beside.parent) if entry.is_dir()]
        )
        return f": there is no folder {beside}" + (
            f"; did you mean {beside.parent / near}?" if near else ""
        )
    names = [
        entry.name
        for entry in _entries(beside)
        if entry.is_dir() and not entry.name.startswith(".")
    ]
    near = nearest(path.name, names)
    if near is not None:
        return f"; did you mean {beside / near}?"
    there = [checkpoint.name for checkpoint in found_in(beside)]
    if there:
        return f"; there are {', '.join(there)}"
    return "; to resume, write resume='auto', which starts anew where there is none"


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def check_files(path: Path) -> dict[str, Any]:
    """The manifest, once every file that it lists was found as it was written.

    Raises:
        UserError: one was not; names it.
    """
    manifest_path = path / MANIFEST_FILE
    try:
        manifest: dict[str, Any] = json.loads(manifest_path.read_text())
        expected = {
            str(name): (_checksums_in(entry), entry["bytes"])
            for name, entry in manifest["files"].items()
        }
    except FileNotFoundError:
        raise _unusable(path, f"{manifest_path} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(path, f"{manifest_path} cannot be read ({error})") from None
    for needed in (STATE_FILE, INDEX_FILE):
        if needed not in expected:
            raise _unusable(
                path,
                f"{manifest_path} lists no {needed}: it was written by another version of allhands",
            )
    for name, (totals, size) in expected.items():
        file = path / name
        if not file.is_file():
            raise _unusable(path, f"{file} is missing")
        if file.stat().st_size != size:
            found = file.stat().st_size
            raise _unusable(
                path,
                f"{file} has {found} bytes and should have {size}: it was cut short or changed",
            )
        if any(checksum(file, kind) != total for kind, total in totals.items()):
            raise _unusable(path, f"{file} does not match its checksum: it is damaged")
    return manifest


def _checksums_in(entry: dict[str, Any]) -> dict[str, str]:
    """The checksums of a file, by kind."""
    known = {kind: entry[kind] for kind in CHECKSUMS if kind in entry}
    if not known:
        raise KeyError("crc32")
    return known


def _unusable(path: Path, why: str) -> UserError:
    others = [other.name for other in found_in(path.parent) if other != path]
    instead = f"; others there: {', '.join(others)}" if others else ""
    return UserError(f"checkpoint {path} cannot be used: {why}{instead}")


def found_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [
        (match, path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    # Within an epoch, its end comes after all its steps.
    ordered = sorted(
        found, key=lambda item: (int(item[0][1]), item[0][2] is None, int(item[0][2] or 0))
    )
    return [path for _, path in ordered]


def put_in_place(aside: Path, final: Path, best: bool) -> None:
    """Rename a finished folder to its name, point ``last`` (and ``best``) at it, and remove what is
    not kept."""
    _replace_folder(aside, final)
    folder = final.parent
    point(folder / "last", final.name)
    if best:
        point(folder / "best", final.name)
    sync(folder)
    _prune(folder)


def _replace_folder(source: Path, target: Path) -> None:
    """Rename a folder over another; the old one is moved aside first, since a folder with content
    cannot be replaced."""
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def point(link: Path, name: str) -> None:
    """Let a link of a ``checkpoints`` folder point at a checkpoint in it, which is kept then."""
    with _links_change, atomic_write(link) as aside:
        aside.symlink_to(name)


def _prune(folder: Path) -> None:
    found = found_in(folder)
    kept = {path.name for path in found[-2:]}
    with _links_change:  # by callbacks, while a checkpoint is written
        kept |= {os.readlink(link) for link in folder.iterdir() if link.is_symlink()}
    for path in found:
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    for stale in folder.glob(".epoch-*"):
        if _abandoned(stale):
            shutil.rmtree(stale, ignore_errors=True)


def _abandoned(path: Path) -> bool:
    """Whether a half-written folder belongs to a process that no longer runs on this machine."""
    try:
        os.kill(int(path.name.split(".")[-2]), 0)
    except ProcessLookupError:
        return True
    except (ValueError, PermissionError):
        return False
    return False
