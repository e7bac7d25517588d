"""What one server holds and decides: its chunks, the steps that are open, who is counted; no
connection of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allhands.errors import AllhandsError, UserError
from allhands.kvstore.members import KeyRounds, Members
from allhands.kvstore.parts import KeyPart, Meta, within
from allhands.kvstore.shard_keys import ShardKeys
from allhands.kvstore.shard_recovery import ShardRecovery
from allhands.kvstore.shard_state import load_state
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
        """A worker begins a step."""
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
        part: KeyPart,
        number: int,
        meta: Meta,
        values: Any,
        release: Callable[[], None],
        wanted: bool,
        room: torch.Tensor | None = None,
        early: bool = False,
    ) -> None:
        """A worker's values, or rows, for a round.

        Args:
            part: of which key.
            number: the round.
            meta: the worker's part in the step.
            values: those of a chunk, or ids and rows.
            release: what to do when the values are not needed any more.
            wanted: the new value is to be sent back.
            room: where sums can be made, because the values must stay as they are.
            early: it came before the round was open.
        """
        worker = meta.worker
        with part.lock:
            if self.recovery is not None and worker.occasion != self.recovery.occasion:
                release()  # of the time before the servers went back
                return
            if not self.synchronous:
                self._apply_alone(part, number, meta, values, release, wanted, room)
                return
            # The others went on without it, or it was sent again after a lost connection.
            if number <= part.version:
                release()
                if wanted:
                    part.waiting.append((worker, 0, None))
                    part.serve()
                if self.mirror is None:
                    self._part_done(meta, len(part.added) or 1)
                    return
                # Another server may have to close this step yet.
                if meta.clip is not None and part.square is not None:
                    self._add_square(meta.step, part.number, part.square)
                self._part_done(meta, part.workers or 1)
                return
            ahead = number - part.version - 1
            if ahead > part.beyond:
                release()
                raise UserError(
                    f"the key '{part.key}' is at version {part.version}; a push for {number} "
                    "cannot be placed; pull it first"
                )
            if ahead:
                part.early[worker.rank] = (number, meta, values, release, wanted, room, True)
                return
            part.take(worker.rank, values, meta, release, room)
            whole = self.rounds.arrive(part, number, worker, early)
            if whole is None:
                part.forget(worker.rank)
            elif wanted:
                part.waiting.append((worker, number, None))
        if whole:
            self._go_on(part)

    def _go_on(self, part: KeyPart) -> None:
        """Add up what can be, of a part and of those whose rounds have the same members. None of
        their locks is held."""
        for one in self.rounds.parts(part):
            with one.lock:
                self._after(one, one.add_up(*self.rounds.state(one)))

    def _after(self, part: KeyPart, complete: bool) -> None:
        """Go on with a round whose pushes have been added up. The part's lock is held."""
        if not complete:
            return
        try:
            square = part.combine()
        except UserError as error:
            self.fail(str(error))
            return
        lead = part.lead()
        if lead.clip is None:
            self._closed(part, 1.0)
            return
        part.clipped = True
        self._add_square(lead.step, part.number, square)

    def _add_square(self, step: int, number: int, square: float) -> None:
        """A part waits for the norm of all."""
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
            # No worker knows the norm before all parts are in. So this one is of the time before a
            # server was lost, and the step that is open now has a commit of its own to come.
            if not _all_in(self._clips.get(step, {}), self._clip_metas.get(step, ())):
                return
            squares = self._clips.pop(step, None)
            self._clip_metas.pop(step, None)
        for number in squares or {}:
            part = self.parts[number]
            with part.lock:
                if part.clipped:
                    self._closed(part, scale)

    def _closed(self, part: KeyPart, scale: float) -> None:
        try:
            metas = part.close(scale, self.mirror)
        except AllhandsError as error:
            self.fail(f"the key '{part.key}': {error}")
            return
        if self.recovery is not None:
            self.recovery.closed(self, part)
        for meta in metas:
            self._part_done(meta, len(metas))
        early, part.early = part.early, {}
        for push in early.values():
            self.push(part, *push)

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
        part: KeyPart,
        number: int,
        meta: Meta,
        values: Any,
        release: Callable[[], None],
        wanted: bool,
        room: torch.Tensor | None,
    ) -> None:
        rank = meta.worker.rank
        if number <= part.last.get(rank, 0):
            release()
        else:
            part.last[rank] = number
            part.clocks[rank] = part.clocks.get(rank, 0) + 1
            stale = part.stale(rank)
            if not meta.weight:  # it had no samples, so there is nothing to apply
                release()
                part.skip()
            else:
                options = self._damp(meta.options(part.group), part.group, stale)
                part.step_alone(meta, values, release, room, options)
                with self._lock:
                    meta.staleness = max(meta.staleness, stale)
        if wanted:
            part.waiting.append((meta.worker, 0, None))
        self._serve(part)
        self._part_done(meta, 1)

    def _damp(
        self, options: dict[str, Any] | None, group: int, stale: int
    ) -> dict[str, Any] | None:
        """The options of a step, whose learning rate may be lower where it is stale."""
        if not (stale and self.rules.get("damping")):
            return options
        rate = (options or (self.spec.groups[group] if self.spec else {})).get("lr", 0.0)
        return {**(options or {}), "lr": rate / (1 + stale)}

    def _serve(self, part: KeyPart) -> None:
        """Answer those who wait, if they are not too far ahead. The part's lock is held."""
        ssp = self.rules["wait"] == "ssp"
        part.serve(
            within(part.clocks, self.members.everyone(), self.rules["staleness"]) if ssp else None
        )

    # ------------------------------------------------------------------ reading, meeting

    def pull(self, worker: Any, part: KeyPart, version: int, asked: Any = None) -> None:
        """Send a value, or the rows that were `asked` for, once there is this version."""
        with part.lock:
            part.waiting.append((worker, version if self.synchronous else 0, asked))
            self._serve(part)

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
        for part in list(self.parts.values()):
            with part.lock:
                part.waiting = [one for one in part.waiting if one[0].rank != rank]
                if not self.synchronous:
                    self._serve(part)
                    continue
                state = self.rounds.state(part)
                if rank is not None and rank not in state[1]:  # of a part of the key only
                    part.forget(rank)
                self._after(part, part.add_up(*state))
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
        for part in list(self.parts.values()):
            with part.lock:
                part.drop()
        # While a part is not dropped, pushes of the time before come into it, and what they add up
        # to comes into these.
        self.rounds.clear()
        with self._lock:
            for one in (self._clips, self._clip_metas, self._forms, self._barrier, self._initial):
                one.clear()
        self._waits.clear()

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
        return {str(one.number): one.newest(self.synchronous) for one in list(self.parts.values())}

    def fail(self, text: str) -> None:
        """Nothing can go on; every worker that waits, or asks later, is told why."""
        self.failure = self.failure or text
        for session in self.members.sessions_now():
            session.tell({"op": "failed", "error": self.failure})


def _all_in(squares: Mapping[int, float], metas: Sequence[Meta]) -> bool:
    """Whether the square sums of all parts of a step are there.

    No worker is known while the servers are going back to a snapshot.
    """
    return bool(metas) and len(squares) >= metas[0].chunks


def _tell_squares(step: int, squares: dict[int, float], metas: list[Meta]) -> None:
    """Give all workers the square sums of a step, once those of all its chunks are there."""
    if _all_in(squares, metas):
        for meta in metas:
            meta.worker.tell({"op": "squares", "step": step, "squares": list(squares.items())})
