"""Parameter servers: gradients are pushed into a key-value store, which takes the optimizer's step, and weights are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from allhands.comm import all_gather_rows, broadcast_tensors, sum_gradients
from allhands.errors import UserError
from allhands.kvstore import KVStore as Store
from allhands.kvstore import create, servers_of_job
from allhands.kvstore.collective import CollectiveStore
from allhands.kvstore.modes import mode_named
from allhands.kvstore.optimizers import OptimizerSpec, hyper, spec_of_torch
from allhands.kvstore.params import Slot, load_into, state_of
from allhands.kvstore.store import Share
from allhands.strategies.alike import check_weights_equal, make_buffers_equal
from allhands.strategies.base import Strategy
from allhands.world import World

_MODES = ("sync", "async", "ssp")


class KVStore(Strategy):
    """The model on every worker, 1/N of each global batch; weights and the optimizer in a key-value store.

    Without servers each worker updates 1/N of the weights. With servers they do, and workers can be let go on without waiting for
    one another: then each push is the mean over one worker's own part of the global batch, and the result is no longer that of
    one process (`exact` is False). At the end of each epoch, and before saving, all workers wait and read the same weights; the
    values of an epoch have `staleness` and `staleness_max`: how many steps others took between a worker's read and its push.

    Args:
        mode: "sync" (all gradients of a step are one step of the optimizer), "async" (each worker's are one), or "ssp" (as
            async, but nobody runs more than `staleness` steps ahead).
        servers: how many to start; None takes those of the job (``allhands launch -s``), or none.
        staleness: for "ssp". With 0, it is "sync".
        update: who runs the optimizer: the "store", or with "sync" each "worker" for itself, on the sum of the gradients.
        check_weights_every: compare the ranks' weights every so many optimizer steps (and at the end of each epoch), with
            "sync"; 0 never compares.
    """

    name = "kvstore"

    def __init__(self, mode: str = "sync", servers: int | None = None, staleness: int | None = None, update: str = "store",
                 check_weights_every: int = 1000) -> None:  # fmt: skip
        if mode not in _MODES:
            raise UserError(f"KVStore(mode={mode!r}); it must be one of {', '.join(map(repr, _MODES))}")
        if servers is not None and (isinstance(servers, bool) or not isinstance(servers, int) or servers < 0):
            raise UserError(f"KVStore(servers={servers!r}); it must be a whole number, or None for those of the job")
        if mode == "ssp" and (isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0):
            raise UserError(f"KVStore(mode='ssp', staleness={staleness!r}); it must be a whole number of steps, 0 or more")
        if mode != "ssp" and staleness is not None:
            raise UserError(f"KVStore(mode={mode!r}, staleness={staleness!r}): only mode='ssp' bounds staleness; leave it out")
        if update not in ("store", "worker"):
            raise UserError(f"KVStore(update={update!r}); it must be 'store' or 'worker'")
        self.mode, self.servers, self.staleness, self.update = mode, servers, staleness, update
        self.exact = mode == "sync" or staleness == 0
        self.alone = not self.exact
        self.takes_step = update == "store"
        if self.alone and servers == 0:
            raise self._needs_servers()
        if self.alone and update == "worker":
            raise UserError(
                f"KVStore(mode={mode!r}, update='worker'): such servers apply gradients when they come; leave update out"
            )
        self.check_weights_every = check_weights_every if self.exact else 0
        #: Called before each step with the exchanged gradients in the parameters; for looking only, and slow.
        self.before_step: Callable[[], None] | None = None

    def _needs_servers(self) -> UserError:
        return UserError(
            f"KVStore(mode={self.mode!r}) needs parameter servers; write KVStore(mode={self.mode!r}, servers=1, …), or start the "
            "job with `allhands launch -s 1 …`"
        )

    def servers_to_start(self) -> int:
        if self.alone and not self.servers:
            raise self._needs_servers()
        return self.servers or 0

    def check(self, world: World) -> None:
        there = servers_of_job()
        if self.servers is not None and self.servers != there:
            raise UserError(
                f"KVStore(servers={self.servers}), but this job was started with {there}; leave servers out, or start it with "
                f"`allhands launch -s {self.servers} …`"
            )
        if self.alone and not there:
            raise self._needs_servers()

    # ------------------------------------------------------------------ the store

    def prepare(self, model: nn.Module, world: World) -> nn.Module:
        self.world, self.bare = world, model
        self._store: Store | None = None
        self._slots: list[Slot] = []
        self._stale: list[float] = []
        self._versions: list[int] = []
        self._steps = 0
        if world.world_size > 1:
            broadcast_tensors(list(model.buffers()), world)
        return model

    def begin(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        named = [(name, p) for name, p in self.bare.named_parameters() if p.requires_grad]
        self._slots = [Slot(name, [p]) for name, p in sorted(named, key=lambda pair: pair[0])]
        idle = [slot.name for slot in self._slots if id(slot.first) not in groups]
        if idle:
            raise UserError(
                f"the optimizer does not hold the parameter '{idle[0]}' ({len(idle)} in all), for which the store would have no "
                "step; freeze it (requires_grad=False), or give the optimizer all of model.parameters()"
            )
        self._optimizer, self._steps = optimizer, step
        spec = self._spec(optimizer) if self.takes_step else None
        store: Store
        if servers_of_job():
            options = {} if self.staleness is None else {"staleness": self.staleness}
            store = create(f"dist_{self.mode}", **options)
        else:
            store = CollectiveStore(mode_named("dist_sync"), self.world)
        if spec is not None:
            store.set_optimizer(spec)
        numbers = {slot.name: groups[id(slot.first)] for slot in self._slots} if spec is not None else None
        store.declare({slot.name: slot.first.detach() for slot in self._slots}, complete=True, groups=numbers)
        state = state_of(optimizer, self._slots, step)
        if spec is not None and (state.tensors or state.numbers):
            store.load_state(state)
        self._store = store
        self._read()

    def _spec(self, optimizer: torch.optim.Optimizer) -> OptimizerSpec:
        hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
        if hooks:
            raise UserError(
                f"the {type(optimizer).__name__} has step hooks, and the store takes its steps without calling them; remove "
                "them, or write KVStore(update='worker')"
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
            self._store.pull([slot.name for slot in self._slots], [slot.first.detach() for slot in self._slots])
        self._remember()

    def _remember(self) -> None:
        self._versions = [slot.first._version for slot in self._slots] if self.takes_step else []

    def _check_unchanged(self) -> None:
        """The store's weights are the ones that are trained; a change of the model's own would be lost without a word."""
        for slot, version in zip(self._slots, self._versions, strict=False):
            if slot.first._version != version:
                raise UserError(
                    f"the weights of '{slot.name}' were changed between two steps, and the store does not know; change them "
                    "before train(), or write KVStore(update='worker')"
                )

    def exchange_all(self, own: int, total: int, clip_norm: float | None) -> bool:
        assert self._store is not None
        self._check_unchanged()
        self._steps += 1
        grads = self._gradients(own)
        share = Share(own, total)
        if not self.takes_step:
            self._store.reduce(grads, share)
            for slot in self._slots:
                slot.first.grad = grads[slot.name]
            return False
        if self.before_step is not None:
            self._show(clip_norm)
        outs = {slot.name: slot.first.detach() for slot in self._slots}
        options = [hyper(group) for group in self._optimizer.param_groups]
        if self.alone and not own:
            # Nothing to push. With ssp the others count this worker's steps, so it pushes gradients that weigh nothing.
            grads, share = grads if self.mode == "ssp" else {}, Share(0, None)
        step = self._store.update(grads, outs, share, options, clip_norm)
        if self.alone and own:
            self._stale.append(step.staleness)
        self._remember()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether step was called
        return True

    def _gradients(self, own: int) -> dict[str, torch.Tensor]:
        """This rank's gradients by name; zeros when it has no sample."""
        found = {}
        for slot in self._slots:
            grad = slot.first.grad
            if grad is None:
                if own:
                    raise UserError(
                        f"on rank {self.world.rank} the parameter '{slot.name}' took no part in the loss, so there is no "
                        "gradient to push. Remove it from the model, or set requires_grad=False before train()"
                    )
                grad = torch.zeros_like(slot.first)
            elif grad.layout != torch.strided:
                raise UserError(f"the gradient of '{slot.name}' is sparse; use nn.Embedding(…, sparse=False), or write 'ddp'")
            found[slot.name] = grad
        return found

    def _show(self, clip_norm: float | None) -> None:
        """Call `before_step` with what all ranks' gradients add up to; the store does the same sum."""
        parameters = [slot.first for slot in self._slots]
        own = [p.grad for p in parameters]
        for p, grad in zip(parameters, own, strict=True):
            p.grad = None if grad is None else grad.clone()
        if self.exact and self.world.world_size > 1:
            sum_gradients(parameters, self.world)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        assert self.before_step is not None
        self.before_step()
        for p, grad in zip(parameters, own, strict=True):
            p.grad = grad

    # ------------------------------------------------------------------ between steps

    def _settle(self) -> None:
        """Where workers do not wait for one another: wait now, and read the same weights."""
        if self.alone and self._store is not None:
            self._store.barrier()
            self._read()
            self._store.barrier()  # nobody goes on before all have read

    def collect(self) -> None:
        if self._store is None:
            return
        if self.alone:
            self._store.barrier()
            self._read()
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
        if self.exact and self.world.world_size > 1:
            check_weights_equal(self.bare, [slot.name for slot in self._slots], where)

    def epoch_values(self) -> dict[str, float]:
        if not self.alone:
            return {}
        own = torch.tensor([[sum(self._stale), len(self._stale), max(self._stale, default=0.0)]], dtype=torch.float64)
        rows = torch.cat(all_gather_rows(own.to(self.world.device), self.world)).cpu()
        self._stale = []
        total, count = rows[:, 0].sum().item(), rows[:, 1].sum().item()
        return {"staleness": total / count if count else 0.0, "staleness_max": rows[:, 2].max().item()}

    def finish(self) -> None:
        if self._store is not None:
            self.collect()
            store, self._store = self._store, None
            store.close()
