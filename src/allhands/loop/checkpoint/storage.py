"""How torch.distributed.checkpoint writes and reads our files: a JSON index in place of its pickled
one, and checksums.

Every rank writes its own tensors into a file of its own. When all have done so, rank 0 writes the
rest, the index and the manifest, and puts the finished folder in its place.

Importing this takes half a second (torch.distributed.checkpoint brings in DTensor and sympy), so
only those who save or load do.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from allhands.compat import StorageInfo
from allhands.loop.checkpoint.direct_file import DirectFile
from allhands.loop.checkpoint.files import (
    CHECKSUMS,
    INDEX_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    checksum,
    fastest_checksum,
    sync,
)

# Behind the name of a file: the file that holds its checksum until rank 0 has written the manifest.
_SUM_SUFFIX = ".sum"


class _ChecksumFiles(FileSystem):
    """Makes the files that PyTorch's writer writes, and keeps their sums by name."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        kind = fastest_checksum()
        stream = DirectFile(Path(path), CHECKSUMS[kind]())
        try:
            yield stream
            stream.close()
        finally:
            stream.discard()
        self.sums[Path(path).name] = {kind: stream.checksum.hexdigest()}


class Writer(FileSystemWriter):
    """Writes one checkpoint into the folder `aside`; on rank 0, `complete` then puts it in its
    place.

    Args:
        aside: folder to write into; on a file system that all ranks share.
        rest: the content of ``state.pt``; rank 0's counts.
        summary: what the manifest says besides the files.
        complete: called on rank 0 when everything is on the disk.
    """

    def __init__(
        self, aside: Path, rest: bytes, summary: dict[str, Any], complete: Callable[[], None]
    ) -> None:
        super().__init__(aside, single_file_per_rank=True, sync_files=False, thread_count=1)
        self.fs = self._files = _ChecksumFiles()
        self.aside = aside
        self.rest = rest
        self.summary = summary
        self.complete = complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # PyTorch's makes the folder on every rank; rank 0 does it below, before any rank writes
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        shutil.rmtree(self.aside, ignore_errors=True)
        self.aside.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for name, total in self._files.sums.items():
            (self.aside / (name + _SUM_SUFFIX)).write_text(json.dumps(total))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {written.index: written.storage_data for part in results for written in part}
        (self.aside / STATE_FILE).write_bytes(self.rest)
        (self.aside / INDEX_FILE).write_text(json.dumps(_index(metadata, stored)) + "\n")
        files = {}
        for path in sorted(self.aside.iterdir()):
            if path.suffix == _SUM_SUFFIX:
                continue
            beside = path.with_name(path.name + _SUM_SUFFIX)
            kind = fastest_checksum()
            total = (
                json.loads(beside.read_text()) if beside.exists() else {kind: checksum(path, kind)}
            )
            beside.unlink(missing_ok=True)
            files[path.name] = {**total, "bytes": path.stat().st_size}
        (self.aside / MANIFEST_FILE).write_text(
            json.dumps({**self.summary, "files": files}, indent=2) + "\n"
        )
        for path in (
            self.aside / STATE_FILE,
            self.aside / INDEX_FILE,
            self.aside / MANIFEST_FILE,
            self.aside,
        ):
            sync(path)
        self.complete()


class Reader(FileSystemReader):
    """Reads what `Writer` has written. Nothing in it is unpickled."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, StorageInfo] = {}
        for key, entry in json.loads((self.folder / INDEX_FILE).read_text()).items():
            chunks = []
            for number, chunk in enumerate(entry["chunks"]):
                offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                # Path(…).name: a file of this folder, whatever the index says.
                place = StorageInfo(
                    Path(chunk["file"]).name, int(chunk["start"]), int(chunk["length"])
                )
                stored[MetadataIndex(key, offsets, number)] = place
            properties = TensorProperties(dtype=dtype_named(entry["dtype"]))
            tensors[key] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
        return Metadata(tensors, storage_data=stored)


def _index(metadata: Metadata, stored: dict[MetadataIndex, Any]) -> dict[str, Any]:
    index = {}
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = []
        for chunk in tensor.chunks:
            place = stored[MetadataIndex(key, chunk.offsets)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": place.relative_path,
                    "start": place.offset,
                    "length": place.length,
                }
            )
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        index[key] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return index


def dtype_named(name: str) -> torch.dtype:
    """The dtype that an index names."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype
