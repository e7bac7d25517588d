"""The states of all servers as one, and back; chunks and servers are forgotten on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from allhands.errors import UserError
from allhands.kvstore.placement import KeyPiece
from allhands.kvstore.shard_state import ANEW
from allhands.kvstore.store_state import StoreState

Pieces = Mapping[str, Sequence[KeyPiece]]


def put_together(
    found: Mapping[str, torch.Tensor],
    step: int,
    pieces: Pieces,
    tables: Pieces,
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
    by_chunk: dict[tuple[str, int, int], dict[str, torch.Tensor]] = {}
    for name, value in found.items():
        server, kind, number, what = name.split("\t")
        by_chunk.setdefault((kind, int(server), int(number)), {})[what] = value
    for key, parts in pieces.items():
        states = [by_chunk.get(("chunk", one.server, one.number), {}) for one in parts]
        for what, first in states[0].items():
            if first.dim():
                whole = torch.cat([values[what] for values in states])
                state.tensors.setdefault(key, {})[what] = whole.view(shapes[key][0])
            else:
                state.numbers.setdefault(key, {})[what] = float(first)
    for key, parts in tables.items():
        states = [by_chunk.get(("table", one.server, one.number), {}) for one in parts]
        order = torch.cat([values["ids"] for values in states]).argsort()
        state.tensors[key] = {
            what: torch.cat([values[what] for values in states])[order].contiguous()
            for what in states[0]
        }
    return state


def taken_apart(
    state: StoreState, pieces: Pieces, tables: Pieces, servers: int
) -> list[dict[str, torch.Tensor]]:
    """Each server's part, for `load_state` there.

    Raises:
        UserError: a key is missing in the state, or there is none of that name, or it has another
            size.
    """
    known = set(pieces) | set(tables)
    for key in (*state.tensors, *state.numbers):
        if key not in known:
            raise UserError(
                f"the state has the key '{key}', which is not in the store: "
                f"{', '.join(sorted(known)[:10])}"
            )
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(servers)]
    for key in sorted(set(tables) - set(state.tensors)):
        raise UserError(
            f"the state has nothing of '{key}', which holds rows here; it is of another store"
        )
    for key, own in pieces.items():
        if not state.tensors.get(key) and not state.numbers.get(key):
            for piece in own:  # no steps were taken, so the optimizer begins anew
                parts[piece.server][f"chunk\t{piece.number}\t{ANEW}"] = torch.empty(0)
        for what, whole in state.tensors.get(key, {}).items():
            if whole.numel() != own[-1].stop:
                raise UserError(
                    f"the state '{what}' of '{key}' has {whole.numel()} numbers; the key has "
                    f"{own[-1].stop}"
                )
            flat = whole.detach().cpu().contiguous().view(-1)
            for piece in own:
                # Numbers have no dimension, so a chunk of one number must keep its one.
                parts[piece.server][f"chunk\t{piece.number}\t{what}"] = flat[
                    piece.start : piece.stop
                ].clone()
        for what, number in state.numbers.get(key, {}).items():
            for piece in own:
                parts[piece.server][f"chunk\t{piece.number}\t{what}"] = torch.tensor(
                    number, dtype=torch.float64
                )
    for key, own in tables.items():
        values = state.tensors[key]
        owners = values["ids"].remainder(servers)
        for piece in own:
            mine = owners == piece.server
            for what, whole in values.items():
                parts[piece.server][f"table\t{piece.number}\t{what}"] = whole[mine].contiguous()
    return parts
