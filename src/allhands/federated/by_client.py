"""What each client has learnt and measured, by its own name, where there are few enough for a
table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from allhands.federated.clients import Clients

#: The part of the history: by name ``round``, ``samples`` and ``loss`` of the updates that the
#: client brought, and under ``measured`` ``round`` and what its model was measured to be then.
BY_CLIENT = "by_client"
#: Clients that have a row, a bar and a curve each.
MOST_BY_NAME = 50


def tells(clients: Clients) -> bool:
    """Whether the history has something of each client."""
    return clients.names is not None and len(clients) <= MOST_BY_NAME


def begin(history: dict[str, Any], clients: Clients) -> None:
    """Make the part of the history, if there shall be one."""
    if tells(clients):
        history.setdefault(BY_CLIENT, {name: {} for name in clients.names or ()})


def note_updates(
    history: dict[str, Any], clients: Clients, round_: int, last: Mapping[str, Sequence[float]]
) -> None:
    if BY_CLIENT not in history:
        return
    for client, samples, loss in zip(last["client"], last["samples"], last["loss"], strict=True):
        own = history[BY_CLIENT][clients.name(int(client))]
        _add(own, {"round": round_, "samples": samples, "loss": loss})


def note_measured(
    history: dict[str, Any],
    clients: Clients,
    round_: int,
    measured: Iterable[tuple[int, Mapping[str, float]]],
) -> None:
    """Add what clients' own models were measured to be after a round."""
    if BY_CLIENT not in history:
        return
    for client, values in measured:
        own = history[BY_CLIENT][clients.name(client)]
        _add(own.setdefault("measured", {}), {"round": round_, **values})


def _add(lists: dict[str, Any], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        lists.setdefault(name, []).append(value)
