"""Parameter servers: gradients are pushed into a key-value store, which takes the optimizer's step,
and weights are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from allhands.checks import check_choice, check_flag, check_whole
from allhands.comm import broadcast_tensors
from allhands.comm.codecs import NO_CODEC
from allhands.comm.compress import merged_old
from allhands.errors import UserError
from allhands.kvstore import servers_of_job
from allhands.kvstore.chunk_compression import both_ways
from allhands.kvstore.rules import rules_of
from allhands.kvstore.store_modes import mode_named
from allhands.step.exchange import Placement
from allhands.strategies.alike import refuse_going_on
from allhands.strategies.base import BIND_OPTIONS, BindOptions, Bound, Strategy
from allhands.strategies.kvstore_exchange import KVStoreExchange, KVStoreState, StoredModel
from allhands.world import World

_MODES = ("sync", "async", "ssp")


class KVStore(Strategy):
    """The model on every worker, 1/N of each global batch; weights and the optimizer in a key-value
    store.

    Without servers each worker updates 1/N of the weights. With servers they do, and workers can be
    let go on without waiting for
    one another: then each push is the mean over one worker's own part of the global batch, and the
    result is no longer that of
    one process (`exact` is False); nor is it with compression. At the end of each epoch, and before
    saving, all workers read the same weights; where they do not wait, the values of an epoch have
    `staleness` and `staleness_max`: how many steps others took between a worker's read and its
    push.

    Args:
        mode: "sync" (all gradients of a step are one step of the optimizer), "async" (each worker's
            are one), or "ssp" (as async, but nobody runs more than `staleness` steps ahead).
        servers: how many to start; None takes those of the job (``allhands launch -s``), or none.
        staleness: for "ssp". With 0, it is "sync".
        update: who runs the optimizer: the "store", or with "sync" each "worker" for itself, on the
            sum of the gradients.
        check_weights_every: compare the ranks' weights every so many optimizer steps (and at the
            end of each epoch), with "sync"; 0 never compares.
        compress: send gradients, and with "sync" the weights that come back, in fewer bits: "fp16",
            "bf16", "int8", "1bit", "2bit", "topk", or ``{"name": "topk", "keep": 0.01, "pull":
            "none"}``, whose "pull" says how weights come back ("none": whole). What is left over is
            part of the checkpoints. None sends all as it is.
        damping: for "async" and "ssp": divide the learning rate of a stale step by 1 + its
            staleness.
        snapshot_every, snapshot_dir: every so many steps the servers save themselves there, from
            which ``allhands launch -s … --server-restarts`` lets them come back.
        mirror: with "sync", each server keeps a copy of the one before it, so that nothing is lost
            when one of them dies and ``allhands launch -s 2 --server-restarts 3`` starts it again.
        find_unused_parameters: with "sync", allow parameters that take no part in some step: on
            ranks that do not use one its gradient is 0, and one that no rank uses is left out of
            the step, as it would be in one process. On CPUs they always may; on GPUs it costs a
            small all-reduce each step.
        on_worker_loss: "stop", which names the lost worker. "continue" is for a store of your own:
            the workers of the runner also evaluate and save together.

    Raises:
        UserError: a setting that there is not, or that has no meaning beside the others.
    """

    name = "kvstore"

    def __init__(
        self,
        mode: str = "sync",
        servers: int | None = None,
        staleness: int | None = None,
        update: str = "store",
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
        check_choice("update", update, ("store", "worker"), of="KVStore")
        self.mode, self.servers, self.staleness, self.update = mode, servers, staleness, update
        self.alone = mode != "sync" and staleness != 0
        self.takes_step = self.parted = update == "store"
        if self.alone and servers == 0:
            raise self._needs_servers()
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
        self.compress, self.narrows_weights = self._checked_compress(
            merged_old(compress, compression, "KVStore", "compression")
        )
        self.exact = not self.alone and self.compress is None
        self.options = self._checked_options(
            damping, snapshot_every, snapshot_dir, on_worker_loss, mirror
        )

    def _checked_compress(
        self, given: str | Mapping[str, Any] | None
    ) -> tuple[dict[str, Any] | None, bool]:
        """What the store is told, None where nothing is lost; and whether weights come back in
        fewer bits."""
        if given is None:
            return None, False
        push, pull = both_ways(given, "KVStore(compress=")
        narrows = pull != NO_CODEC
        if narrows and (self.alone or not self.takes_step):
            why = (
                "without waiting each worker would be left with other weights"
                if self.alone
                else "with update='worker' sums come back, and what they lose is in no checkpoint"
            )
            raise UserError(
                f"KVStore(mode={self.mode!r}, compress={given!r}): {why}; write "
                f"compress={dict(push, pull='none')}"
            )
        return (None, False) if push == pull == NO_CODEC else ({**push, "pull": pull}, narrows)

    def _checked_options(
        self,
        damping: bool,
        snapshot_every: int,
        snapshot_dir: str | os.PathLike[str] | None,
        on_worker_loss: str,
        mirror: bool,
    ) -> dict[str, Any]:
        """Those of `create`."""
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
                raise self._needs_restarts("has no servers", options)
        if mirror is not False:
            options["mirror"] = mirror
            if self.servers == 0:
                raise self._needs_restarts("has no servers", options)
        rules_of(mode_named(f"dist_{self.mode}"), options)
        return options

    def _needs_restarts(self, why: str, options: Mapping[str, Any]) -> UserError:
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

    def _needs_servers(self) -> UserError:
        return UserError(
            f"KVStore(mode={self.mode!r}) needs parameter servers; write "
            f"KVStore(mode={self.mode!r}, servers=1, …), or start the "
            "job with `allhands launch -s 1 …`"
        )

    def check_settings(self, settings: Any) -> None:
        if settings.precision == "fp16" and self.alone:
            raise UserError(
                f"precision='fp16' with KVStore(mode={self.mode!r}): workers that do not wait for "
                "one another would each have a "
                "loss scale of their own; write precision='bf16', or mode='sync'"
            )

    def over_batch_refused(self, workers: int) -> str | None:
        return (
            f"with mode={self.mode!r} workers do not wait for one another; write KVStore()"
            if self.alone
            else None
        )

    def servers_to_start(self) -> int:
        if self.alone and not self.servers:
            raise self._needs_servers()
        if self.options.keys() & {"snapshot_every", "mirror"}:
            raise self._needs_restarts("starts its own servers once, if any", self.options)
        return self.servers or 0

    def check(self, world: World) -> None:
        there = servers_of_job()
        if self.servers is not None and self.servers != there:
            raise UserError(
                f"KVStore(servers={self.servers}), but this job was started with {there}; leave "
                f"servers out, or start it with `allhands launch -s {self.servers} …`"
            )
        if self.alone and not there:
            raise self._needs_servers()
        if self.options.keys() & {"snapshot_every", "mirror"} and not there:
            raise self._needs_restarts("has no servers", self.options)
        if there:
            refuse_going_on(
                "the workers of this training evaluate and save together",
                " and a logdir to start all of them again from the newest checkpoint",
            )

    def compiled(self, workers: int) -> str | None:
        return "model"

    def bind(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: BindOptions = BIND_OPTIONS,
    ) -> Bound:
        if world.world_size > 1:
            broadcast_tensors(list(model.buffers()), world)
        stored = StoredModel(self, model, optimizer, world)
        return Bound(
            Placement(model, world),
            KVStoreExchange(self, stored, options.scaler),
            KVStoreState(stored),
        )
