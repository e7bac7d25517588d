"""What all workers must agree on about a store with servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from allhands.errors import UserError
from allhands.kvstore.store_modes import Mode


def rules_of(mode: Mode, options: Mapping[str, Any]) -> dict[str, Any]:
    """The checked rules of a store: what all workers must agree on.

    Raises:
        UserError: an option that there is not, or a value that it cannot have.
    """
    chosen = os.environ.get("ALLHANDS_ON_WORKER_FAILURE", "stop")
    rules: dict[str, Any] = {
        "staleness": 0,
        "damping": False,
        "on_worker_loss": "stop" if chosen == "stop" else "continue",
        "snapshot_every": 0,
        "snapshot_dir": "",
        "mirror": False,
    }
    for name, value in options.items():
        if name not in rules:
            raise UserError(
                f"create('{mode.name}') has no option '{name}'; its options are {', '.join(rules)}"
            )
        rules[name] = value
    if "staleness" in options and mode.wait != "ssp":
        raise UserError(
            f"create('{mode.name}', staleness=…): only 'dist_ssp' bounds staleness; leave it out, "
            "or write create('dist_ssp')"
        )
    if rules["damping"] and mode.wait == "sync":
        raise UserError(
            f"create('{mode.name}', damping=True): synchronous steps are never stale; leave it out"
        )
    if (
        isinstance(rules["staleness"], bool)
        or not isinstance(rules["staleness"], int)
        or rules["staleness"] < 0
    ):
        raise UserError(
            f"staleness={rules['staleness']!r}; it must be a whole number of steps, 0 or more"
        )
    if mode.wait == "ssp" and "staleness" not in options:
        raise UserError(
            "create('dist_ssp') needs staleness=…, how many steps the fastest worker may run ahead "
            "of the slowest"
        )
    every = rules["snapshot_every"]
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise UserError(
            f"snapshot_every={every!r}; it must be a whole number of steps, or 0 for none"
        )
    if bool(every) != bool(rules["snapshot_dir"]):
        raise UserError(
            "snapshot_every=… and snapshot_dir=… belong together: how often the servers save "
            "themselves, and where"
        )
    rules["snapshot_dir"] = (
        os.path.abspath(os.fspath(rules["snapshot_dir"])) if rules["snapshot_dir"] else ""
    )
    if rules["on_worker_loss"] not in ("stop", "continue"):
        raise UserError(f"on_worker_loss={rules['on_worker_loss']!r}; write 'stop' or 'continue'")
    wait = (
        "sync" if mode.wait == "ssp" and rules["staleness"] == 0 else mode.wait
    )  # nobody ahead of anyone is sync
    if not isinstance(rules["mirror"], bool):
        raise UserError(f"mirror={rules['mirror']!r}; write True or False")
    if rules["mirror"] and wait != "sync":
        raise UserError(
            f"create('{mode.name}', mirror=True): servers mirror one another in synchronous stores "
            "only; write create('dist', "
            "mirror=True), or save snapshots instead (snapshot_every=…, snapshot_dir=…)"
        )
    return {"wait": wait, **rules}


def check_servers(mode: Mode, rules: Mapping[str, Any], servers: int) -> None:
    """Raise `UserError` where so many servers cannot do what the rules ask for."""
    if rules["mirror"] and servers < 2:
        raise UserError(
            f"create('{mode.name}', mirror=True) needs a second server, which keeps the copy, and "
            f"there is {servers}: write "
            "`allhands launch -s 2 …`, or leave mirror out"
        )
