"""What a worker of `kvstore` has of the store: the model in it, the exchange with it, and the state
out of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from allhands.comm import all_gather_rows, all_reduce_sum, sum_gradients
from allhands.compat import mark_stepped, step_hooks
from allhands.errors import UserError
from allhands.kvstore import KVStore as Store
from allhands.kvstore.collective import CollectiveStore
from allhands.kvstore.credentials import servers_of_job
from allhands.kvstore.factory import create
from allhands.kvstore.optimizers import OptimizerSpec, hyper, spec_of_torch
from allhands.kvstore.params import Slot, load_into, state_of
from allhands.kvstore.store import Share
from allhands.kvstore.store_modes import mode_named
from allhands.step.exchange import Exchange
from allhands.step.precision import Scaler
from allhands.step.update import has_own_step
from allhands.strategies.alike import check_weights_equal
from allhands.strategies.kvstore_settings import KVStoreSettings
from allhands.strategies.model_state import ReplicatedState
from allhands.world import World


class StoredModel:
    """A model's weights and its optimizer in a store.

    Args:
        settings: how the store works.
        model: on every worker.
        optimizer: over its parameters.
        world: the workers.

    Attributes:
        store: None before `open` and after `close`.
        slots: the trained parameters.
        steps: optimizer steps that were taken.
        residuals: what compression had left over, for the store that is opened next.
    """

    def __init__(
        self,
        settings: KVStoreSettings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
    ) -> None:
        self.settings, self.model, self.optimizer, self.world = settings, model, optimizer, world
        self.store: Store | None = None
        self.slots: list[Slot] = []
        self.steps = 0
        self.residuals: dict[str, torch.Tensor] = {}
        self._versions: list[int] = []
        self._whole_at = -1

    def open(self, step: int) -> None:
        """Put the present weights into a new store, and the optimizer where it takes the steps."""
        optimizer, settings = self.optimizer, self.settings
        groups = {
            id(p): number
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.slots = [
            Slot(name, [p])
            for name, p in sorted(named, key=lambda pair: pair[0])
            if id(p) in groups
        ]
        #: Trained by nobody, as in one process; their gradients count in the norm that is clipped
        #: alone.
        self.idle = [name for name, p in named if id(p) not in groups]
        self.steps = step
        self._laid_out = self._present()
        spec = self._spec() if settings.takes_step else None
        store: Store
        if servers_of_job():
            store = create(f"dist_{settings.mode}", **settings.options)
        else:
            store = CollectiveStore(mode_named("dist_sync"), self.world)
        if spec is not None:
            store.set_optimizer(spec)
        if settings.compress is not None:
            store.set_gradient_compression(settings.compress)
        numbers = (
            {slot.name: groups[id(slot.first)] for slot in self.slots} if spec is not None else None
        )
        store.declare(
            {slot.name: slot.first.detach() for slot in self.slots}, complete=True, groups=numbers
        )
        state = state_of(optimizer, self.slots, step)
        if spec is not None and (state.tensors or state.numbers):
            store.load_state(state)
        if self.residuals:
            store.load_residuals(self.residuals)
            self.residuals = {}
        self.store = store
        self._read()

    def _present(self) -> list[int]:
        """The parameters that are to be trained, in an order that tells groups apart."""
        trained = {id(p) for p in self.model.parameters() if p.requires_grad}
        return [
            number
            for group in self.optimizer.param_groups
            for number in (0, *map(id, group["params"]))
            if not number or number in trained
        ]

    def _spec(self) -> OptimizerSpec:
        hooks, kind = step_hooks(self.optimizer), type(self.optimizer).__name__
        if hooks or has_own_step(self.optimizer):
            what = "step hooks" if hooks else "a step() that replaces the one of its class"
            raise UserError(
                f"the {kind} has {what}, and the store takes its steps without calling them; "
                "remove them, or write KVStore(update='worker')"
            )
        try:
            return spec_of_torch(self.optimizer)[0]
        except UserError as error:
            if self.settings.alone:
                raise
            raise UserError(f"{error}. Or write KVStore(update='worker')") from None

    def _read(self) -> None:
        """Read the weights of the store."""
        assert self.store is not None
        with torch.no_grad():
            self.store.pull(
                [slot.name for slot in self.slots], [slot.first.detach() for slot in self.slots]
            )
        self.remember()

    def remember(self) -> None:
        """The weights are those of the store."""
        takes_step = self.settings.takes_step
        self._versions = [slot.first._version for slot in self.slots] if takes_step else []

    def check_unchanged(self) -> None:
        """The store's weights are the ones that are trained; a change of the model's own would be
        lost without a word."""
        for slot, version in zip(self.slots, self._versions, strict=False):
            if slot.first._version != version:
                raise UserError(
                    f"the weights of '{slot.name}' were changed between two steps, and the store "
                    "does not know; change them before train(), or write KVStore(update='worker')"
                )

    def follow(self) -> None:
        """Parameters that were frozen, unfrozen, replaced or given to the optimizer since the last
        steps are stored anew."""
        if self.store is None or self._present() == self._laid_out:
            return
        self.collect()
        self.residuals = self.store.residuals()
        self.store.close()
        self.store = None
        self.open(self.steps)

    def settle(self) -> None:
        """Where workers do not wait for one another: wait now, and read the same weights. Where
        those are in fewer bits, read them whole."""
        if self.store is None:
            return
        if self.settings.alone:
            self.store.barrier()
            self._read()
            self.store.barrier()  # nobody goes on before all have read
        elif self.settings.narrows_weights and self._whole_at != self.steps:
            self.store.load_state(self.store.state())  # a store sends the values whole after it
            self._read()
            self._whole_at = self.steps

    def collect(self) -> None:
        """Bring weights and the optimizer's state into the model and the optimizer."""
        if self.store is None:
            return
        if self.settings.alone:
            self.store.barrier()
            self._read()
        else:
            self.settle()
        if self.settings.takes_step:
            state = self.store.state()
            state.step = self.steps
            load_into(self.optimizer, self.slots, state)
        if self.settings.alone:
            self.store.barrier()

    def close(self) -> None:
        """Leave the store; what it has is collected before."""
        if self.store is not None:
            self.collect()
            store, self.store = self.store, None
            store.close()

    def abandon(self) -> None:
        """Leave a store without servers, of which some worker is gone; the weights stay what they
        are."""
        store, self.store = self.store, None
        if isinstance(store, CollectiveStore):
            store.abandon()


