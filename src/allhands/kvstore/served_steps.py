"""A step over keys on servers: announced to those that have a part of it, bounded by the norm of
all, and waited for."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from allhands.comm.clipping import clip_factor
from allhands.kvstore.connected import Connected
from allhands.kvstore.server_link import FIRST, ServerLink
from allhands.kvstore.store import Share, Step
from allhands.kvstore.wait_state import PendingReply
from allhands.kvstore.waits import Need, missing_rounds, report
from allhands.kvstore.wire_frames import message


class ServedSteps(Connected):
    """The steps of a `ServedStore`."""

    def _begin(
        self,
        names: Sequence[str],
        share: Share,
        groups: Any,
        clip: float | None,
        rows: Sequence[str] = (),
        wait: bool = True,
    ) -> tuple[int, int, list[ServerLink]]:
        """Announce a step to the servers that have a part of it; its number, that of its
        announcement, and those servers."""
        counts = Counter(one.server for name in (*names, *rows) for one in self._pieces[name])
        version = max((self._version_of(name) for name in (*names, *rows)), default=0)
        # The same on all workers, also on one that came later; calls over other keys have other
        # numbers.
        step = (version + 1 << 32) + zlib.crc32("\n".join(sorted([*names, *rows])).encode())
        meta = next(self._metas) & 0xFFFFFFFF
        involved = [link for link in self.links if counts[link.number]]
        for link in involved:
            if wait:
                link.done[step] = None
            link.put(
                message(
                    {
                        "op": "step",
                        "meta": meta,
                        "step": step,
                        "weight": share.weight,
                        "expected": share.expected,
                        "groups": groups,
                        "clip": clip,
                        "chunks": counts[link.number],
                        "idle": share.weight == 0 and groups is None,
                    }
                ),
                priority=FIRST,
            )
        return step, meta, involved

    def _clip(
        self, step: int, involved: Sequence[ServerLink], pending: PendingReply, clip_norm: float
    ) -> None:
        """Find the norm of all servers' parts, and tell them by what to multiply."""

        def known() -> bool:
            return all(step in link.squares or link.done.get(step) is not None for link in involved)

        self._wait_state.wait(
            known,
            lambda: self._about(self._missing(step, involved, "the norm of the gradients")),
            report=lambda: report(self, missing_rounds(self, 1)),
        )
        with self._wait_state.changed:
            squares = [link.squares.pop(step, None) for link in involved]
        if any(found is None for found in squares):
            return  # the others closed the step before this worker came into it
        # fsum rounds once, so that the order, and with it the number of servers, changes nothing.
        total = math.fsum(square for found in squares if found for square in found.values())
        for link in involved:
            link.first(
                message({"op": "commit", "step": step, "scale": clip_factor(total, clip_norm)})
            )

    def _finish(
        self,
        step: int,
        involved: Sequence[ServerLink],
        pending: PendingReply,
        rows: Iterable[str] = (),
    ) -> Step:
        """Wait until all values have come, and the rounds of these tables are over."""

        def done() -> bool:
            return pending.left == 0 and all(link.done.get(step) is not None for link in involved)

        tables: list[Need] = [("push", name, self._version_of(name)) for name in rows]
        self._wait_state.wait(
            done,
            lambda: self._about(self._missing(step, involved, "the other workers' gradients")),
            report=lambda: report(self, [*missing_rounds(self, 1), *tables]),
        )
        with self._wait_state.changed:
            told = [link.done.pop(step) or {} for link in involved]
            for link in involved:
                link.squares.pop(step, None)
        workers = min((one["workers"] for one in told), default=self.num_workers)
        staleness = max((int(one["staleness"]) for one in told), default=0)
        return Step(self._steps_before + (step >> 32), workers, staleness)

    def _missing(self, step: int, involved: Sequence[ServerLink], what: str) -> str:
        """`what` of which keys, on which servers, in which step."""
        away = {link.number: set(link.targets) for link in involved if link.targets}
        keys = [
            name
            for name, own in self._pieces.items()
            if any(one.number in away.get(one.server, ()) for one in own)
        ]
        named = ", ".join(f"'{name}'" for name in keys[:3]) + (
            f" and {len(keys) - 3} other keys" if len(keys) > 3 else ""
        )
        where = f", for {named} of server {', '.join(map(str, sorted(away)))}" if keys else ""
        return f"{what} in step {self._steps_before + (step >> 32)}{where}"

    def _about(self, what: str) -> str:
        return f"worker {self.rank} waits for {what}"
