"""Parameter servers that are not there, for a step that computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from allhands.environ import variables
from allhands.kvstore.placement import DTYPES, KeyPiece, place
from allhands.kvstore.rules import rules_of
from allhands.kvstore.served import ServedStore
from allhands.kvstore.server_link import ServerLink
from allhands.kvstore.store_modes import Mode
from allhands.kvstore.wait_state import PendingReply


class DryLink(ServerLink):
    """A server that answers at once, and gives nothing."""

    workers = servers = 1

    def _connect(self, said: Mapping[str, Any]) -> None:
        self._placed: dict[str, list[KeyPiece]] = {}
        self._loads = [0] * self.servers

    def put(self, *parts: Any, priority: int = 0) -> None:
        for step, done in self.done.items():
            if done is None:
                self.done[step] = {"workers": self.workers, "staleness": 0}
        for _, pending in self.targets.values():
            pending.left -= 1
        self.targets.clear()

    def push(self, chunk: int, number: int, *args: Any, **options: Any) -> None:
        self.put()
        self.versions[chunk] = number

    def begin(self, op: str, *args: Any, **fields: Any) -> PendingReply:
        return PendingReply(0)

    def answer(self, pending: PendingReply, *args: Any, **options: Any) -> Any:
        return None

    def ask(self, op: str, fd: int | None = None, **fields: Any) -> Any:
        if op == "declare":
            return {"placed": self._declared(fields["keys"])}
        if op == "create":
            return {"versions": {str(form[0]): 0 for form in fields["forms"]}}
        return None

    def _declared(self, keys: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[int]]]:
        """Where keys lie, as the first server says."""
        sizes = {
            name: (form["count"], DTYPES[form["dtype"]].itemsize)
            for name, form in keys.items()
            if name not in self._placed
        }
        first = sum(map(len, self._placed.values()))
        for name, pieces in place(sizes, self._loads, first).items():
            self._placed[name] = pieces
            for one in pieces:
                self._loads[one.server] += (one.stop - one.start) * sizes[name][1]
        return {
            name: [[one.number, one.server, one.start, one.stop] for one in self._placed[name]]
            for name in keys
        }

    def close(self) -> None:
        pass

    abandon = close


@contextmanager
def dry_servers(servers: int, rank: int, workers: int) -> Iterator[None]:
    """Within, a job has so many servers, which answer every worker at once."""
    if not servers:
        yield
        return
    link = type("DryLink", (DryLink,), {"workers": workers, "servers": servers})
    kind = type("DryStore", (ServedStore,), {"link_type": link})
    made: list[ServedStore] = []

    def connect(mode: Mode, options: Mapping[str, Any]) -> ServedStore:
        store: ServedStore = kind(
            mode, rank, workers, [{}] * servers, rules_of(mode, options), len(made)
        )
        made.append(store)
        return store

    with variables({"ALLHANDS_NUM_SERVERS": str(servers)}):
        ServedStore.connect = connect  # type: ignore[method-assign]
        try:
            yield
        finally:
            del ServedStore.connect  # of this class; that of its base is there again
            for store in made:
                store.close()
