"""`ServedStore`: the values lie on parameter servers, and the workers talk to those and not to one
another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from allhands.comm.clipping import check_clip_norm, clip_factor, square_of
from allhands.errors import UserError
from allhands.kvstore.bucket import weight_factor
from allhands.kvstore.chunk_compression import ChunkCompressor, check_finite, compressible
from allhands.kvstore.placement import KeyPiece
from allhands.kvstore.served_steps import ServedSteps
from allhands.kvstore.server_link import ServerLink
from allhands.kvstore.store import Key, Share, Step
from allhands.kvstore.table_rounds import pack_rows
from allhands.kvstore.wait_state import PendingReply, ServerLostError
from allhands.kvstore.waits import missing_rounds, report
from allhands.kvstore.wire_frames import LONGEST_ROWS, Kind, pack

_Counted = dict[int, dict[int, int]]  # versions, by server and part


@dataclass
class _Pushed:
    """A push that was not read yet, and is sent again when a server is lost whose mirror has not
    got it."""

    value: torch.Tensor
    priority: int
    share: Share
    counted: _Counted
    sent: dict[int, torch.Tensor] | None


class ServedStore(ServedSteps):
    """A store on servers. `create` makes it in a job that `allhands launch -s` has given
    servers."""

    # ------------------------------------------------------------------ rounds

    def _send(
        self,
        values: Mapping[str, torch.Tensor],
        outs: Mapping[str, torch.Tensor] | None,
        share: Share,
        groups: Any = None,
        clip: float | None = None,
        priority: int | None = None,
        copies: bool = False,
        rows: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> tuple[int, list[ServerLink], PendingReply]:
        """Push all values, and `rows`; with `outs`, ask for the new values, which go there."""
        names = list(values)
        flat = self._staging.values(values)
        if self._codec and self._sent is None:
            self._sent = self._all_encoded(flat)
        encoded = self._sent or {}
        step, meta, involved = self._begin(
            names, share, groups, clip, list(rows), wait=outs is not None
        )
        pending = PendingReply(
            sum(len(self._pieces[name]) for name in names) if outs is not None else 0
        )
        self._tell(
            "send",
            (
                (one.server, (encoded.get(one.number, flat[name][one.start : one.stop])).nbytes)
                for name in names
                for one in self._pieces[name]
            ),
        )
        if outs is not None:
            self._tell_answers(names)
        for order, name in enumerate(names):
            for piece in self._pieces[name]:
                link = self.links[piece.server]
                if outs is not None:
                    link.targets[piece.number] = (outs[name][piece.start : piece.stop], pending)
                link.push(
                    piece.number,
                    link.versions[piece.number] + 1,
                    meta,
                    flat[name][piece.start : piece.stop],
                    outs is not None,
                    -order if priority is None else priority,
                    encoded.get(piece.number),
                    copies,
                    copies and not self._sync,
                )
                if outs is None:
                    link.versions[piece.number] += 1
        for name, value in rows.items():
            self._send_rows(name, value, meta)
        return step, involved, pending

    def _all_encoded(self, flat: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What is sent in fewer bits, by the chunk's number; when a value is NaN or infinite, all
        residuals stay as they are."""
        narrow = {name: values for name, values in flat.items() if compressible(values.dtype)}
        for name, values in narrow.items():
            check_finite(name, values)
        return {
            one.number: self._encode(one, name, values)
            for name, values in narrow.items()
            for one in self._pieces[name]
        }

    def _encode(self, piece: KeyPiece, name: str, flat: torch.Tensor) -> torch.Tensor:
        assert self._codec is not None
        compressor = self._compressors.get(piece.number)
        if compressor is None:
            compressor = self._compressors[piece.number] = ChunkCompressor(
                self._codec, piece.stop - piece.start
            )
        return compressor.compress(flat[piece.start : piece.stop], name)

    def update(
        self,
        grads: Mapping[str, torch.Tensor],
        outs: Mapping[str, torch.Tensor],
        share: Share,
        groups: Sequence[Mapping[str, Any]] | None = None,
        clip_norm: float | None = None,
    ) -> Step:
        self._check_optimizer("update")
        check_clip_norm(clip_norm)
        self._usable()
        before, counted, self._sent = self._version(), self._counted(), None
        while True:
            try:
                return self._update(grads, outs, share, groups, clip_norm)
            except ServerLostError:
                step = self._come_back()
            if step is None:
                self._count_from(counted)
                continue
            self._sent = None
            if step == before and self._codec is None:  # the weights are those of the gradients
                return self.update(grads, outs, share, groups, clip_norm)
            # The gradients belong to weights that are gone; the caller goes on from those of the
            # snapshot.
            for name, out in outs.items():
                self._pull(name, out, 0)
            return Step(self._steps_before + step, self.num_workers)

    def _update(
        self,
        grads: Mapping[str, torch.Tensor],
        outs: Mapping[str, torch.Tensor],
        share: Share,
        groups: Sequence[Mapping[str, Any]] | None,
        clip_norm: float | None,
    ) -> Step:
        dense, rows = self._check_gradients(grads)
        self._check_all(outs, "out")
        self._check_read(grads)
        told = None if groups is None else [dict(group) for group in groups]
        if not grads:
            if self.rules["wait"] == "async":
                for name, out in outs.items():
                    self._pull(name, out, 0)
                return Step(0, 1)
            forms = {name: self.shapes[name] for name in self._complete or outs}
            if not forms:
                raise UserError(
                    "update without keys: the servers cannot know which ones the other workers "
                    "step over; declare all of them "
                    "with declare(…, complete=True), or pass outs for these keys"
                )
            dense = {
                name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in forms.items()
            }
        if clip_norm is not None and not self._sync:
            (bounded, share), clip_norm = _clipped({**dense, **rows}, share, clip_norm), None
            dense, rows = (
                {name: bounded[name] for name in dense},
                {name: bounded[name] for name in rows},
            )
        staged = self._staging.room({name: outs[name] for name in dense if name in outs})
        staged |= {
            name: torch.empty(grad.numel(), dtype=grad.dtype)
            for name, grad in dense.items()
            if name not in outs
        }
        merged = {name: grad.detach().coalesce() for name, grad in rows.items()}
        # The norm is that of all keys, whose rounds are then one step.
        together = merged if clip_norm is not None else {}
        step, involved, pending = self._send(dense, staged, share, told, clip_norm, rows=together)
        if clip_norm is not None:
            self._clip(step, involved, pending, clip_norm)
        if dense or together:
            taken = self._finish(step, involved, pending, together)
        else:
            taken = Step(0, self.num_workers)
        for name, grad in merged.items():
            if name not in together:
                taken = replace(self._push_rows(name, grad, share, told), staleness=taken.staleness)
        self._staging.put(staged, outs)
        for name, out in outs.items():
            if name not in staged:
                self._pull(name, out, 0)
        return taken

    def reduce(self, grads: Mapping[str, torch.Tensor], share: Share) -> Step:
        if self.optimizer is not None:
            raise UserError(
                "reduce: the store has an optimizer, which would take steps with the gradients; "
                "use update"
            )
        self._usable()
        self._check_all(grads, "the gradient")
        self._check_read(grads)
        staged = self._staging.room(grads)
        taken = self._exchange(grads, staged, share)
        self._staging.put(staged, grads)
        return taken

    def _push(self, name: str, value: torch.Tensor, priority: int, share: Share) -> None:
        self._usable()
        self._check_read([name])
        counted, self._sent = self._counted(), None
        self._unread[name] = priority
        self._push_once(name, value, priority, share)
        if self.rules["mirror"]:
            self._kept[name] = _Pushed(value.clone(), priority, share, counted, self._sent)

    def _push_once(self, name: str, value: torch.Tensor, priority: int, share: Share) -> None:
        if name in self.tables:
            self._push_rows(name, value, share, None, wait=False)
        else:
            # The caller may change the value at once.
            self._send({name: value}, None, share, priority=priority, copies=True)

    def _send_unread(self) -> None:
        sent = self._sent
        for name, one in self._kept.items():
            self._count_from(one.counted, name)
            self._sent = one.sent
            self._push_once(name, one.value, one.priority, one.share)
        self._sent = sent

    def _counted(self) -> _Counted:
        """The versions of all parts, as this worker knows them, where pushes may be sent again."""
        if not self.rules["mirror"]:
            return {}
        return {link.number: dict(link.versions) for link in self.links}

    def _count_from(self, counted: _Counted, only: str | None = None) -> None:
        """Go back to what `_counted` gave; of one key, or of all."""
        for name, pieces in self._pieces.items():
            if only in (None, name):
                for one in pieces:
                    self.links[one.server].versions[one.number] = counted[one.server][one.number]

    def _exchange(
        self,
        values: Mapping[str, torch.Tensor],
        staged: Mapping[str, torch.Tensor],
        share: Share,
        priority: int | None = None,
    ) -> Step:
        """Push values, and read the new ones."""
        if any(link.comes_back for link in self.links):
            # Answers may overwrite what must be sent again after a server was lost.
            values = {name: value.clone() for name, value in values.items()}
        counted, self._sent = self._counted(), None
        while True:
            try:
                return self._finish(*self._send(values, staged, share, priority=priority))
            except ServerLostError:
                if self._come_back() is None:
                    self._count_from(counted)
                else:
                    self._sent = None

    def pushpull(
        self,
        key: Key | Sequence[Key],
        value: Any,
        out: Any = None,
        priority: int = 0,
        weight: float | None = None,
    ) -> None:
        self._usable()
        given, targets = self._pairs(key, value), self._pairs(key, value if out is None else out)
        if any(name in self.tables for name, _ in given):
            super().pushpull(key, value, out, priority, weight)
            return
        values = {name: self._check(name, one) for name, one in given}
        outs = {
            name: list(one) if isinstance(one, (list, tuple)) else [one] for name, one in targets
        }
        for name, several in outs.items():
            for tensor in several:
                self._check_like(name, tensor, "out")
        self._check_read(values)
        staged = self._staging.room({name: several[0] for name, several in outs.items()})
        share = Share() if weight is None else Share(weight, 1.0)
        self._exchange(values, staged, share, priority)
        for position in range(max(map(len, outs.values()))):
            self._staging.put(
                staged,
                {
                    name: several[position]
                    for name, several in outs.items()
                    if position < len(several)
                },
            )

    def _pull(self, name: str, out: torch.Tensor, priority: int) -> None:
        self._usable()
        # Never before this worker's own push.
        priority = min(priority, self._unread.pop(name, priority))
        self._again_if_lost(lambda: self._pull_once(name, out, priority))
        self._kept.pop(name, None)

    def _pull_once(self, name: str, out: torch.Tensor, priority: int) -> None:
        staged = self._staging.room({name: out})
        pieces = self._pieces[name]
        pending = PendingReply(len(pieces))
        self._tell_answers([name])
        for piece in pieces:
            link = self.links[piece.server]
            link.targets[piece.number] = (staged[name][piece.start : piece.stop], pending)
            link.put(
                pack(Kind.PULL, chunk=piece.number, round=link.versions[piece.number]),
                priority=priority,
            )
        version = max(self.links[piece.server].versions[piece.number] for piece in pieces)
        self._wait_state.wait(
            lambda: pending.left == 0,
            lambda: self._about(
                f"step {self._steps_before + version} of the key '{name}', which others have not "
                "pushed yet"
            ),
            report=lambda: report(self, missing_rounds(self, 0)),
        )
        self._staging.put(staged, {name: out})

    # ------------------------------------------------------------------ rows

    def _owners(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.remainder(len(self.links))

    def _push_rows(
        self, name: str, value: torch.Tensor, share: Share, groups: Any, wait: bool = True
    ) -> Step:
        step, meta, involved = self._begin([], share, groups, None, [name], wait)
        self._send_rows(name, value, meta)
        if wait:
            return self._finish(step, involved, PendingReply(0), [name])
        return Step(step >> 32, self.num_workers)

    def _send_rows(self, name: str, value: torch.Tensor, meta: int) -> None:
        ids, rows = value._indices()[0].cpu(), value._values().cpu()
        owners, version = self._owners(ids), self._version_of(name) + 1
        for piece in self._pieces[name]:
            mine = owners == piece.server
            body = pack_rows(ids[mine], rows[mine])
            if len(body) > LONGEST_ROWS:
                raise UserError(
                    f"a push of {len(body):,} bytes of rows to one server; at most "
                    f"{LONGEST_ROWS:,}: push fewer ids at once"
                )
            self.links[piece.server].versions[piece.number] = version
            self.links[piece.server].put(
                pack(Kind.PUSH_ROWS, 0, piece.number, meta, version, len(body)) + body
            )

    def _pull_rows(self, name: str, ids: torch.Tensor, out: torch.Tensor) -> None:
        self._usable()
        self._unread.pop(name, None)
        self._again_if_lost(lambda: self._pull_rows_once(name, ids.cpu(), out))
        self._kept.pop(name, None)

    def _pull_rows_once(self, name: str, ids: torch.Tensor, out: torch.Tensor) -> None:
        owners, table, asked = self._owners(ids), self.tables[name], []
        version = self._version_of(name)
        for piece in self._pieces[name]:
            link = self.links[piece.server]
            mine = (owners == link.number).nonzero().view(-1)
            if len(mine):
                body = pack_rows(ids[mine], None)
                if max(len(body), len(mine) * table.columns * table.dtype.itemsize) > LONGEST_ROWS:
                    raise UserError(
                        f"row_sparse_pull of {len(ids):,} rows at once is over {LONGEST_ROWS:,} "
                        "bytes; pull fewer ids at once"
                    )
                request, pending = link.expect()
                link.put(pack(Kind.PULL_ROWS, 0, piece.number, request, version, len(body)) + body)
                asked.append((link, mine, pending))
        with torch.no_grad():
            for link, mine, pending in asked:
                data = link.answer(
                    pending, f"rows of '{name}'", lambda: report(self, [("push", name, version)])
                )
                out[mine.to(out.device)] = (
                    torch.frombuffer(data, dtype=table.dtype)
                    .view(len(mine), table.columns)
                    .to(out.device)
                )

    def _check_read(self, names: Iterable[str]) -> None:
        for name in names:
            if self._sync and name in self._unread:
                raise UserError(
                    f"the key '{name}' was pushed already and not pulled since; pull it before the "
                    "next push"
                )
            if not self._sync and self.optimizer is None:
                raise UserError(
                    f"the key '{name}' cannot be pushed: create('{self.type}') applies each push "
                    "by itself, which needs an optimizer; call set_optimizer first"
                )


def _clipped(
    grads: Mapping[str, torch.Tensor], share: Share, clip_norm: float
) -> tuple[dict[str, torch.Tensor], Share]:
    """This worker's own gradients, weighed and bounded; without waiting for others there is no norm
    of all."""
    factor = weight_factor([share.weight], share.expected) if share.weight else 1.0
    whole = {name: grad.coalesce() if grad.is_sparse else grad for name, grad in grads.items()}
    weighed = {name: grad if factor == 1.0 else grad * factor for name, grad in whole.items()}
    squares = (square_of(grad._values() if grad.is_sparse else grad) for grad in weighed.values())
    scale = clip_factor(math.fsum(squares), clip_norm)
    bounded = {name: grad if scale == 1.0 else grad * scale for name, grad in weighed.items()}
    return bounded, Share(share.weight, None)
