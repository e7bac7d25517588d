"""The files of a checkpoint."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.json"


def sha256(path: Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
