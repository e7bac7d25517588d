"""The settings of the strategy `kvstore`, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from allhands.checks import check_choice, check_flag, check_whole
from allhands.comm.codecs import NO_CODEC
from allhands.comm.compress import merged_old
from allhands.errors import UserError
from allhands.kvstore.chunk_compression import both_ways
from allhands.kvstore.credentials import servers_of_job
from allhands.kvstore.rules import rules_of
from allhands.kvstore.store_modes import mode_named
from allhands.world.regroup import began_with

_MODES = ("sync", "async", "ssp")


class KVStoreSettings:
    """What the strategy `KVStore` takes, see there.

    Attributes:
        alone: workers do not wait for one another.
        takes_step: the store takes the optimizer's step.
        compress: what the store is told; None where nothing is lost.
        narrows_weights: weights come back in fewer bits.
        exact: see `Strategy`.
        options: those of `allhands.kvstore.create`.
        chosen_for_elastic: `update` is "worker" because none was given, in an elastic job.
    """

    chosen_for_elastic = False

    def __init__(
        self,
        mode: str = "sync",
        servers: int | None = None,
        staleness: int | None = None,
        update: str | None = None,
        check_weights_every: int = 1000,
        compression: Mapping[str, Any] | None = None,
        damping: bool = False,
        snapshot_every: int = 0,
        snapshot_dir: str | os.PathLike[str] | None = None,
        on_worker_loss: str = "stop",
        find_unused_parameters: bool = False,
        mirror: bool = False,
        compress: str | Mapping[str, Any] | None = None,
    ) -> None:
        check_choice("mode", mode, _MODES, of="KVStore")
        check_whole("servers", servers, 0, of="KVStore", otherwise="None for those of the job")
        if mode == "ssp":
            check_whole("mode='ssp', staleness", staleness, 0, of="KVStore", unit="steps")
        if mode != "ssp" and staleness is not None:
            raise UserError(
                f"KVStore(mode={mode!r}, staleness={staleness!r}): only mode='ssp' bounds "
                "staleness; leave it out"
            )
        if update is None:
            whole = mode == "sync" and compress is None and compression is None
            self.chosen_for_elastic = whole and not servers and _is_elastic()
            update = "worker" if self.chosen_for_elastic else "store"
        check_choice("update", update, ("store", "worker"), of="KVStore")
        self.mode, self.servers, self.staleness, self.update = mode, servers, staleness, update
        self.alone = mode != "sync" and staleness != 0
        self.takes_step = self.parted = update == "store"
        if self.alone and servers == 0:
            raise self.needs_servers()
        if self.alone and update == "worker":
            raise UserError(
                f"KVStore(mode={mode!r}, update='worker'): such servers apply gradients when they "
                "come; leave update out"
            )
        if self.alone and find_unused_parameters:
            raise UserError(
                f"KVStore(mode={mode!r}, find_unused_parameters=True): workers that do not wait "
                "cannot know what the others use; leave it out, or set mode to 'sync'"
            )
        self.find_unused_parameters = find_unused_parameters
        self.check_weights_every = 0 if self.alone else check_weights_every
        self.compress, self.narrows_weights = self._check_compress(
            merged_old(compress, compression, "KVStore", "compression")
        )
        self.exact = not self.alone and self.compress is None
        self.options = self._check_options(
            damping, snapshot_every, snapshot_dir, on_worker_loss, mirror
        )

    def _check_compress(
        self, given: str | Mapping[str, Any] | None
    ) -> tuple[dict[str, Any] | None, bool]:
        """What the store is told, None where nothing is lost; and whether weights come back in
        fewer bits."""
        if given is None:
            return None, False
        push, pull = both_ways(given, "KVStore(compress=")
        narrows = pull != NO_CODEC
        if narrows and (self.alone or not self.takes_step):
            if self.alone:
                why = "without waiting each worker would be left with other weights"
            else:
                why = "with update='worker' sums come back, and what they lose is in no checkpoint"
            raise UserError(
                f"KVStore(mode={self.mode!r}, compress={given!r}): {why}; write "
                f"compress={dict(push, pull='none')}"
            )
        return (None, False) if push == pull == NO_CODEC else ({**push, "pull": pull}, narrows)

    def _check_options(
        self,
        damping: bool,
        snapshot_every: int,
        snapshot_dir: str | os.PathLike[str] | None,
        on_worker_loss: str,
        mirror: bool,
    ) -> dict[str, Any]:
        check_flag("damping", damping, of="KVStore")
        if damping and not self.alone:
            given = f"mode={self.mode!r}" + (
                "" if self.staleness is None else f", staleness={self.staleness}"
            )
            raise UserError(
                f"KVStore({given}, damping=True): synchronous steps are never stale; leave damping "
                "out"
            )
        if on_worker_loss == "continue":
            raise UserError(
                "KVStore(on_worker_loss='continue'): the workers also evaluate and save together, "
                "and cannot without the lost one; set on_worker_loss to 'stop', or train with "
                "allhands.kvstore.Trainer and create(…, on_worker_loss='continue')"
            )
        options: dict[str, Any] = {"on_worker_loss": on_worker_loss}
        if self.staleness is not None:
            options["staleness"] = self.staleness
        if damping:
            options["damping"] = True
        if snapshot_every or snapshot_dir is not None:
            options |= {"snapshot_every": snapshot_every, "snapshot_dir": snapshot_dir}
            if self.servers == 0:
                raise self.needs_restarts("has no servers", options)
        if mirror is not False:
            options["mirror"] = mirror
            if self.servers == 0:
                raise self.needs_restarts("has no servers", options)
        rules_of(mode_named(f"dist_{self.mode}"), options)
        return options

    def needs_restarts(self, why: str, options: Mapping[str, Any]) -> UserError:
        """The error of options that only servers which are started again can keep; `why` there are
        none."""
        if "snapshot_every" not in options:
            return UserError(
                f"KVStore(mirror=True): this training {why}, so that none would come back with "
                "what its mirror keeps; leave "
                "mirror out, or start the job with `allhands launch -s 2 --server-restarts 3 …`"
            )
        return UserError(
            f"KVStore(snapshot_every=…): this training {why}, so that none would come back from a "
            "snapshot; leave snapshot_every and snapshot_dir out, or start the job with `allhands "
            "launch -s 1 --server-restarts 3 …`"
        )

    def needs_servers(self) -> UserError:
        """The error of a mode that there is with servers only."""
        return UserError(
            f"KVStore(mode={self.mode!r}) needs parameter servers; write "
            f"KVStore(mode={self.mode!r}, servers=1, …), or start the "
            "job with `allhands launch -s 1 …`"
        )


def _is_elastic() -> bool:
    """Whether workers may be lost that would hold a part of the store."""
    return began_with() is not None and not servers_of_job()
