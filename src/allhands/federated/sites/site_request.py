"""What a server asks of a site: written, and read and checked."""

from __future__ import annotations

import json
import secrets
import traceback
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from allhands.federated.algorithms.base import Server
from allhands.federated.executors.base import ExecutorContext

RECORD = "allhands"  # the name of the record that says what a message is about
_ABSENT = object()
# Options of a group that schedules change beside the learning rate.
_SCHEDULED = ("momentum", "betas")


def task(
    kind: str,
    run: str,
    work: ExecutorContext,
    server: Server,
    client: int,
    clients: int,
    cohort: int,
    since: int,
) -> ConfigRecord:
    """What is asked of a site beside the model.

    Args:
        kind: "train" or "evaluate".
        run: the run's identity, by which sites keep their state.
        work, server: the training; the server's round is the one that is asked for.
        client: the site's number among all `clients`.
        cohort: sites that are asked in this round.
        since: the last round whose update of this site has entered the model; -1: none.
    """
    groups = work.local.optimizer.options
    options = [{key: group[key] for key in _SCHEDULED if key in group} for group in groups]
    return ConfigRecord(
        {
            "kind": kind,
            "run": run,
            "round": server.round,
            "client": client,
            "clients": clients,
            "seed": work.seed,
            "lr": [float(group.get("lr", 0.0)) for group in groups],
            "options": json.dumps(options),
            "cohort": cohort,
            "since": since,
            # Flower's name of a message is a hash of it, and a reply is taken by that name:
            # nobody but the site that gets the message shall be able to find it out.
            "nonce": secrets.token_hex(16),
        }
    )


class Refusal(Exception):
    """What the server is told instead of an update."""


class SiteRequest:
    """A request, read without believing that anything is there."""

    def __init__(self, request: RecordDict) -> None:
        self.request = request
        found = request.get(RECORD)
        if not isinstance(found, ConfigRecord):
            raise Refusal("the message is none of allhands'")
        self.config = found

    def get(self, name: str, default: Any = _ABSENT) -> Any:
        value = self.config.get(name, default)
        if value is _ABSENT:
            raise Refusal(f"the message has no '{name}'")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise Refusal(f"the message's '{name}' is no text")
        return value

    def number(self, name: str, default: Any = _ABSENT) -> Any:
        value = self.get(name, default)
        if value is not default and (not isinstance(value, int) or isinstance(value, bool)):
            raise Refusal(f"the message's '{name}' is no whole number")
        return value

    def arrays(self, name: str) -> Any:
        """A record of arrays."""
        found = self.request.array_records.get(name)
        if found is None:
            raise Refusal(f"the message has no arrays '{name}'")
        return found


def last_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1][:500]
