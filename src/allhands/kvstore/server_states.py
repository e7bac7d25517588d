"""The states of all servers as one, and back; chunks and servers are forgotten on the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from allhands.errors import UserError
from allhands.kvstore.chunks import ANEW
from allhands.kvstore.placement import KeyPiece
from allhands.kvstore.store_state import StoreState

Pieces = Mapping[str, Sequence[KeyPiece]]


def put_together(
    found: Mapping[str, torch.Tensor],
    step: int,
    pieces: Pieces,
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> StoreState:
    """What one process would have.

    Args:
        found: by ``server\\tkind\\tnumber\\tname``.
        step: steps taken.
        pieces: of dense keys.
        tables: of keys of rows.
        shapes: of dense keys.
    """
    state = StoreState(step)
    by_part: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for name, value in found.items():
        server, number, what = name.split("\t")
        by_part.setdefault((int(server), int(number)), {})[what] = value
    for key, parts in pieces.items():
        states = [by_part.get((one.server, one.number), {}) for one in parts]
        if key not in shapes:
            order = torch.cat([values["ids"] for values in states]).argsort()
            state.tensors[key] = {
                what: torch.cat([values[what] for values in states])[order].contiguous()
                for what in states[0]
            }
            continue
        for what, first in states[0].items():
            if first.dim():
                whole = torch.cat([values[what] for values in states])
                state.tensors.setdefault(key, {})[what] = whole.view(shapes[key][0])
            else:
                state.numbers.setdefault(key, {})[what] = float(first)
    return state


def take_apart(
    state: StoreState, pieces: Pieces, tables: Collection[str], servers: int
) -> list[dict[str, torch.Tensor]]:
    """Each server's part, for `load_state` there. `tables`: the keys that hold rows."""
    for key in (*state.tensors, *state.numbers):
        if key not in pieces:
            raise UserError(
                f"the state has the key '{key}', which is not in the store: "
                f"{', '.join(sorted(pieces)[:10])}"
            )
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(servers)]
    for key in sorted(set(tables) - set(state.tensors)):
        raise UserError(
            f"the state has nothing of '{key}', which holds rows here; it is of another store"
        )
    for key, own in pieces.items():
        values, numbers = state.tensors.get(key, {}), state.numbers.get(key, {})
        for what, whole in values.items():
            if key not in tables and whole.numel() != own[-1].stop:
                raise UserError(
                    f"the state '{what}' of '{key}' has {whole.numel()} numbers; the key has "
                    f"{own[-1].stop}"
                )
        for piece in own:
            if key in tables:
                mine = values["ids"].remainder(servers) == piece.server
                found = {what: whole[mine].contiguous() for what, whole in values.items()}
            else:
                # Numbers have no dimension, so a chunk of one number must keep its one.
                found = {
                    what: whole.detach().cpu().reshape(-1)[piece.start : piece.stop].clone()
                    for what, whole in values.items()
                }
                found |= {
                    what: torch.tensor(number, dtype=torch.float64)
                    for what, number in numbers.items()
                }
                if not found:  # no steps were taken, so the optimizer begins anew
                    found = {ANEW: torch.empty(0)}
            parts[piece.server] |= {f"{piece.number}\t{what}": one for what, one in found.items()}
    return parts
