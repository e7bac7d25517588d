"""Checkpoints: written aside by torch.distributed.checkpoint, synced, renamed; checked when
read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.loop.checkpoint.files import INDEX_FILE, MANIFEST_FILE, STATE_FILE
from allhands.loop.checkpoint.folder import found_in, load, load_own, newest, reader, resolve
from allhands.loop.checkpoint.saver import Saver

__all__ = [
    "INDEX_FILE",
    "MANIFEST_FILE",
    "STATE_FILE",
    "Saver",
    "found_in",
    "load",
    "load_own",
    "newest",
    "reader",
    "resolve",
    "save",
]


def save(folder: Path, state: Mapping[str, Any], summary: Mapping[str, Any], best: bool) -> Path:
    """Write the checkpoint of one epoch from this process alone, and wait until it is on the disk;
    see `Saver.save`."""
    saver = Saver(folder)
    try:
        return saver.save(state, {}, summary, None, best)
    finally:
        saver.close()
