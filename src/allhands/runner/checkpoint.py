"""Checkpoints on disk: written aside, synced, renamed; checked when read.

::

    checkpoints/
      epoch-0007/state.pt        a torch file, readable with torch.load(weights_only=True)
      epoch-0007/manifest.json   epoch, step, metrics, versions, and the SHA-256 of state.pt
      epoch-0008/…
      last -> epoch-0008
      best -> epoch-0007

The newest two epochs and the best one are kept, so that a damaged file never is the only one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import allhands
from allhands.errors import UserError

STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, bool, type(None), torch.Size, torch.dtype, torch.device)


def save(folder: Path, state: Mapping[str, Any], summary: Mapping[str, Any], best: bool) -> Path:
    """Write the checkpoint of one epoch and point ``last`` (and ``best``) at it.

    Args:
        folder: the ``checkpoints`` folder; made when absent.
        state: everything to restore, of tensors, numbers, strings and containers.
        summary: goes into the manifest; has ``"epoch"``.
        best: whether this is the best epoch so far.

    Raises:
        UserError: `state` holds an object that could only be stored by executing code on loading.
        OSError: the disk refused; earlier checkpoints are untouched.
    """
    _check_plain(state, "checkpoint")
    name = f"epoch-{summary['epoch']:04d}"
    aside = folder / f".{name}.{os.getpid()}.part"
    final = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        torch.save(dict(state), aside / STATE_FILE)
        manifest = {
            **summary,
            "files": {STATE_FILE: {"sha256": _sha256(aside / STATE_FILE), "bytes": (aside / STATE_FILE).stat().st_size}},
            "allhands": allhands.__version__,
            "torch": str(torch.__version__),
        }
        (aside / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (aside / STATE_FILE, aside / MANIFEST_FILE, aside):
            _sync(path)
        _replace_folder(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _point(folder / "last", name)
    if best:
        _point(folder / "best", name)
    _sync(folder)
    _prune(folder)
    return final


def load(path: Path) -> dict[str, Any]:
    """Read one checkpoint, onto the CPU.

    Raises:
        UserError: it is absent, incomplete or damaged; the message names the file and what can be used instead.
    """
    path = _resolve(path)
    manifest_path, state_path = path / MANIFEST_FILE, path / STATE_FILE
    try:
        manifest = json.loads(manifest_path.read_text())
        expected = manifest["files"][STATE_FILE]
    except FileNotFoundError:
        raise _unusable(path, f"{manifest_path} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(path, f"{manifest_path} cannot be read ({error})") from None
    if not state_path.is_file():
        raise _unusable(path, f"{state_path} is missing")
    size = state_path.stat().st_size
    if size != expected["bytes"]:
        raise _unusable(path, f"{state_path} has {size} bytes and should have {expected['bytes']}: it was cut short or changed")
    if _sha256(state_path) != expected["sha256"]:
        raise _unusable(path, f"{state_path} does not match its checksum: it is damaged")
    return torch.load(state_path, map_location="cpu", weights_only=True)


def newest(folder: Path) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The newest checkpoint in a ``checkpoints`` folder that is whole: its path, its state, and what was passed over."""
    passed_over: list[str] = []
    for candidate in reversed(_epochs(folder)):
        try:
            return candidate, load(candidate), passed_over
        except UserError as error:
            passed_over.append(str(error))
    if passed_over:
        raise UserError(f"no checkpoint in {folder} can be used: " + "; ".join(passed_over))
    return None


def _resolve(path: Path) -> Path:
    """A checkpoint's folder, from that folder, its state file, ``last``/``best``, a ``checkpoints`` folder or a logdir."""
    if path.name in (STATE_FILE, MANIFEST_FILE):
        path = path.parent
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if _epochs(path) and not (path / MANIFEST_FILE).exists():
        last = path / "last"
        path = last if last.exists() else _epochs(path)[-1]
    if not path.exists():
        raise UserError(f"resume: there is no checkpoint at {path}; write resume='auto' to start anew where there is none")
    if path.is_file():
        raise UserError(
            f"resume: {path} is a file; give the folder of a checkpoint, such as logdir/checkpoints/last, "
            f"which holds {STATE_FILE}"
        )
    return path.resolve()


def _unusable(path: Path, why: str) -> UserError:
    others = [other.name for other in _epochs(path.parent) if other != path]
    instead = f"; others there: {', '.join(others)}" if others else ""
    return UserError(f"checkpoint {path} cannot be used: {why}{instead}")


def _epochs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if re.fullmatch(r"epoch-\d{4,}", p.name) and p.is_dir())


def _replace_folder(source: Path, target: Path) -> None:
    """Rename a folder over another; the old one is moved aside first, since a folder with content cannot be replaced."""
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _point(link: Path, name: str) -> None:
    aside = link.with_name(f".{link.name}.{os.getpid()}.link")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    aside.symlink_to(name)
    aside.replace(link)


def _prune(folder: Path) -> None:
    epochs = _epochs(folder)
    kept = {path.name for path in epochs[-2:]}
    for link in ("last", "best"):
        if (folder / link).is_symlink():
            kept.add(os.readlink(folder / link))
    for path in epochs:
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_plain(value: Any, where: str) -> None:
    """Refuse what torch.load(weights_only=True) would not read back, before anything is written."""
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            _check_plain(key, f"{where} key")
            _check_plain(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple, set)):
        for number, item in enumerate(value):
            _check_plain(item, f"{where}[{number}]")
    elif isinstance(value, (np.generic, np.ndarray)) or not isinstance(value, _PLAIN):
        raise UserError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored safely; keep only "
            "tensors, numbers, strings, lists and dicts in state_dict()"
        )
