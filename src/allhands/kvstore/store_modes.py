"""The names by which a store is created, and what each one means."""

from __future__ import annotations

from dataclasses import dataclass

from allhands.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Mode:
    """What a name stands for.

    Attributes:
        name: as it was given to `create`.
        distributed: several workers share the store.
        wait: "sync" (all workers push before anyone goes on), "ssp" (nobody runs more than a number
            of steps ahead) or "async".
        by_host: with servers, the workers of one host are one member: their gradients are added up
            there, and sent once.
    """

    name: str
    distributed: bool
    wait: str
    by_host: bool = False


_ALL = [
    Mode("local", False, "sync"),
    Mode("device", False, "sync"),
    Mode("dist", True, "sync"),
    Mode("dist_sync", True, "sync"),
    Mode("dist_device_sync", True, "sync", by_host=True),
    Mode("dist_sync_device", True, "sync", by_host=True),
    Mode("dist_async", True, "async"),
    Mode("dist_async_device", True, "async"),
    Mode("dist_device_async", True, "async"),
    Mode("dist_ssp", True, "ssp"),
]
MODES = {mode.name: mode for mode in _ALL}
#: Further names of MXNet's, and ours.
_SAME = {
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "local_allreduce_device": "device",
}
# Kinds of MXNet's that are not here.
_INSTEAD = {
    "horovod": "dist",
    "byteps": "dist",
    "p3": "dist",
    "dist_sync_p3": "dist_sync",
    "nccl": "device",
    "teststore": "local",
}


def mode_named(name: str) -> Mode:
    """The mode of that name, in any case of letters."""
    if not isinstance(name, str):
        raise UserError(f"create({name!r}); write the name of a kind of store: {', '.join(MODES)}")
    if name.lower() in _INSTEAD:
        raise UserError(
            f"there is no key-value store '{name}' here; write create('{_INSTEAD[name.lower()]}')"
        )
    mode = MODES.get(_SAME.get(name.lower(), name.lower()))
    if mode is None:
        raise UserError(
            f"there is no key-value store '{name}'{did_you_mean(name, MODES)} Known are: "
            f"{', '.join(MODES)}"
        )
    return mode
