"""Training that goes on after a worker is lost: states that are committed, and a function that
begins from the last commit.

Horovod starts the lost worker again and lets the others wait in place. Here `allhands launch
--max-restarts N` starts all workers again, with fewer of them where `--min-workers` allows it, and
they take up the last commit. A commit is therefore also a file, one on each host, in memory
(/dev/shm) where there is some: ALLHANDS_ELASTIC_DIR names another folder.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from allhands.atomic_write import atomic_write
from allhands.errors import UserError, kind_of
from allhands.horovod import engine, objects

FOLDER = "ALLHANDS_ELASTIC_DIR"
_RUN, _RESTARTS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"


class State:
    """What a training consists of. Subclasses say what that is: `contents` and `set_contents`."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._saved: Any = None
        self._commits = 0
        self._folder = _folder()

    def contents(self) -> Any:
        """All of it, as plain values, containers, tensors and arrays that later changes do not
        reach."""
        raise TypeError(f"{type(self).__name__} does not say what its contents are")

    def set_contents(self, contents: Any) -> None:
        """The inverse of `contents`."""
        raise TypeError(f"{type(self).__name__} does not say what its contents are")

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Functions to call after the workers were started again, such as one that adapts a
        learning rate to their number."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the functions of `register_reset_callbacks`."""
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the present state as the one to begin from after a restart; on all ranks at the same
        point of the training.

        Raises:
            UserError: it holds something other than plain values, containers, tensors and arrays.
        """
        self.save()
        self._commits += 1
        world = engine.current().world
        if self._folder is not None and world.local_rank == 0:
            self._write(self._folder)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Nothing: hosts are looked at when workers are started again. Here for scripts that call
        it."""

    def save(self) -> None:
        """Keep the present state in memory, for `restore`."""
        self._saved = self.contents()

    def restore(self) -> None:
        """Go back to the state that `save`, `sync` or `commit` kept last."""
        if self._saved is not None:
            self.set_contents(self._saved)

    def sync(self) -> None:
        """Give all ranks the state of the rank that has the newest commit, else that of rank 0."""
        running = engine.current()
        counts = running.allgather_object(self._commits, name="elastic.commits")
        root = counts.index(max(counts))
        contents = running.broadcast_object(
            self.contents() if running.world.rank == root else None, root, name="elastic.state"
        )
        if running.world.rank != root:
            self.set_contents(contents)
        self._commits = max(counts)
        self.save()

    def reset(self) -> None:
        """Nothing; for subclasses that have to look at the new number of workers."""

    def _write(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._commits == 1:  # what cannot be read again has to be known now, not after a failure
            objects.unpack(objects.pack(self._saved))
        with atomic_write(folder / "commit") as aside:
            objects.write({"commits": self._commits, "contents": self._saved}, aside)

    def take_up(self) -> bool:
        """Read this host's commit, if there is one. The ranks may read different ones until
        `sync`."""
        path = self._folder / "commit" if self._folder is not None else None
        if path is None or not path.is_file() or path.stat().st_uid != os.getuid():
            return False
        found = objects.read(path)
        self._commits = int(found["commits"])
        self.set_contents(found["contents"])
        return True

    def forget(self) -> None:
        """Remove this host's file: the training is over."""
        if self._folder is not None and engine.current().world.local_rank == 0:
            with contextlib.suppress(OSError):
                (self._folder / "commit").unlink(missing_ok=True)
                self._folder.rmdir()


class ObjectState(State):
    """Plain values as attributes: ``ObjectState(epoch=0, batch=0)``."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = sorted(values)
        for name, value in values.items():
            if name.startswith("_") or hasattr(State, name):
                raise UserError(f"a state cannot have a value called {name!r}; choose another name")
            setattr(self, name, value)

    def contents(self) -> dict[str, Any]:
        """The values."""
        return {name: objects.unpack(objects.pack(getattr(self, name))) for name in self._names}

    def set_contents(self, contents: dict[str, Any]) -> None:
        """Set the values that are in `contents`."""
        for name in self._names:
            if name in contents:
                setattr(self, name, contents[name])


def run_fn(
    function: Callable[..., Any], reset: Callable[[], Any] | None = None
) -> Callable[..., Any]:
    """Horovod's older name of `run`.

    Args:
        function: see `run`.
        reset: for Horovod's sake; workers that were started again have nothing to reset.
    """
    return run(function)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose first argument is a `State`, so that it begins from the last commit after a
    restart.

    No collective operation may come before it but those of the state. An error ends this worker;
    the launcher then starts all of them again, as often as --max-restarts says.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise UserError(
                f"elastic.run: the first argument is {kind_of(state)}; give a state, such as "
                "hvd.elastic.TorchState"
            )
        again = int(os.environ.get(_RESTARTS, "0")) > 0
        if again:
            state.take_up()
        state.sync()
        if again:
            state.reset()
            state.on_reset()
        result = function(state, *args, **kwargs)
        engine.current().barrier()
        state.forget()
        return result

    return wrapper


def _folder() -> Path | None:
    """Where commits of this job lie; None where nothing would start its workers again."""
    run_id = os.environ.get(_RUN)
    if not run_id:
        return None
    given = os.environ.get(FOLDER)
    memory = Path("/dev/shm")
    if given:
        base = Path(given)
    elif os.access(memory, os.W_OK):
        base = memory
    else:
        base = Path(tempfile.gettempdir())
    return base / f"allhands-elastic-{os.getuid()}-{run_id}"
