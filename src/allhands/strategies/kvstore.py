"""Parameter servers: gradients are pushed into a key-value store, which takes the optimizer's step,
and weights are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allhands.comm import broadcast_tensors
from allhands.errors import UserError
from allhands.kvstore.credentials import servers_of_job
from allhands.step.exchange import Placement
from allhands.strategies.alike import refuse_going_on
from allhands.strategies.base import BIND_OPTIONS, BindOptions, Bound, Strategy
from allhands.strategies.kvstore_exchange import KVStoreExchange, KVStoreState
from allhands.strategies.kvstore_settings import KVStoreSettings
from allhands.strategies.stored_model import StoredModel
from allhands.world import World


class KVStore(KVStoreSettings, Strategy):
    """The model on every worker, 1/N of each global batch; weights and the optimizer in a key-value
    store.

    Without servers each worker updates 1/N of the weights. With servers they do, and workers can be
    let go on without waiting for one another: then each push is the mean over one worker's own part
    of the global batch, and the result is no longer that of one process (`exact` is False); nor is
    it with compression. At the end of each epoch, and before saving, all workers read the same
    weights; where they do not wait, the values of an epoch have `staleness` and `staleness_max`:
    how many steps others took between a worker's read and its push.

    Args:
        mode: "sync" (all gradients of a step are one step of the optimizer), "async" (each worker's
            are one), or "ssp" (as async, but nobody runs more than `staleness` steps ahead).
        servers: how many to start; None takes those of the job (``allhands launch -s``), or none.
        staleness: for "ssp". With 0, it is "sync".
        update: who runs the optimizer: the "store", or with "sync" each "worker" for itself, on the
            sum of the gradients. None is "store"; in an elastic job without servers it is "worker",
            as the loss of two workers at once may take a part of a store with it, of which each is
            on two there.
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
    whole_model = True

    def check_settings(self, settings: Any) -> None:
        if settings.precision == "fp16" and self.alone:
            raise UserError(
                f"precision='fp16' with KVStore(mode={self.mode!r}): workers that do not wait for "
                "one another would each have a "
                "loss scale of their own; write precision='bf16', or mode='sync'"
            )

    def over_batch_refused(self, workers: int) -> str | None:
        if self.alone:
            return f"with mode={self.mode!r} workers do not wait for one another; write KVStore()"
        return None

    def servers_to_start(self) -> int:
        if self.alone and not self.servers:
            raise self.needs_servers()
        if self.options.keys() & {"snapshot_every", "mirror"}:
            raise self.needs_restarts("starts its own servers once, if any", self.options)
        return self.servers or 0

    def check(self, world: World) -> None:
        there = servers_of_job()
        if self.servers is not None and self.servers != there:
            raise UserError(
                f"KVStore(servers={self.servers}), but this job was started with {there}; leave "
                f"servers out, or start it with `allhands launch -s {self.servers} …`"
            )
        if self.alone and not there:
            raise self.needs_servers()
        if self.options.keys() & {"snapshot_every", "mirror"} and not there:
            raise self.needs_restarts("has no servers", self.options)
        if there:
            refuse_going_on(
                "the workers of this training evaluate and save together",
                " and a logdir to start all of them again from the newest checkpoint",
            )

    def regroup_refused(self) -> str | None:
        if servers_of_job():
            return "strategy 'kvstore' with servers does not change its workers; leave -s out"
        if self.compress is not None:
            return (
                f"KVStore(compress={self.compress!r}) has on each worker what was left over of its "
                "gradients, which is lost with it; leave compress out"
            )
        return None

    def bind(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: BindOptions = BIND_OPTIONS,
    ) -> Bound:
        if world.world_size > 1 and not options.weights_follow:
            broadcast_tensors(list(model.buffers()), world)
        stored = StoredModel(self, model, optimizer, world, options.may_lose)
        return Bound(
            Placement(model, world),
            KVStoreExchange(self, stored, options.scaler),
            KVStoreState(stored),
        )
