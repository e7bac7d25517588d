"""Do all ranks call the same things in the same order? When they do not, an error within seconds
instead of a hang.

A collective call that one rank makes alone (a user's callback saves under ``if rank == 0``; a rank
leaves the loop early) blocks every rank until the group's timeout, or exchanges garbage. So each
rank keeps a log of its coordinated calls:

    with calls.watch(world, on_mismatch=worker.fail):
        calls.note(("step", 17))          # on every rank, right before what all ranks do together
        calls.position("in on_step_end")  # optional: where the rank is meanwhile, for messages only

The n-th noted call of a rank must be the n-th one of every other rank. While calls follow one
another nothing happens but two looks a second into the group's store. A rank that has noted nothing
for two seconds tells the others there in which call it is, asks them for theirs, and compares:

* two ranks whose n-th calls differ, or a rank that has left while another one noted a further call:
  that can never end well, and `on_mismatch(message)` is called on each rank that sees it;
* a rank that has not come yet: it may be slow, which is never an error. After ten seconds one line
  on stderr says who is waited for, in which call, and which line of the user's code that rank is
  in.

Every three seconds each rank also compares its calls with the newest of rank 0, for calls that do
not make anybody wait.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

from allhands.comm import hook_calls, log
from allhands.comm.disagreement import differing, in_words, published
from allhands.comm.disagreement import message as disagreement_message
from allhands.comm.log import KEPT, note, position, text_of, users_line
from allhands.compat import default_store
from allhands.world import World

__all__ = ["Watcher", "note", "position", "restart", "watch"]

_running: list[Watcher] = []

# A rank publishes its newest calls only: for older ones, the rank that is ahead looks into its own
# log.
_PUBLISHED = 64
_LAST_WAIT = 5.0  # seconds that rank 0 waits for the others in the end


def watch(
    world: World,
    on_mismatch: Callable[[str], Any],
    *,
    every: float = 0.5,
    quiet: float = 2.0,
    late: float = 10.0,
    audit: float = 3.0,
) -> Watcher:
    """Begin to compare the calls of all ranks, in a daemon thread, until `Watcher.stop` or the end
    of a ``with`` block.

    To be called on every rank, or on none, before the first call that is noted. It does nothing in
    a world of one, and in a group without a store (torch's own mpi). Each watch counts calls from
    zero and has keys of its own in the store, so trainings may follow one another, or run inside
    one another, in the same world.

    Args:
        world: the processes; their torch group must exist.
        on_mismatch: called at most once, **in the watcher's thread**, with one line that names
            ranks and calls. The thread that makes the calls is blocked in native code then and
            cannot be interrupted, so this should end the process, as `allhands.launch.worker.fail`
            does.
        every: seconds between two looks while all goes well.
        quiet: seconds without a new call after which a rank counts as waiting and asks the others.
        late: seconds without a new call after which the ranks that have not come are named on
            stderr. Doubles with each time.
        audit: seconds between two looks at rank 0's newest calls while nobody waits.

    Returns:
        The watcher; also a context manager.
    """
    return Watcher(world, on_mismatch, every, quiet, late, audit)


def restart() -> None:
    """The world has a new group: what runs compares the calls from here on. To be called on every
    rank of it at the same place."""
    for watcher in _running:
        watcher.begin()


class Watcher:
    """The thread of one `watch`. Nothing that happens to the store is raised: without a store there
    is nobody to compare with."""

    def __init__(
        self,
        world: World,
        on_mismatch: Callable[[str], Any],
        every: float,
        quiet: float,
        late: float,
        audit: float,
    ) -> None:
        self._on_mismatch = on_mismatch
        self._every, self._quiet, self._late, self._audit = every, quiet, late, audit
        self._world = world
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self.begin()
        _running.append(self)

    def begin(self) -> None:
        """Compare the calls from here on, in the world as it is now."""
        if self._thread is not None:
            self._stopped.set()
            hook_calls.end(self)
            self._thread.join(5.0)
        world = self._world
        self._rank, self._world_size = world.rank, world.world_size
        self._base = log.made
        self._caller = threading.get_ident()
        self._stopped = threading.Event()
        # How many asks of any rank were seen; the next one is the key f"ask/{self._asks}".
        self._asks = 0
        self._answered: set[int] = set()  # ranks whose key exists
        self._seen = 0
        self._since = time.monotonic()
        self._prefix = ""
        self._store = self._open_store()
        self._meeting: Any = None  # the store of the thread that makes the calls
        self._thread = None
        if self._store is not None:
            hook_calls.begin(self)
            self._thread = threading.Thread(target=self._run, name="allhands-calls", daemon=True)
            self._thread.start()

    def stop(self, error: BaseException | None = None) -> None:
        """End the watch on this rank, and let the others know that it makes no further call. Safe
        to call twice.

        Args:
            error: what this rank ends with, when it does not end normally.
        """
        self._stopped.set()
        if self in _running:
            _running.remove(self)
        if self._thread is None or self._store is None:
            return
        hook_calls.end(self)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)  # a store whose host is gone may let it wait; it is a daemon
        if not self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._publish(
                    ended="" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
                )
                self._store.set(f"ended/{self._rank}", "")
                if self._rank == 0 and isinstance(error, SystemExit | None):
                    self._let_the_others_end()
        self._thread = self._store = None

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(error)

    # For `hook_calls`

    def meeting_store(self) -> Any:
        """A store for the thread that makes the calls; the watcher's own may wait for an answer."""
        if self._meeting is None:
            self._meeting = self._open_store()
        return self._meeting

    def section(self) -> int:
        """How many calls were noted since the watch began."""
        return log.made - self._base

    def _let_the_others_end(self) -> None:
        """Stay, because the store may live in this process, while the others say that they have
        ended; a few seconds at most.

        A rank that finds the store gone says nothing, but torch logs a page of native frames for
        it.
        """
        ended = [f"ended/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + _LAST_WAIT
        pause = 0.002
        while not self._store.check(ended) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)

    def _open_store(self) -> Any:
        """The group's store, over a connection of its own: another thread may hold that of the
        group for minutes."""
        if self._world.is_alone:
            return None
        from torch.distributed import PrefixStore, is_initialized

        shared = default_store() if is_initialized() else None
        if shared is None:
            return None
        own = shared.clone()
        own.set_timeout(timedelta(seconds=30))
        if not self._prefix:
            # Each rank counts its watches by itself, and all count alike.
            self._prefix = f"allhands/calls/{own.add(f'allhands/calls/runs/{self._rank}', 1)}"
        return PrefixStore(self._prefix, own)

    # The thread

    def _run(self) -> None:
        try:
            message = self._look_until_stopped()
        except RuntimeError:  # torch.distributed's errors: the store is gone
            return
        if message is not None:
            self._on_mismatch(message)

    def _look_until_stopped(self) -> str | None:
        """The message of a mismatch; None when the watch was stopped first."""
        next_poll, gap = 0.0, self._every / 4
        found_at: float | None = None
        pause = self._every
        next_audit, suspect = self._since + self._audit, False
        while not self._stopped.wait(pause):
            now, made = time.monotonic(), log.made - self._base
            if made != self._seen:
                self._seen, self._since = made, now
            waiting = suspect or now - self._since >= self._quiet
            asked = self._count_asks()
            if not waiting:
                next_poll, gap = 0.0, self._every / 4
                pause = self._every
                due = now >= next_audit
                if asked or (due and self._rank == 0):
                    self._publish()
                if due:
                    next_audit = now + self._audit
                    suspect = self._rank > 0 and self._differs_from_first()
                if not suspect:
                    continue
            if asked or now >= next_poll:
                self._publish()
            if now >= next_poll:
                self._ask()
                # Often at first, when a mismatch is new; a long wait for a slow rank must not
                # burden the store.
                next_poll, gap = now + gap, min(1.5 * gap, 8 * self._every)
                states = self._read()
                message, complete = self._contradiction(states)
                if message:
                    # Those that are on their way to the same place shall be in the message too. A
                    # rank that is not waiting looks whether it is asked only every so often.
                    found_at = found_at or now
                    if complete or now - found_at >= 3 * self._every:
                        return message
                if now - self._since >= self._late:
                    self._warn(states, now)
            pause = min(self._every, max(0.02, next_poll - now))
        return None

    def _differs_from_first(self) -> bool:
        """Whether some call of rank 0 is another one here. Calls that do not block can go on side
        by side for hours."""
        if not self._store.check(["rank/0"]):
            return False
        _, own = self._own_calls()
        first = json.loads(self._store.get("rank/0"))
        if any(number in own and own[number] != label for number, label in first["calls"]):
            return True
        return differing(self._rank, {self._rank: self._state(), 0: first}) is not None

    def _count_asks(self) -> bool:
        """Whether some rank has asked since the last look."""
        before = self._asks
        while self._store.check([f"ask/{self._asks}"]):
            self._asks += 1
        return self._asks > before

    def _ask(self) -> None:
        self._store.set(f"ask/{self._asks}", "")
        self._asks += 1

    def _publish(self, ended: str | None = None) -> None:
        self._store.set(f"rank/{self._rank}", json.dumps(self._state(ended)))

    def _state(self, ended: str | None = None) -> dict[str, Any]:
        """What this rank has called, for the others."""
        made, labels = self._own_calls()
        newest = [
            [number, labels[number]]
            for number in range(max(1, made - _PUBLISHED + 1), made + 1)
            if number in labels
        ]
        # Read after `made`: what is complete by then is in it.
        hooks = published(self._base, _PUBLISHED)
        return {
            "made": made,
            "calls": newest,
            "where": self._where(),
            "ended": ended,
            "hooks": hooks,
        }

    def _own_calls(self) -> tuple[int, dict[int, str]]:
        """How many calls were noted, and the labels of the newest by number, counted from 1."""
        made = log.made
        ring = list(log.ring)
        # What was noted since then has overwritten the oldest entries of the copy.
        first = max(self._base, log.made - KEPT)
        return made - self._base, {
            n - self._base + 1: text_of(ring[n % KEPT]) for n in range(first, made)
        }

    def _where(self) -> str:
        place = users_line(sys._current_frames().get(self._caller))
        return "; ".join(part for part in (place, text_of(log.place)) if part)

    def _read(self) -> dict[int, dict[str, Any]]:
        """What the other ranks have published, as far as they have."""
        for rank in range(self._world_size):
            if (
                rank != self._rank
                and rank not in self._answered
                and self._store.check([f"rank/{rank}"])
            ):
                self._answered.add(rank)
        ranks = sorted(self._answered)
        keys = [f"rank/{rank}" for rank in ranks]
        if keys and self._store.has_extended_api():
            values = self._store.multi_get(keys)
        else:
            values = [self._store.get(key) for key in keys]
        return {rank: json.loads(value) for rank, value in zip(ranks, values, strict=True)}

    # What the states of the ranks mean

    def _contradiction(self, states: dict[int, dict[str, Any]]) -> tuple[str, bool]:
        """What cannot end well, or "", and whether every rank's part in it is known."""
        made, own = self._own_calls()
        theirs = {rank: dict(state["calls"]) for rank, state in states.items()}
        differ = [
            number
            for calls in theirs.values()
            for number, label in calls.items()
            if number in own and own[number] != label
        ]
        if differ:
            number = min(differ)
            theirs[self._rank] = own
            states = {**states, self._rank: {"made": made, "where": self._where()}}
            complete = len(states) == self._world_size and all(
                state["made"] >= number for state in states.values()
            )
            at = {rank: calls[number] for rank, calls in theirs.items() if number in calls}
            places = {rank: states[rank]["where"] for rank in at}
            past = [rank for rank in at if states[rank]["made"] > number]
            last = next(
                (calls[number - 1] for calls in theirs.values() if number - 1 in calls), None
            )
            return disagreement_message(at, places, past, last), complete
        apart = differing(self._rank, {**states, self._rank: self._state()})
        if apart is not None:
            return apart
        gone = {
            rank: state
            for rank, state in states.items()
            if state["ended"] is not None and state["made"] < made
        }
        if not gone:
            return "", True
        rank, state = min(gone.items(), key=lambda item: item[1]["made"])
        last = f"after '{state['calls'][-1][1]}'" if state["calls"] else "before any call"
        why = f" with {state['ended']}" if state["ended"] else ""
        message = (
            f"rank {rank} has left {last}{why}, while rank {self._rank} is in '{own[made]}' "
            f"({self._where()}), for which all "
            f"{self._world_size} ranks are needed: let all ranks leave at the same place"
        )
        return message, True

    def _warn(self, states: dict[int, dict[str, Any]], now: float) -> None:
        made, own = self._own_calls()
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        missing = [rank for rank in others if rank not in states or states[rank]["made"] < made]
        if not missing or made == 0:
            return
        self._late *= 2  # a wait that comes back each epoch is not told each time
        if self._store.add(f"warned/{made}", 1) > 1:
            return  # another rank that waits has said it
        places = "; ".join(
            f"rank {rank} is at {states[rank]['where'] or 'an unknown place'}"
            if rank in states
            else f"rank {rank} does not answer"
            for rank in missing[:4]
        )
        more = f"; and {len(missing) - 4} more" if len(missing) > 4 else ""
        line = (
            f"allhands: rank {self._rank} has waited {now - self._since:.0f} s in '{own[made]}' "
            f"for {in_words(missing)}: {places}{more}; waiting on\n"
        )
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(line)
            sys.stderr.flush()
