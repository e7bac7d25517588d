"""What clients keep between their rounds (control variates, their own layers), where they are
trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from allhands.errors import UserError
from allhands.world import World


class ClientStates:
    """Vectors of clients, made when a client is first trained, each on the rank that trained it
    last.

    Args:
        lengths: name to length.
        dtype: of every vector.
        device: where they lie.
        world: the ranks among which clients move.
    """

    def __init__(
        self, lengths: Mapping[str, int], dtype: torch.dtype, device: torch.device, world: World
    ) -> None:
        self.lengths = dict(lengths)
        self.dtype, self.device, self.world = dtype, device, world
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        #: client to the rank that holds its vectors; the same on every rank.
        self.owner: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.lengths)

    def get(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        """Copies of the vectors of some clients by name, shape ``[clients, length]``; zeros for one
        that has none yet."""
        made = {
            name: torch.zeros(len(clients), length, dtype=self.dtype, device=self.device)
            for name, length in self.lengths.items()
        }
        for row, client in enumerate(clients):
            for name, vector in self.kept.get(client, {}).items():
                made[name][row].copy_(vector)
        return made

    def put(self, clients: Sequence[int], own: Mapping[str, torch.Tensor]) -> None:
        """Keep what `get` gave, changed."""
        for row, client in enumerate(clients):
            kept = self.kept.setdefault(client, {})
            for name in self.lengths:
                if name in kept:
                    kept[name].copy_(own[name][row])
                else:
                    kept[name] = own[name][row].clone()

    def move(self, wanted: Mapping[int, int]) -> None:
        """Bring vectors to where clients are trained next: `wanted` is client to rank, the same on
        every rank."""
        rank, sends, receives = self.world.rank, [], []
        for client, target in sorted(wanted.items()):
            source = self.owner.get(client)
            if source is not None and source != target and rank in (source, target):
                if rank == source:
                    # A client that was brought here and then failed has none; zeros are what it
                    # would begin with.
                    kept = self.kept.pop(client, None) or {
                        name: rows[0] for name, rows in self.get([client]).items()
                    }
                    sends += [dist.P2POp(dist.isend, kept[name], target) for name in self.lengths]
                else:
                    self.kept[client] = {
                        name: vectors[0] for name, vectors in self.get([client]).items()
                    }
                    receives += [
                        dist.P2POp(dist.irecv, self.kept[client][name], source)
                        for name in self.lengths
                    ]
            self.owner[client] = target
        if sends or receives:
            for request in dist.batch_isend_irecv(sends + receives):
                request.wait()

    def state_dict(self) -> dict[str, Any]:
        """This rank's vectors, stacked: the clients, int64, and by name shape ``[clients,
        length]``; empty without any."""
        if not self.kept:
            return {}
        stacked = {
            f"vector/{name}": torch.stack([kept[name] for kept in self.kept.values()])
            for name in self.lengths
        }
        return {"clients": torch.tensor(list(self.kept), dtype=torch.int64), **stacked}

    def load_state_dict(self, states: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Take this rank's share of the vectors that all ranks of an earlier run kept; clients are
        dealt out by number.

        Raises:
            UserError: they are other vectors than those that clients keep now.
        """
        self.kept, self.owner = {}, {}
        for state in states:
            found = {
                key.removeprefix("vector/"): rows for key, rows in state.items() if key != "clients"
            }
            lengths = {name: rows.shape[1] for name, rows in found.items()}
            if state and lengths != self.lengths:
                raise UserError(
                    f"the clients of the checkpoint keep {_describe(lengths)}, and this run's "
                    f"{_describe(self.lengths)}; "
                    "resume with the algorithm, the options and the model of that run"
                )
            for row, client in enumerate(state["clients"].tolist() if state else ()):
                self.owner[client] = client % self.world.world_size
                if self.owner[client] == self.world.rank:
                    self.kept[client] = {
                        name: rows[row].to(self.device, self.dtype, copy=True)
                        for name, rows in found.items()
                    }


def _describe(lengths: Mapping[str, int]) -> str:
    return (
        ", ".join(f"'{name}' of {length} numbers" for name, length in lengths.items()) or "nothing"
    )
