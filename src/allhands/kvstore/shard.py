"""What one server holds and decides: its chunks, the steps that are open, who is counted; no
connection of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from allhands.errors import AllhandsError, UserError
from allhands.kvstore.chunks import Chunk
from allhands.kvstore.key_rounds import KeyRounds
from allhands.kvstore.members import Members
from allhands.kvstore.parts import Meta, within
from allhands.kvstore.shard_keys import ShardKeys
from allhands.kvstore.shard_recovery import ShardRecovery
from allhands.kvstore.shard_state import load_state
from allhands.kvstore.table_rounds import RoundError, TableRounds
from allhands.kvstore.waits import Waits


class Shard(ShardKeys):
    """One server's part of the store.

    Args:
        number: which server.
        servers: how many there are.
        workers: how many workers are counted on.
        rules: what the workers have agreed on: `wait` ("sync", "async" or "ssp"), `staleness`,
            `damping`, `on_worker_loss`.

    Attributes:
        recovery: where the servers can come back.
        losses_are_final: a worker that is lost is not started again.
    """

    def __init__(self, number: int, servers: int, workers: int, rules: dict[str, Any]) -> None:
        super().__init__(number, servers, Members(workers))
        self.workers, self.rules = workers, rules
        self.synchronous = rules["wait"] == "sync"
        self.failure: str | None = None
        self.recovery: ShardRecovery | None = None
        self.losses_are_final = False
        self.rounds = KeyRounds(self.parts, self.members, rules["on_worker_loss"] == "continue")
        self._clips: dict[int, dict[int, float]] = {}  # by step: square sums by chunk
        self._clip_metas: dict[int, list[Meta]] = {}
        # By step: groups and clip of whoever came first.
        self._forms: dict[int, tuple[str, int]] = {}
        self._barrier: dict[int, tuple[Any, int, int]] = {}
        self._waits = Waits()

    # ------------------------------------------------------------------ steps

    def announce(self, meta: Meta) -> None:
        """A worker begins a step.

        Raises:
            UserError: its learning rate, or another number of the optimizer, is not that of the
                others.
        """
        if self.failure:
            raise UserError(self.failure)
        meta.left = meta.chunks
        if not self.synchronous:
            if self.spec is None:
                raise UserError(
                    f"create('dist_{self.rules['wait']}') applies each push by itself, which needs "
                    "an optimizer: call set_optimizer first"
                )
            if not meta.chunks:
                self._step_done(meta)
            return
        form = json.dumps([meta.groups, meta.clip, meta.expected])
        with self._lock:
            first, rank = (
                (form, meta.worker.rank)
                if meta.idle
                else self._forms.setdefault(meta.step, (form, meta.worker.rank))
            )
            if form != first:
                raise UserError(
                    f"in step {meta.step} worker {meta.worker.rank} has {form} for [the "
                    f"optimizer's options, clip_norm, expected], but worker {rank} has {first}: "
                    "all workers must step with the same"
                )
            while len(self._forms) > 64:
                del self._forms[next(iter(self._forms))]
            if meta.clip is not None:
                self._clip_metas.setdefault(meta.step, []).append(meta)
        if not meta.chunks:
            meta.worker.finished(meta, len(self.members.everyone()), 0)

    def push(
        self,
        chunk: Chunk,
        number: int,
        meta: Meta,
        values: torch.Tensor,
        release: Callable[[], None],
        wanted: bool,
        room: torch.Tensor | None = None,
    ) -> None:
        """A worker's values for a round; with `room`, they must stay as they are, and sums can be
        made there."""
        worker = meta.worker
        with chunk.lock:
            if self.recovery is not None and worker.occasion != self.recovery.occasion:
                release()  # of the time before the servers went back
                return
            if not self.synchronous:
                self._apply_alone(chunk, number, meta, values, release, wanted, room)
                return
            # The others went on without it, or it was sent again after a lost connection.
            if number <= chunk.version:
                release()
                if wanted:
                    chunk.waiting.append((worker, 0))
                    chunk.serve()
                if self.mirror is None:
                    self._part_done(meta, len(chunk.added) or 1)
                    return
                # Another server may have to close this step yet.
                if meta.clip is not None and chunk.square is not None:
                    self._add_square(meta.step, chunk.number, chunk.square)
                self._part_done(meta, chunk.workers or 1)
                return
            if number != chunk.version + 1:
                release()
                raise UserError(
                    f"the key '{chunk.key}' is at version {chunk.version}; a push for {number} "
                    "cannot be placed"
                )
            chunk.take(worker.rank, values, meta, release, room)
            whole = self.rounds.arrive(chunk, number, worker)
            if whole is None:
                chunk.forget(worker.rank)
            elif wanted:
                chunk.waiting.append((worker, number))
        if whole:
            self._go_on(chunk)

    def _go_on(self, chunk: Chunk) -> None:
        """Add up what can be, of a chunk and of those whose rounds have the same members. None of
        their locks is held."""
        for one in self.rounds.parts(chunk):
            with one.lock:
                self._after(one, one.add_up(*self.rounds.state(one)))

    def _after(self, chunk: Chunk, complete: bool) -> None:
        """Go on with a round whose pushes have been added up. The chunk's lock is held."""
        if not complete:
            return
        try:
            square = chunk.combine()
        except UserError as error:
            self.fail(str(error))
            return
        step, clip = chunk.added[0].step, chunk.lead().clip
        if clip is None:
            self._closed(chunk, 1.0)
            return
        chunk.clipped = True
        self._add_square(step, chunk.number, square)

    def _add_square(self, step: int, number: int, square: float) -> None:
        """A chunk or a table waits for the norm of all."""
        with self._lock:
            squares = self._clips.setdefault(step, {})
            squares[number] = square
            squares = dict(squares)
            metas = list(self._clip_metas.get(step, ()))
        _tell_squares(step, squares, metas)

    def commit(self, step: int, scale: float) -> None:
        """Apply a clipped step; the first worker that knows the norm of all servers says by how
        much."""
        with self._lock:
            squares = self._clips.pop(step, None)
            self._clip_metas.pop(step, None)
        for number in squares or {}:
            part = self.parts[number]
            if isinstance(part, TableRounds):
                self._rows_done(part, partial(part.commit, scale))
                continue
            with part.lock:
                if part.clipped:
                    self._closed(part, scale)

    def _closed(self, chunk: Chunk, scale: float) -> None:
        try:
            metas = chunk.close(scale, self.mirror)
        except AllhandsError as error:
            self.fail(f"the key '{chunk.key}': {error}")
            return
        if self.recovery is not None:
            self.recovery.closed(self, chunk)
        for meta in metas:
            self._part_done(meta, len(metas))

    def _part_done(self, meta: Meta, workers: int) -> None:
        meta.workers = workers
        with self._lock:
            meta.left -= 1
            done = meta.left == 0
        if done:
            self._step_done(meta)

    def _step_done(self, meta: Meta) -> None:
        meta.worker.finished(meta, meta.workers or 1, meta.staleness)
        if self.recovery is not None and not self.synchronous:
            self.recovery.stepped(self)

    # -------------------------------------------------- without waiting, and with bounded staleness

    def _apply_alone(
        self,
        chunk: Chunk,
        number: int,
        meta: Meta,
        values: torch.Tensor,
        release: Callable[[], None],
        wanted: bool,
        room: torch.Tensor | None,
    ) -> None:
        worker = meta.worker
        if number > chunk.last.get(worker.rank, 0):
            chunk.last[worker.rank] = number
            stale = max(0, chunk.version - chunk.seen.setdefault(worker.rank, chunk.version))
            chunk.clocks[worker.rank] = chunk.clocks.get(worker.rank, 0) + 1
            # It had no samples, so there is nothing to apply, and nothing becomes stale.
            if not meta.weight:
                release()
                chunk.version += 1
                chunk.seen = {rank: version + 1 for rank, version in chunk.seen.items()}
            else:
                options = self._damped(meta.options(chunk.group), chunk.group, stale)
                chunk.step_alone(meta, values, release, room, options)
                with self._lock:
                    meta.staleness = max(meta.staleness, stale)
        else:
            release()
        if wanted:
            chunk.waiting.append((worker, 0))
        self._serve(chunk)
        self._part_done(meta, 1)

    def _damped(
        self, options: dict[str, Any] | None, group: int, stale: int
    ) -> dict[str, Any] | None:
        """The options of a step, whose learning rate may be lower where it is stale."""
        if not (stale and self.rules.get("damping")):
            return options
        rate = (options or (self.spec.groups[group] if self.spec else {})).get("lr", 0.0)
        return {**(options or {}), "lr": rate / (1 + stale)}

    def _serve(self, chunk: Chunk) -> None:
        """Answer those who wait, if they are not too far ahead. The chunk's lock is held."""
        ssp = self.rules["wait"] == "ssp"
        chunk.serve(
            within(chunk.clocks, self.members.everyone(), self.rules["staleness"]) if ssp else None
        )

    def push_rows(
        self, table: TableRounds, number: int, meta: Meta, ids: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """A worker's rows for a round."""
        self._rows_done(
            table, lambda: table.push(number, meta, ids, rows, self.members, self.synchronous)
        )

    def _rows_done(self, table: TableRounds, close: Callable[[], list[Meta]]) -> None:
        try:
            done = close()
        except RoundError as error:
            self.fail(str(error))
            return
        if self.rules["wait"] == "ssp":
            table.serve(within(table.clocks, self.members.everyone(), self.rules["staleness"]))
        held = table.held_square()
        if held is not None:
            self._add_square(*held)
        for one in done:
            self._part_done(one, len(done))

    # ------------------------------------------------------------------ reading, meeting

    def pull(self, worker: Any, chunk: Chunk, version: int) -> None:
        """Send a value once it has this version."""
        with chunk.lock:
            chunk.waiting.append((worker, version if self.synchronous else 0))
            self._serve(chunk)

    def barrier(self, session: Any, request: int, number: int = 0) -> None:
        """Answer once all workers that are counted on have asked; with a number, also when they
        had, before a server was lost."""
        with self._lock:
            if number and number <= self.passed:
                session.reply(request)
                return
            self._barrier[session.rank] = (session, request, number)
        self._open_barrier()

    def long_wait(self, session: Any, said: dict[str, Any]) -> None:
        """A worker waits for long; all are told where it is for ever."""
        if self.members.holds(session) and (found := self._waits.add(session.rank, said)):
            self.fail(found)

    def _open_barrier(self) -> None:
        """No lock is held."""
        with self._lock:
            if not self._barrier or not self.members.everyone() <= self._barrier.keys():
                return
            waiting, self._barrier = self._barrier, {}
            self.passed = max([self.passed, *(number for _, _, number in waiting.values())])
        if self.mirror is not None:
            self.mirror.settings()
        for session, request, _ in waiting.values():
            session.reply(request)

    # ------------------------------------------------------ what a copy must know before the answer

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from a state that a worker gave."""
        load_state(self, tensors)
        self.copied()

    def copied(self) -> None:
        """Wait until the copy has what was set by no round. No lock is held."""
        if self.mirror is not None:
            self.mirror.refresh()

    # ------------------------------------------------------------------ who is there

    def gone(self, session: Any, reason: str, polite: bool) -> None:
        """A worker has left, or is lost; the others go on without it, or all are told that they
        cannot."""
        if not self.members.remove(session):
            return
        self._waits.remove(session.rank)
        with self._lock:
            self._barrier.pop(session.rank, None)
            self._initial = [one for one in self._initial if one[0] is not session]
        if not polite and self.rules["on_worker_loss"] == "stop":
            self.fail(reason)
            return
        if not polite and self.losses_are_final:
            self.has_left(session.rank)
        self._go_on_without(session.rank)

    def absent(self, rank: int, reason: str) -> None:
        """A worker has never come; as `gone`. It may still come, as one that comes again."""
        if not self.members.remove_absent(rank):
            return
        if self.rules["on_worker_loss"] == "stop":
            self.fail(reason)
            return
        print(f"allhands: server {self.number}: {reason}; the others go on", flush=True)
        self.has_left(rank)
        self._go_on_without(rank)

    def has_left(self, rank: int) -> None:
        """A worker that is gone has said goodbye: those who wait for what only it could give are
        told."""
        with self._lock:
            self.members.final.add(rank)
            self._tell_initialised()

    def _go_on_without(self, rank: int | None) -> None:
        """Close what waited only for a worker that is not counted any more; with None, for one that
        counts from later on."""
        self.rounds.look_again(rank)
        for chunk in self.chunks():
            with chunk.lock:
                chunk.waiting = [one for one in chunk.waiting if one[0].rank != rank]
                if not self.synchronous:
                    self._serve(chunk)
                    continue
                state = self.rounds.state(chunk)
                if rank is not None and rank not in state[1]:  # of a part of the key only
                    chunk.forget(rank)
                self._after(chunk, chunk.add_up(*state))
        for table in self.tables():
            self._rows_done(table, partial(table.look_again, self.members))
        if self.recovery is not None:
            self.recovery.look_again(self)
        self._open_barrier()
        with self._lock:
            clips = [
                (step, dict(squares), list(self._clip_metas.get(step, ())))
                for step, squares in self._clips.items()
            ]
        for clip in clips:  # the one that was lost may have been about to commit
            _tell_squares(*clip)

    # ------------------------------------------------------------------ going back to a snapshot

    def drop_open(self) -> None:
        """Forget all that is open: rounds, clipped steps, barriers, and who waits."""
        with self._lock:
            for one in (self._clips, self._clip_metas, self._forms, self._barrier, self._initial):
                one.clear()
        self._waits.clear()
        for part in list(self.parts.values()):
            with part.lock:
                part.drop()
        # last: while a chunk is not dropped, pushes of the time before come into it
        self.rounds.clear()

    def join(self, session: Any, begins: dict[str, int]) -> list[str]:
        """Count a worker again, from these rounds on; the keys for which it is too late, as the
        others are in that round already. The worker names later ones for them then, at all servers.
        """
        with self._lock:
            self.members.count_from(session.rank, begins)
            others = self.members.everyone() - {session.rank}
        late = set()
        for part in list(self.parts.values()):
            if part.key in begins:
                with part.lock:  # it begins beside the slowest
                    part.clocks[session.rank] = min(
                        (part.clocks.get(rank, 0) for rank in others), default=0
                    )
                    if self.synchronous and part.has_begun(begins[part.key]):
                        late.add(part.key)
        # It may have been late before, and rounds may wait for it.
        self._go_on_without(None)
        return sorted(late)

    def versions(self) -> dict[str, int]:
        """The newest round of each part, by number."""
        return {str(one.number): one.newest(self.synchronous) for one in list(self.parts.values())}

    def fail(self, text: str) -> None:
        """Nothing can go on; every worker that waits, or asks later, is told why."""
        self.failure = self.failure or text
        for session in self.members.sessions_now():
            session.tell({"op": "failed", "error": self.failure})


def _tell_squares(step: int, squares: dict[int, float], metas: list[Meta]) -> None:
    """Give all workers the square sums of a step, once those of all its chunks are there.

    No worker is known while the servers are going back to a snapshot.
    """
    if metas and len(squares) >= metas[0].chunks:
        for meta in metas:
            meta.worker.tell({"op": "squares", "step": step, "squares": list(squares.items())})
