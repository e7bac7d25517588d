"""Parameter servers: gradients are pushed into a key-value store, which takes the optimizer's step,
and weights are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from allhands.checks import check_choice, check_flag, check_whole
from allhands.comm import all_gather_rows, all_reduce_sum, broadcast_tensors, sum_gradients
from allhands.comm.codecs import NO_CODEC
from allhands.comm.compress import merged_old
from allhands.compat import mark_stepped, step_hooks
from allhands.errors import UserError
from allhands.kvstore import KVStore as Store
from allhands.kvstore import create, servers_of_job
from allhands.kvstore.chunk_compression import both_ways
from allhands.kvstore.collective import CollectiveStore
from allhands.kvstore.optimizers import OptimizerSpec, hyper, spec_of_torch
from allhands.kvstore.params import Slot, load_into, state_of
from allhands.kvstore.rules import rules_of
from allhands.kvstore.store import Share
from allhands.kvstore.store_modes import mode_named
from allhands.step.update import has_own_step
from allhands.strategies.alike import check_weights_equal, make_buffers_equal, refuse_going_on
from allhands.strategies.base import Strategy
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
        self.compress, self._narrows_weights = self._checked_compress(
            merged_old(compress, compression, "KVStore", "compression")
        )
        self.exact = not self.alone and self.compress is None
        self.options = self._checked_options(
            damping, snapshot_every, snapshot_dir, on_worker_loss, mirror
        )
        #: Called before each step with the exchanged gradients in the parameters; for looking only,
        #: and slow.
        self.before_step: Callable[[], None] | None = None

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

    # ------------------------------------------------------------------ the store

    def compiled(self, workers: int) -> str | None:
        return "model"

    def prepare(self, model: nn.Module, world: World) -> nn.Module:
        self.world, self.bare = world, model
        self._store: Store | None = None
        self._slots: list[Slot] = []
        self._stale: list[float] = []
        self._versions: list[int] = []
        self._steps = 0
        self._whole_at = -1
        self._residuals: dict[str, torch.Tensor] = {}
        if world.world_size > 1:
            broadcast_tensors(list(model.buffers()), world)
        return model

    def begin(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        groups = {
            id(p): number
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        named = [(name, p) for name, p in self.bare.named_parameters() if p.requires_grad]
        self._slots = [
            Slot(name, [p])
            for name, p in sorted(named, key=lambda pair: pair[0])
            if id(p) in groups
        ]
        #: Trained by nobody, as in one process; their gradients count in the norm that is clipped
        #: alone.
        self._idle = [name for name, p in named if id(p) not in groups]
        self._optimizer, self._steps = optimizer, step
        self._laid_out = self._present()
        spec = self._spec(optimizer) if self.takes_step else None
        store: Store
        if servers_of_job():
            store = create(f"dist_{self.mode}", **self.options)
        else:
            store = CollectiveStore(mode_named("dist_sync"), self.world)
        if spec is not None:
            store.set_optimizer(spec)
        if self.compress is not None:
            store.set_gradient_compression(self.compress)
        numbers = (
            {slot.name: groups[id(slot.first)] for slot in self._slots}
            if spec is not None
            else None
        )
        store.declare(
            {slot.name: slot.first.detach() for slot in self._slots}, complete=True, groups=numbers
        )
        state = state_of(optimizer, self._slots, step)
        if spec is not None and (state.tensors or state.numbers):
            store.load_state(state)
        if self._residuals:
            store.load_residuals(self._residuals)
            self._residuals = {}
        self._store = store
        self._read()

    def _present(self) -> list[int]:
        """The parameters that are to be trained, in an order that tells groups apart."""
        trained = {id(p) for p in self.bare.parameters() if p.requires_grad}
        return [
            number
            for group in self._optimizer.param_groups
            for number in (0, *map(id, group["params"]))
            if not number or number in trained
        ]

    def go_on(self) -> None:
        """Parameters that were frozen, unfrozen, replaced or given to the optimizer since the last
        steps are stored anew."""
        if self._store is None or self._present() == self._laid_out:
            return
        self.collect()
        store, self._store = self._store, None
        self._residuals = store.residuals()
        store.close()
        self.begin(self._optimizer, self._steps)

    def _spec(self, optimizer: torch.optim.Optimizer) -> OptimizerSpec:
        hooks = step_hooks(optimizer)
        if hooks or has_own_step(optimizer):
            what = "step hooks" if hooks else "a step() that replaces the one of its class"
            raise UserError(
                f"the {type(optimizer).__name__} has {what}, and the store takes its steps without "
                "calling them; remove them, or write KVStore(update='worker')"
            )
        try:
            return spec_of_torch(optimizer)[0]
        except UserError as error:
            if self.alone:
                raise
            raise UserError(f"{error}. Or write KVStore(update='worker')") from None

    def _read(self) -> None:
        """Read the weights of the store."""
        assert self._store is not None
        with torch.no_grad():
            self._store.pull(
                [slot.name for slot in self._slots], [slot.first.detach() for slot in self._slots]
            )
        self._remember()

    def _remember(self) -> None:
        self._versions = [slot.first._version for slot in self._slots] if self.takes_step else []

    def _check_unchanged(self) -> None:
        """The store's weights are the ones that are trained; a change of the model's own would be
        lost without a word."""
        for slot, version in zip(self._slots, self._versions, strict=False):
            if slot.first._version != version:
                raise UserError(
                    f"the weights of '{slot.name}' were changed between two steps, and the store "
                    "does not know; change them before train(), or write KVStore(update='worker')"
                )

    def exchange_all(
        self, own: float, total: float, clip_norm: float | None, missing: bool
    ) -> bool:
        assert self._store is not None
        self._check_unchanged()
        if clip_norm is not None and self._idle:
            raise UserError(
                f"the optimizer does not hold the parameter '{self._idle[0]}' ({len(self._idle)} "
                "in all), whose gradient counts in the norm that clip_norm bounds, and the store "
                "does not get it; freeze it (requires_grad=False), or give the optimizer all of "
                "model.parameters()"
            )
        may_miss = self.find_unused_parameters or missing
        slots = self._used() if may_miss else self._slots
        grads = self._gradients(slots, own, may_miss)
        share = Share(own, total)
        if not self.takes_step:
            self._steps += 1
            if grads:
                self._store.reduce(grads, share)
            for slot in self._slots:
                slot.first.grad = grads.get(slot.name)
            return False
        if self.scaler is not None:
            # Scales are powers of two, so that what is pushed is as exact as what the store would
            # divide.
            self.scaler.unscale_(self._optimizer)
            overflowed = self.scaler.overflowed(self._optimizer)
            self.scaler.update()
            if overflowed:
                return True
        self._steps += 1
        if self.before_step is not None:
            self._show(clip_norm)
        outs = {slot.name: slot.first.detach() for slot in slots}
        options = [hyper(group) for group in self._optimizer.param_groups]
        if self.alone and not own:
            # Nothing to push. With ssp the others count this worker's steps, so it pushes gradients
            # that weigh nothing.
            grads, share = grads if self.mode == "ssp" else {}, Share(0, None)
        if outs:
            step = self._store.update(grads, outs, share, options, clip_norm)
            if self.alone and own:
                self._stale.append(step.staleness)
        self._remember()
        mark_stepped(self._optimizer)
        return True

    def _used(self) -> list[Slot]:
        """The parameters that take part in this step on some rank."""
        used = torch.tensor(
            [slot.first.grad is not None for slot in self._slots],
            dtype=torch.int32,
            device=self.world.device,
        )
        all_reduce_sum([used], self.world)
        return [slot for slot, ranks in zip(self._slots, used.tolist(), strict=True) if ranks]

    def _gradients(
        self, slots: Sequence[Slot], own: float, may_miss: bool
    ) -> dict[str, torch.Tensor]:
        """This rank's gradients by name; zeros for those that it has not used."""
        found = {}
        for slot in slots:
            grad = slot.first.grad
            if grad is None:
                if own and not may_miss:
                    raise UserError(
                        f"on rank {self.world.rank} the parameter '{slot.name}' took no part in "
                        "the loss, so there is no gradient to push. Remove it from the model, or "
                        "set requires_grad=False before train()"
                        + ("" if self.alone else ", or write KVStore(find_unused_parameters=True)")
                    )
                grad = torch.zeros_like(slot.first)
            elif grad.layout != torch.strided:
                raise UserError(
                    f"the gradient of '{slot.name}' is sparse; use nn.Embedding(…, sparse=False), "
                    "or write 'ddp'"
                )
            found[slot.name] = grad
        return found

    def _show(self, clip_norm: float | None) -> None:
        """Call `before_step` with what all ranks' gradients add up to; the store does the same
        sum."""
        parameters = [slot.first for slot in self._slots]
        own = [p.grad for p in parameters]
        for p, grad in zip(parameters, own, strict=True):
            p.grad = None if grad is None else grad.clone()
        if not self.alone and self.world.world_size > 1:
            sum_gradients(parameters, self.world)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        assert self.before_step is not None
        self.before_step()
        for p, grad in zip(parameters, own, strict=True):
            p.grad = grad

    # ------------------------------------------------------------------ between steps

    def _settle(self) -> None:
        """Where workers do not wait for one another: wait now, and read the same weights. Where
        those are in fewer bits, read them whole."""
        if self._store is None:
            return
        if self.alone:
            self._store.barrier()
            self._read()
            self._store.barrier()  # nobody goes on before all have read
        elif self._narrows_weights and self._whole_at != self._steps:
            self._store.load_state(self._store.state())  # a store sends the values whole after it
            self._read()
            self._whole_at = self._steps

    def collect(self) -> None:
        if self._store is None:
            return
        if self.alone:
            self._store.barrier()
            self._read()
        else:
            self._settle()
        if self.takes_step:
            state = self._store.state()
            state.step = self._steps
            load_into(self._optimizer, self._slots, state)
        if self.alone:
            self._store.barrier()

    def sync_buffers(self) -> None:
        self._settle()
        if self.world.world_size > 1:
            make_buffers_equal(self.bare, self.world)

    def check_equal(self, where: str) -> None:
        if not self.alone and self.world.world_size > 1:
            check_weights_equal(self.bare, [slot.name for slot in self._slots], where)

    def own_tensors(self) -> dict[str, torch.Tensor]:
        return self._store.residuals() if self._store is not None else {}

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> bool:
        self._residuals = tensors if self.compress is not None else {}
        return self.compress is not None

    def epoch_values(self) -> dict[str, float]:
        if not self.alone:
            return {}
        own = torch.tensor(
            [[sum(self._stale), len(self._stale), max(self._stale, default=0.0)]],
            dtype=torch.float64,
        )
        rows = torch.cat(all_gather_rows(own.to(self.world.device), self.world)).cpu()
        self._stale = []
        total, count = rows[:, 0].sum().item(), rows[:, 1].sum().item()
        return {
            "staleness": total / count if count else 0.0,
            "staleness_max": rows[:, 2].max().item(),
        }

    def finish(self) -> None:
        if self._store is not None:
            self.collect()
            store, self._store = self._store, None
            store.close()
