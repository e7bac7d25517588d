"""What all workers must agree on about a store with servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from allhands.checks import check_choice, check_flag, check_whole
from allhands.errors import UserError
from allhands.kvstore.store_modes import Mode


def rules_of(mode: Mode, options: Mapping[str, Any]) -> dict[str, Any]:
    """The checked rules of a store: what all workers must agree on."""
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
    check_whole("staleness", rules["staleness"], 0, unit="steps")
    if mode.wait == "ssp" and "staleness" not in options:
        raise UserError(
            "create('dist_ssp') needs staleness=…, how many steps the fastest worker may run ahead "
            "of the slowest"
        )
    every = rules["snapshot_every"]
    check_whole("snapshot_every", every, 0, unit="steps")
    if bool(every) != bool(rules["snapshot_dir"]):
        raise UserError(
            "snapshot_every=… and snapshot_dir=… belong together: how often the servers save "
            "themselves, and where"
        )
    rules["snapshot_dir"] = (
        os.path.abspath(os.fspath(rules["snapshot_dir"])) if rules["snapshot_dir"] else ""
    )
    check_choice("on_worker_loss", rules["on_worker_loss"], ("stop", "continue"))
    # Nobody ahead of anyone is sync.
    wait = "sync" if mode.wait == "ssp" and rules["staleness"] == 0 else mode.wait
    check_flag("mirror", rules["mirror"])
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
            f"there is {servers}: write `allhands launch -s 2 …`, or leave mirror out"
        )
