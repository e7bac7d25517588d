"""What happens when a loader process cannot send its batch: the training that waits for it gets an
error.

PyTorch pickles a batch in a thread of the loader process. Where that fails, it prints a traceback
there, and whoever reads the batches waits for ever.
"""

from __future__ import annotations

import errno
import multiprocessing.queues
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from allhands.errors import UserError, kind_of


class LoaderProcess:
    """The ``worker_init_fn`` of a loader's processes: failures to send are told to the reader; then
    the user's own is called.

    Args:
        name: the loader's name.
        init: the user's ``worker_init_fn``, or None.
        stream: what is sent is the micro-batches of a step and their sizes, not one batch.
    """

    def __init__(self, name: str, init: Callable[[int], Any] | None, stream: bool = False) -> None:
        self.name = name
        self.init = init
        self.stream = stream

    def __call__(self, number: int) -> None:
        def send_error(queue: Any, error: Exception, sent: Any) -> None:
            # (number of the batch, batch).
            if isinstance(sent, tuple) and len(sent) == 2 and isinstance(sent[0], int):
                queue.put((sent[0], _SendError(self._explanation(error, sent[1]))))

        # A hook of the standard library, looked up on the queue when the first batch is sent. This
        # process ends with the loader.
        multiprocessing.queues.Queue._on_queue_feeder_error = send_error  # type: ignore[attr-defined]
        if self.init is not None:
            self.init(number)

    def _explanation(self, error: Exception, sent: Any) -> str:
        begin = f"a loader process of loader '{self.name}' cannot send its batch: "
        alone = (
            ""
            if self.stream
            else ", or write num_workers=0, which reads the batches in the training's own process"
        )
        cause = _cause(error)
        if cause is not None:
            return begin + cause + alone
        batches = sent[0] if self.stream else [sent]
        found = next((member for batch in batches for member in _unsendable(batch, "batch")), None)
        where = "" if found is None else f"{found[0]} is {kind_of(found[1])}: "
        return (
            f"{begin}{where}{type(error).__name__}: {error}. Return tensors, arrays, numbers and "
            f"strings from the data set and the collate function{alone}"
        )


class _SendError(ExceptionWrapper):
    """Takes the place of a batch, and is raised by the DataLoader that reads it."""

    def __init__(self, message: str) -> None:
        self.message = message

    def reraise(self) -> None:
        raise UserError(self.message)


def read_error(name: str, error: RuntimeError) -> Exception | None:
    """What to raise for an error of PyTorch's that came of reading from the processes of loader
    `name`; None leaves it."""
    cause = _cause(error)
    if cause is not None:
        return UserError(f"loader '{name}' cannot get a batch from its loader process: {cause}")
    if str(error).startswith("DataLoader worker"):
        return RuntimeError(f"loader '{name}': {error}")
    return None


def _cause(error: BaseException) -> str | None:
    """What a limit of the system has to do with it, and what to write; None when nothing."""
    said = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if "AF_UNIX path too long" in said:
        folder = tempfile.gettempdir()
        return (
            f"the folder of temporary files, {folder}, is a path of {len(os.fsencode(folder))} "
            "bytes, and the address of a socket in it has room for about 60. Set the variable "
            "TMPDIR to a short path such as /tmp"
        )
    if (
        number == errno.EMFILE
        or "Too many open files" in said
        or "received 0 items of ancdata" in said
    ):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"too many files are open, the limit is {limit}, and each tensor on its way is one. "
            "Raise it (ulimit -n 65536), set a smaller num_workers or prefetch_factor"
        )
    if (
        number == errno.ENOSPC
        or ("/torch_" in said and "No space left" in said)
        or "insufficient shared memory" in said
    ):
        return (
            "the shared memory in /dev/shm is full. Make it larger (in a container: docker run "
            "--shm-size=8g), set a smaller batch_size, num_workers or prefetch_factor"
        )
    return None


def _unsendable(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The innermost members that cannot be pickled, each with its place in the batch."""
    if isinstance(value, (torch.Tensor, str, bytes, int, float, type(None))) or _is_sendable(value):
        return
    members: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        members = iter(value.items())
    elif isinstance(value, (list, tuple)):
        members = iter(enumerate(value))
    elif hasattr(value, "__dict__"):
        for name, member in vars(value).items():
            yield from _unsendable(member, f"{place}.{name}")
    for key, member in members:
        yield from _unsendable(member, f"{place}[{key!r}]")
    yield place, value


def _is_sendable(value: Any) -> bool:
    try:
        ForkingPickler.dumps(value)
    except Exception:
        return False
    return True
