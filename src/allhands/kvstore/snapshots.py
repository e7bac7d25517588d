"""What a server writes down every few steps, so that it can be started again."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from allhands.errors import UserError
from allhands.kvstore.shard_state import load_state, state_of, state_of_chunk

# A server may have one more than another when it is killed; the one before is the one that all
# have.
_KEPT = 3


class Snapshots:
    """The snapshots of one server of one store of one job.

    Args:
        folder: of all snapshots; on this host, or shared.
        job: the job's name, so that another job's are never taken for this one's.
        store: the number of the store in the job.
        server: the number of the server.
        every: steps between two of them.
    """

    def __init__(self, folder: str, job: str, store: int, server: int, every: int) -> None:
        self.every = every
        self._root = Path(folder) / f"job-{job}-store-{store}"
        self._folder = self._root / f"server-{server}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"snapshot_dir={folder} cannot be written on the host of server {server}: {error}"
            ) from None
        self._parts: dict[int, dict[str, torch.Tensor]] = {}
        self._have: dict[int, set[int]] = {}
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[
            tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None
        ] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="snapshots", daemon=True)
        self._writer.start()

    def steps(self) -> list[int]:
        """The steps of which there is a whole one."""
        return sorted(
            int(path.stem.split("-")[1]) for path in self._folder.glob("step-*.safetensors")
        )

    def collect(self, shard: Any, chunk: Any) -> None:
        """Take a chunk that has just got a version of which there is to be a snapshot; write it
        once all have it.

        The chunk's lock is held. It cannot get its next version before all workers have this one
        from all servers, so that a snapshot holds every chunk at the same step.
        """
        step = chunk.version
        part = state_of_chunk(chunk, True)
        with self._lock:
            self._parts.setdefault(step, {}).update(part)
            have = self._have.setdefault(step, set())
            have.add(chunk.number)
            wanted = shard.trained()
            if not wanted <= have:
                return
            tensors = self._parts.pop(step)
            del self._have[step]
            for old in [old for old in self._parts if old < step]:
                del self._parts[old], self._have[old]
        others = {number for number in shard.chunks if number not in wanted}
        tensors |= state_of(shard, True, others)
        self._queue.put((step, tensors, about(shard, step)))

    def take_all(self, shard: Any, step: int) -> None:
        """Write all chunks as they are now; where nobody waits for anybody, there is no step that
        all have."""
        self._queue.put((step, state_of(shard, True, set(shard.chunks)), about(shard, step)))

    def _write(self) -> None:
        while (job := self._queue.get()) is not None:
            step, tensors, fields = job
            target = self._folder / f"step-{step}.safetensors"
            aside = self._folder / f".step-{step}.{os.getpid()}"
            try:
                save_file(
                    {name: value.contiguous() for name, value in tensors.items()},
                    aside,
                    {"allhands": json.dumps(fields)},
                )
                with aside.open("rb") as written:
                    os.fsync(written.fileno())
                aside.replace(target)
                for old in self.steps()[:-_KEPT]:
                    (self._folder / f"step-{old}.safetensors").unlink(missing_ok=True)
            except OSError as error:
                print(
                    f"allhands: the snapshot of step {step} could not be written: {error}",
                    flush=True,
                )
                aside.unlink(missing_ok=True)

    def restore(self, shard: Any, step: int) -> None:
        """Bring the shard back to a step.

        Raises:
            UserError: there is no such snapshot, or it is damaged.
        """
        path = self._folder / f"step-{step}.safetensors"
        try:
            with safe_open(os.fspath(path), "pt") as file:
                fields = json.loads((file.metadata() or {})["allhands"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"the snapshot {path} cannot be used: {error}") from error
        with self._lock:
            self._parts.clear()
            self._have.clear()
        shard.rebuild(fields)
        load_state(shard, tensors)
        for later in [later for later in self.steps() if later > step]:
            with contextlib.suppress(OSError):
                (self._folder / f"step-{later}.safetensors").unlink()

    def remove(self) -> None:
        """The job is over; nobody will need them."""
        self._queue.put(None)
        self._writer.join(30.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._root.rmdir()


def about(shard: Any, step: int) -> dict[str, Any]:
    """What a shard is, beside its numbers."""
    spec, trained = shard.spec, shard.trained()
    return {
        "step": step,
        "keys": shard.keys,
        "sets": shard.sets,
        "compression": shard.compression,
        "optimizer": None if spec is None else {"name": spec.name, "groups": list(spec.groups)},
        "chunks": [
            [
                one.number,
                one.key,
                one.start,
                one.stop,
                str(one.weights.dtype).removeprefix("torch."),
                one.group,
                one.trained,
            ]
            for one in list(shard.chunks.values())
        ],
        "versions": {
            str(one.number): step if one.number in trained else one.version
            for one in list(shard.chunks.values())
        },
        "tables": [one.form() for one in list(shard.tables.values())],
        "table_versions": {str(one.number): one.version for one in list(shard.tables.values())},
        "live": sorted(shard.members.everyone()),
    }
