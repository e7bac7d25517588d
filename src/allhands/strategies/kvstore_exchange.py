"""The exchange of a worker of `kvstore` with the store, and the state of model and optimizer out of
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from allhands.comm import all_gather_rows, all_reduce_sum, sum_gradients
from allhands.compat import mark_stepped
from allhands.errors import UserError
from allhands.kvstore.collective import CollectiveStore
from allhands.kvstore.optimizers import hyper
from allhands.kvstore.params import Slot
from allhands.kvstore.store import Share
from allhands.step.exchange import Count, Exchange
from allhands.step.precision import Scaler
from allhands.strategies.alike import check_weights_equal
from allhands.strategies.kvstore_settings import KVStoreSettings
from allhands.strategies.model_state import MemberState, ReplicatedState
from allhands.strategies.shards import KEPT_TWICE
from allhands.strategies.stored_model import StoredMemberState, StoredModel


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
                "KVStore(update='worker'); with KVStore(update='store') two would keep each part"
            ]
        if stored.twice:
            self.notes = [KEPT_TWICE]
            self.take_step = self._take_step
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
        self, own: Count, total: float, clip_norm: float | None, missing: bool
    ) -> bool:
        own = float(own)
        stored, store, optimizer = self.stored, self.stored.store, self.stored.optimizer
        assert store is not None
        stored.check_unchanged()
        stored.drop_state()
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
        share = Share(own, own if self.alone else total)
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
        if isinstance(store, CollectiveStore) and stored.twice:
            store.before_step = self._hold
        if not outs and stored.twice:
            self._hold(lambda: None)
        if outs:
            step = store.update(grads, outs, share, options, clip_norm)
            if self.alone and own:
                self._stale.append(step.staleness)
        stored.remember()
        mark_stepped(optimizer)
        return True

    def _hold(self, take: Callable[[], None]) -> None:
        """All that the step needs is on this rank, and `take` takes it."""
        self._take = take
        if self.before_update is not None:
            self.before_update()

    def _take_step(self) -> None:
        self._take()

    def _used(self) -> list[Slot]:
        """The parameters that take part in this step on some rank."""
        slots, world = self.stored.slots, self.stored.world
        used = torch.tensor(
            [slot.first.grad is not None for slot in slots], dtype=torch.int32, device=world.device
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

    @property
    def members(self) -> MemberState:
        return StoredMemberState(self, self._stored) if self._stored.twice else super().members

    def collect(self) -> None:
        self._stored.collect()

    def sync_buffers(self) -> None:
        self._stored.settle()
        super().sync_buffers()
