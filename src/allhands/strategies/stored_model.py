"""A model's weights and its optimizer in a store, as a worker of `kvstore` has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from allhands.compat import step_hooks
from allhands.errors import UserError
from allhands.kvstore import KVStore as Store
from allhands.kvstore.collective import CollectiveStore
from allhands.kvstore.credentials import servers_of_job
from allhands.kvstore.factory import create
from allhands.kvstore.optimizers import OptimizerSpec, spec_of_torch
from allhands.kvstore.params import Slot, load_into, state_of
from allhands.kvstore.store_modes import mode_named
from allhands.step.update import has_own_step
from allhands.strategies.kvstore_settings import KVStoreSettings
from allhands.strategies.model_state import MemberState, ModelState
from allhands.strategies.shards import Shards
from allhands.strategies.stored_parts import bring_parts, parts_of, whole_of
from allhands.world import World


def slots_of_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[Slot], dict[str, int]]:
    """The parameters of a model that an optimizer trains, in the order of their names, and by name
    the number of the optimizer's group of each."""
    groups = {
        id(p): number
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    named = sorted(model.named_parameters(), key=lambda pair: pair[0])
    slots = [Slot(name, [p]) for name, p in named if p.requires_grad and id(p) in groups]
    return slots, {slot.name: groups[id(slot.first)] for slot in slots}


class StoredModel:
    """A model's weights and its optimizer in a store.

    Args:
        settings: how the store works.
        model: on every worker.
        optimizer: over its parameters.
        world: the workers.
        may_lose: some of them may be lost, and what they hold of a store without servers is to be
            on others, too.

    Attributes:
        twice: it is on two workers.
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
        may_lose: bool = False,
    ) -> None:
        self.settings, self.model, self.optimizer, self.world = settings, model, optimizer, world
        self.twice = may_lose and settings.takes_step and not servers_of_job()
        self.store: Store | None = None
        self._left: CollectiveStore | None = None
        self.slots: list[Slot] = []
        self.steps = 0
        self.residuals: dict[str, torch.Tensor] = {}
        self._versions: list[int] = []
        self._whole_at = -1

    def open(self, step: int) -> None:
        """Put the present weights into a new store, and the optimizer where it takes the steps."""
        numbers = self.list_slots()
        self.steps = step
        self._laid_out = self._present()
        spec = self._spec() if self.settings.takes_step else None
        store: Store
        if servers_of_job():
            store = create(f"dist_{self.settings.mode}", **self.settings.options)
        else:
            store = CollectiveStore(mode_named("dist_sync"), self.world, self.twice)
        try:
            self._fill(store, spec, numbers)
        except BaseException:
            if isinstance(store, CollectiveStore):
                store.abandon()
            raise
        self.store, self._left = store, None
        self._read()

    def list_slots(self) -> dict[str, int]:
        """Look which parameters are trained; gives the number of the group of each, by its name."""
        self.slots, numbers = slots_of_optimizer(self.model, self.optimizer)
        #: Trained by nobody, as in one process; their gradients count in the norm that is clipped
        #: alone.
        self.idle = [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad and name not in numbers
        ]
        return numbers

    def _fill(self, store: Store, spec: OptimizerSpec | None, numbers: Mapping[str, int]) -> None:
        """Declare what is trained, and give the store the optimizer and its state."""
        settings = self.settings
        if spec is not None:
            store.set_optimizer(spec)
        if settings.compress is not None:
            store.set_gradient_compression(settings.compress)
        store.declare(
            {slot.name: slot.first.detach() for slot in self.slots},
            complete=True,
            groups=numbers if spec is not None else None,
        )
        state = state_of(self.optimizer, self.slots, self.steps)
        if spec is not None and (state.tensors or state.numbers):
            store.load_state(state)
        if self.residuals:
            store.load_residuals(self.residuals)
            self.residuals = {}

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

    def drop_state(self) -> None:
        """Before a step of the store's: what `collect`, `bring` or a checkpoint has put into the
        optimizer would be the whole state beside this worker's part of it, and is old then."""
        if self.settings.takes_step and self.optimizer.state:
            for slot in self.slots:
                self.optimizer.state.pop(slot.first, None)

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
            self._left = store

    def parts(self) -> Shards:
        """What this worker holds for others, too, as weights and optimizer are in it: those of the
        store that it has left last, or outside of one."""
        if self._left is not None:
            return parts_of(self._left.ordered_buckets(), self._left.num_workers)
        self.list_slots()
        return whole_of(self._named(), state_of(self.optimizer, self.slots, self.steps))

    def bring(self, parts: Shards) -> None:
        """Before `open`: bring weights and the optimizer's state into the model and the optimizer,
        out of what each worker has given as `parts`."""
        self.list_slots()
        state = bring_parts(parts, self._named(), self.world)
        load_into(self.optimizer, self.slots, state)

    def _named(self) -> dict[str, nn.Parameter]:
        return {slot.name: slot.first for slot in self.slots}


class StoredMemberState(MemberState):
    """The same where each part of the store is on two workers."""

    def __init__(self, state: ModelState, stored: StoredModel) -> None:
        super().__init__(state)
        self._stored = stored

    def optimizer_alike(self) -> dict[str, Any]:
        return {**super().optimizer_alike(), "state": {}}

    def detach(self) -> Shards:
        return self._stored.parts()

    def bring(self, shards: Shards, joined: Collection[int]) -> None:
        self._stored.bring(shards)
