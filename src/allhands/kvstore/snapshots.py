"""What a server writes down every few steps, so that it can be started again."""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from allhands.errors import UserError
from allhands.kvstore.shard_state import Whole, load_whole, whole_of
from allhands.kvstore.store_state import read_file, write_file

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
        self._parts: dict[int, dict[int, Whole]] = {}  # by step, and by the part's number
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[int, Whole] | None] = queue.SimpleQueue()
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
        step, wanted = chunk.version, shard.trained()
        with self._lock:
            have = self._parts.setdefault(step, {})
            have[chunk.number] = chunk.whole()
            if not wanted <= have.keys():
                return
            for old in [old for old in self._parts if old <= step]:
                del self._parts[old]
        self.take_all(shard, step, have.values())

    def take_all(self, shard: Any, step: int, taken: Iterable[Whole] = ()) -> None:
        """Write all parts as they are now, or as they were `taken` before; where nobody waits for
        anybody, there is no step that all have."""
        self._queue.put((step, whole_of(shard, taken)))

    def _write(self) -> None:
        while (job := self._queue.get()) is not None:
            step, (fields, tensors) = job
            target = self._folder / f"step-{step}.safetensors"
            try:
                write_file(target, fields, tensors)
                for old in self.steps()[:-_KEPT]:
                    (self._folder / f"step-{old}.safetensors").unlink(missing_ok=True)
            except OSError as error:
                print(
                    f"allhands: the snapshot of step {step} could not be written: {error}",
                    flush=True,
                )

    def restore(self, shard: Any, step: int) -> None:
        """Bring the shard back to a step.

        Raises:
            UserError: there is no such snapshot, or it is damaged.
        """
        path = self._folder / f"step-{step}.safetensors"
        try:
            about, tensors = read_file(path)
            whole = {name: about[name] for name in ("settings", "parts")}, tensors
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"the snapshot {path} cannot be used: {error}") from error
        with self._lock:
            self._parts.clear()
        load_whole(shard, whole)
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
