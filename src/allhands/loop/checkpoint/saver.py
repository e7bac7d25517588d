"""Saving while the training goes on: a copy is taken, and written by a thread."""

from __future__ import annotations

import io
import os
import shutil
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from allhands.comm import broadcast_ints
from allhands.errors import WorldError
from allhands.launch import worker
from allhands.loop.checkpoint import folder as folders
from allhands.loop.checkpoint import tree
from allhands.strategies.held import Held, dealt
from allhands.version import __version__
from allhands.world import World, connections
from allhands.world.subgroups import make_subgroup

if TYPE_CHECKING:
    from allhands.loop.checkpoint.storage import Writer

# A slow disk is no hang: the ranks wait for one another's files longer than for a collective of the
# training.
DISK_TIMEOUT = timedelta(hours=1)
# Seconds in which a write ends that is abandoned, as the connections of its group have ended.
_ABANDON_S = 5.0

# Said by PyTorch at every save of a single process, which is no mistake here. Filters are the
# process's, not the thread's.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


class Saver:
    """Writes checkpoints of a training, one at a time, in a thread of its own.

    Making, saving, waiting and closing are for all ranks together. What all ranks hold alike is
    dealt out among them, so that each copies and writes only its part; of tensors that lie in parts
    on the ranks (`Held`), each writes its own.

    Args:
        folder: the ``checkpoints`` folder, on a file system that all ranks share; made when absent.
        world: the processes. None is this process alone.
    """

    def __init__(self, folder: Path, world: World | None = None) -> None:
        self.folder = folder
        self.rank, self.size = (world.rank, world.world_size) if world is not None else (0, 1)
        self.group: Any = None
        self.owner = os.getpid()
        if world is not None and self.size > 1:
            # The thread talks while the training does: in a group of its own, or their messages
            # would mix.
            self.group = make_subgroup(None, DISK_TIMEOUT.total_seconds(), "gloo")
            self.owner = broadcast_ints([os.getpid()] if self.rank == 0 else None, world)[0]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="allhands-checkpoint")
        self._thread.submit(_prepare)
        self._pending: tuple[str, Future[None]] | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._writers: set[threading.Thread] = set()

    def save(
        self,
        state: Mapping[str, Any],
        own: Mapping[str, torch.Tensor],
        summary: Mapping[str, Any],
        step: int | None,
        best: bool,
    ) -> Path:
        """Take a copy of everything and have it written; returns before it is.

        Args:
            state: what all ranks hold alike, of tensors, numbers, strings and containers.
            own: tensors of this rank alone.
            summary: goes into the manifest; has ``"epoch"``.
            step: of a checkpoint within the epoch; None at its end.
            best: whether ``best`` is to point at it.

        Returns:
            The folder that will hold it.

        Raises:
            UserError: `state` holds something that cannot be stored safely.
            OSError: the one before could not be written; checkpoints before that are untouched.
        """
        from allhands.loop.checkpoint.storage import Writer

        tensors, rest = tree.split(state)
        self.wait()
        name = folders.name_of(summary["epoch"], step)
        mine = {key: tensors[key] for key in self._my_share(tensors)}
        mine |= {folders.own_key(self.rank, key): value for key, value in own.items()}
        staged = self._stage(mine)
        content = io.BytesIO()
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(rest, content)
        aside, final = self.folder / f".{name}.{self.owner}.part", self.folder / name
        versions = {"allhands": __version__, "torch": str(torch.__version__)}
        writer = Writer(
            aside,
            content.getvalue(),
            {**summary, **versions},
            lambda: folders.put_in_place(aside, final, best),
        )
        self._pending = (name, self._thread.submit(self._write, staged, writer))
        return final

    def wait(self) -> None:
        """Until the last checkpoint is whole on the disk.

        Raises:
            OSError: it could not be written.
        """
        if self._pending is None:
            return
        from torch.distributed.checkpoint.api import CheckpointException

        (name, future), self._pending = self._pending, None
        try:
            future.result()
        except CheckpointException as error:
            rank, (cause, _) = sorted(error.failures.items())[0]
            where = f" on rank {rank}" if self.size > 1 else ""
            said = f"the checkpoint {name} could not be written{where}; earlier ones are untouched"
            if isinstance(cause, FileNotFoundError) and self.size > 1:
                said += ". The logdir must be on a file system that all ranks share"
            if isinstance(cause, OSError):
                raise OSError(
                    cause.errno, f"{said}: {cause.strerror or cause}", cause.filename
                ) from None
            raise WorldError(f"{said}: {type(cause).__name__}: {cause}") from cause

    def close(self, longest: float | None = None) -> None:
        """Wait for the last one, at most `longest` seconds, and release the thread and the group.

        With a bound, what went wrong is not told: something worse is being told already.
        """
        try:
            if longest is None:
                self.wait()
            elif self._pending is not None:
                try:
                    self._pending[1].exception(longest)
                except TimeoutError:
                    pass
        finally:
            self._thread.shutdown(wait=longest is None)
            if self.group is not None and longest is None:
                dist.destroy_process_group(self.group)
            self.group = None

    def abandon(self) -> None:
        """Release the thread and the group, of which some rank is gone."""
        if self.group is not None:
            connections.end_all()
        if self._pending is not None:
            try:
                self._pending[1].exception(_ABANDON_S)
            except TimeoutError:
                # gloo does not always notice that a connection has ended.
                worker.stuck_threads.update(self._writers)
        self._thread.shutdown(wait=False)
        self.group = self._pending = None

    def _write(self, staged: dict[str, Any], writer: Writer) -> None:
        from torch.distributed import checkpoint as dcp

        from allhands.loop.checkpoint.pieces import SavePieces

        planner = SavePieces()
        self._writers.add(threading.current_thread())
        self._check_same(writer.aside.name)
        # PyTorch's own CRC-32 takes several times as long as the checksum that every file gets.
        crc = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            dcp.save(
                staged,
                storage_writer=writer,
                planner=planner,
                process_group=self.group,
                no_dist=self.size == 1,
            )
        except BaseException:
            if self.rank == 0:
                shutil.rmtree(writer.aside, ignore_errors=True)
            raise
        finally:
            torch.serialization.set_crc32_options(crc)

    def _check_same(self, name: str) -> None:
        """Raise when another rank is about to save another checkpoint: their parts would be put
        together."""
        if self.group is None:
            return
        mine = torch.zeros(128, dtype=torch.uint8, device="cpu")
        mine[: len(name)] = torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8)
        seen = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(seen, mine, group=self.group)
        names = [
            bytes(row.numpy()).rstrip(b"\0").decode().removeprefix(".").split(".")[0]
            for row in seen
        ]
        if len(set(names)) > 1:
            said = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(names))
            raise WorldError(
                f"the ranks save different checkpoints ({said}). save_checkpoint() and stop(…, "
                "now=True) are for all ranks at the same step: call them without `if rank == 0`"
            )

    def _my_share(self, tensors: Mapping[str, Any]) -> list[str]:
        """The keys that this rank writes: the largest first, always to the rank that has least so
        far."""
        parts = {key for key, value in tensors.items() if isinstance(value, Held)}
        mine = [
            key
            for key in tensors
            if key in parts and tensors[key].first and tensors[key].local is not None
        ]
        whole = sorted(tensors.keys() - parts)  # so that all ranks deal alike
        owners = dealt([tensors[key].nbytes for key in whole], self.size)
        mine += [key for key, owner in zip(whole, owners, strict=True) if owner == self.rank]
        return mine

    def _stage(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Copies in the processor's memory, in the buffers of the save before where they fit."""
        staged, buffers = {}, {}
        on_device = False
        for key, given in tensors.items():
            value: torch.Tensor = given.local if isinstance(given, Held) else given  # type: ignore[assignment]
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty(
                    value.shape,
                    dtype=value.dtype,
                    device="cpu",
                    pin_memory=value.device.type == "cuda",
                )
            buffer.copy_(value, non_blocking=True)
            on_device |= value.device.type == "cuda"
            buffers[key] = buffer
            staged[key] = given.with_local(buffer) if isinstance(given, Held) else buffer
        if on_device:
            torch.cuda.current_stream().synchronize()
        self._buffers = buffers
        return staged


def _prepare() -> None:
    # The thread has the process's priority: with a lower one, steps took longer, because they wait
    # for locks that it holds.
    import allhands.loop.checkpoint.storage  # noqa: F401