class KVStoreExchange(Exchange):
    """Pushes gradients into the store, and pulls the weights that it has made of them.

    Args:
        settings: of the strategy.
        stored: the model in the store.
        scaler: of an fp16 training.
    """

    after_backward = True

    def __init__(
        self, settings: KVStoreSettings, stored: StoredModel, scaler: Scaler | None
    ) -> None:
        self.stored, self.alone = stored, settings.alone
        self._settings, self._scaler = settings, scaler
        if settings.chosen_for_elastic:
            self.notes = [
                "--elastic: each worker keeps the whole state of the optimizer, as with "
                "KVStore(update='worker'); a store would have 1/N of it on each"
            ]
        self._stale: list[float] = []

    @property
    def states_elsewhere(self) -> list[torch.Tensor]:  # type: ignore[override]
        store = self.stored.store
        return store.held_states() if isinstance(store, CollectiveStore) else []

    def begin(self, step: int) -> None:
        self.stored.open(step)

    def go_on(self) -> None:
        self.stored.follow()

    def finish(self, lost: bool = False) -> None:
        if lost:
            self.stored.abandon()
        else:
            self.stored.close()

    # ------------------------------------------------------------------ a step

    def exchange_all(
        self, own: float, total: float, clip_norm: float | None, missing: bool
    ) -> bool:
        stored, store, optimizer = self.stored, self.stored.store, self.stored.optimizer
        assert store is not None
        stored.check_unchanged()
        if clip_norm is not None and stored.idle:
            raise UserError(
                f"the optimizer does not hold the parameter '{stored.idle[0]}' "
                f"({len(stored.idle)} in all), whose gradient counts in the norm that clip_norm "
                "bounds, and the store does not get it; freeze it (requires_grad=False), or give "
                "the optimizer all of model.parameters()"
            )
        may_miss = self._settings.find_unused_parameters or missing
        slots = self._used() if may_miss else stored.slots
        grads = self._gradients(slots, own, may_miss)
        share = Share(own, total)
        if not self._settings.takes_step:
            stored.steps += 1
            if grads:
                store.reduce(grads, share)
            for slot in stored.slots:
                slot.first.grad = grads.get(slot.name)
            return False
        if self._scaler is not None:
            # Scales are powers of two, so that what is pushed is as exact as what the store would
            # divide.
            self._scaler.unscale_(optimizer)
            overflowed = self._scaler.overflowed(optimizer)
            self._scaler.update()
            if overflowed:
                return True
        stored.steps += 1
        if self.before_step is not None:
            self._show(clip_norm)
        outs = {slot.name: slot.first.detach() for slot in slots}
        options = [hyper(group) for group in optimizer.param_groups]
        if self.alone and not own:
            # Nothing to push. With ssp the others count this worker's steps, so it pushes gradients
            # that weigh nothing.
            grads, share = grads if self._settings.mode == "ssp" else {}, Share(0, None)
        if outs:
            step = store.update(grads, outs, share, options, clip_norm)
            if self.alone and own:
                self._stale.append(step.staleness)
        stored.remember()
        mark_stepped(optimizer)
        return True

    def _used(self) -> list[Slot]:
        """The parameters that take part in this step on some rank."""
        slots, world = self.stored.slots, self.stored.world
        used = torch.tensor(
            [slot.first.grad is not None for slot in slots],
            dtype=torch.int32,
            device=world.device,
        )
        all_reduce_sum([used], world)
        return [slot for slot, ranks in zip(slots, used.tolist(), strict=True) if ranks]

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
                        f"on rank {self.stored.world.rank} the parameter '{slot.name}' took no "
                        "part in the loss, so there is no gradient to push. Remove it from the "
                        "model, or set requires_grad=False before train()"
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
        parameters = [slot.first for slot in self.stored.slots]
        own = [p.grad for p in parameters]
        for p, grad in zip(parameters, own, strict=True):
            p.grad = None if grad is None else grad.clone()
        if not self.alone and self.stored.world.world_size > 1:
            sum_gradients(parameters, self.stored.world)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        assert self.before_step is not None
        self.before_step()
        for p, grad in zip(parameters, own, strict=True):
            p.grad = grad

    # ------------------------------------------------------------------ between steps

    def check_equal(self, where: str) -> None:
        stored = self.stored
        if not self.alone and stored.world.world_size > 1:
            check_weights_equal(stored.model, [slot.name for slot in stored.slots], where)

    def epoch_values(self) -> dict[str, float]:
        if not self.alone:
            return {}
        world = self.stored.world
        own = torch.tensor(
            [[sum(self._stale), len(self._stale), max(self._stale, default=0.0)]],
            dtype=torch.float64,
        )
        rows = torch.cat(all_gather_rows(own.to(world.device), world)).cpu()
        self._stale = []
        total, count = rows[:, 0].sum().item(), rows[:, 1].sum().item()
        return {
            "staleness": total / count if count else 0.0,
            "staleness_max": rows[:, 2].max().item(),
        }

    def own_tensors(self) -> dict[str, torch.Tensor]:
        return self.stored.store.residuals() if self.stored.store is not None else {}

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> bool:
        used = self._settings.compress is not None
        self.stored.residuals = tensors if used else {}
        return used


class KVStoreState(ReplicatedState):
    """The state of a model whose weights and optimizer are in a store."""

    def __init__(self, stored: StoredModel) -> None:
        super().__init__(stored.model, stored.optimizer, stored.world)
        self._stored = stored

    def collect(self) -> None:
        self._stored.collect()

    def sync_buffers(self) -> None:
        self._stored.settle()
        super().sync_buffers()
