"""`LocalStore`: all keys in this process. `CollectiveStore` cuts the same buckets into one part a
worker."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allhands.comm.clipping import check_clip_norm, clip_factor, square_of
from allhands.comm.codecs import NO_CODEC
from allhands.errors import UserError
from allhands.kvstore.bucket import KeyBucket, weight_factor
from allhands.kvstore.local_keys import LocalKeys, each
from allhands.kvstore.narrow import Narrow
from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.store import Share, Step
from allhands.kvstore.store_state import StoreState


class LocalStore(LocalKeys):
    """One worker's store. "local" keeps the values on the CPU, "device" where the first value of
    each key lies.

    Attributes:
        before_step: called in each `update` with what takes the optimizer's step here, without a
            word to another worker, once all that needs has come.
    """

    before_step: Callable[[Callable[[], None]], None] | None = None

    # ------------------------------------------------------------------ rounds

    def _in_order(self, pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return sorted(pairs, key=lambda pair: pair[0])

    def _push(self, name: str, value: torch.Tensor, priority: int, share: Share) -> None:
        if name in self._unread:
            raise UserError(
                f"the key '{name}' was pushed already and not pulled since; pull it before the "
                "next push"
            )
        self._check_narrow({name: value})
        weights = self._meet("push", [name, share.expected], share)
        factor = weight_factor(weights, share.expected)
        if name in self._rows:
            self._rows[name].step(self._rows[name].combined(value, factor), None)
        else:
            (bucket,) = self._buckets_of([name])
            self._apply(bucket, self._combined(bucket, {name: value}, factor), None)
        self._unread.add(name)

    def _pull(self, name: str, out: torch.Tensor, priority: int) -> None:
        self._unread.discard(name)
        with torch.no_grad():
            out.copy_(self._buckets[name].views[name])

    def _pull_rows(self, name: str, ids: torch.Tensor, out: torch.Tensor) -> None:
        self._unread.discard(name)
        self._meet("row_sparse_pull", [name])
        with torch.no_grad():
            out.copy_(self._rows[name].read(ids))

    def update(
        self,
        grads: Mapping[str, torch.Tensor],
        outs: Mapping[str, torch.Tensor],
        share: Share,
        groups: Sequence[Mapping[str, Any]] | None = None,
        clip_norm: float | None = None,
    ) -> Step:
        self._check_optimizer("update")
        self._check_gradients(grads)
        for name in outs:
            self._known(name)
        check_clip_norm(clip_norm)
        self._check_narrow(grads)
        options = None if groups is None else [dict(group) for group in groups]
        (names, *how), weights = self._meet_in_step(
            [sorted(grads), share.expected, options, clip_norm], share
        )
        self._update(names, grads, weights, *how)
        with torch.no_grad():
            for name, out in outs.items():
                out.copy_(self._buckets[name].views[name])
        return Step(self._steps, self._present)

    def _update(
        self,
        names: Sequence[str],
        grads: Mapping[str, torch.Tensor],
        weights: Sequence[float],
        expected: float | None,
        groups: Sequence[Mapping[str, Any]] | None,
        clip_norm: float | None,
    ) -> None:
        """One step over the keys `names`; a key that is not in `grads` has a gradient of 0 on this
        worker."""
        factor = weight_factor(weights, expected)
        buckets = self._buckets_of(name for name in names if name not in self._rows)
        combined = [self._combined(bucket, grads, factor) for bucket in buckets]
        tables = [self._rows[name] for name in names if name in self._rows]
        rows = [
            self._rows[name].combined(grads.get(name), factor)
            for name in names
            if name in self._rows
        ]
        if clip_norm is not None:
            own = sum(square_of(values) for values in combined) + sum(
                square_of(found[1]) for found in rows
            )
            bound = clip_factor(self._total(own), clip_norm)
            if bound != 1.0:
                for values in (*combined, *(found[1] for found in rows)):
                    values.mul_(bound)
        shared = [
            self._shared(bucket, values) for bucket, values in zip(buckets, combined, strict=True)
        ]

        def take_step() -> None:
            for bucket, values in zip(buckets, shared, strict=True):
                self._take(bucket, values, groups[bucket.group] if groups else None)
            for table, found in zip(tables, rows, strict=True):
                table.step(found, groups[table.group] if groups else None)
            self._steps += 1

        if self.before_step is not None:
            self.before_step(take_step)
        take_step()
        for bucket in buckets:
            self._spread(bucket, bucket.part, True)

    @torch.no_grad()
    def _combined(
        self, bucket: KeyBucket, values: Mapping[str, torch.Tensor], factor: float
    ) -> torch.Tensor:
        """This rank's part of the combined gradient; 1-D, to be changed at will."""
        filled = bucket.filled(values, bucket.room(0))
        if bucket.layout is None:
            part = self._sum(filled, bucket)
        else:
            assert self._narrow is not None
            part = self._narrow.added_up(bucket, filled, self._swap)
        return part.mul_(factor) if factor != 1.0 else part

    def _shared(self, bucket: KeyBucket, values: torch.Tensor) -> list[torch.Tensor]:
        """The combined gradients of the parts that are updated here."""
        if bucket.twin is None:
            return [values]
        following = (self.rank + 1) % self.num_workers
        sent = [values if rank == following else values[:0] for rank in range(self.num_workers)]
        return [values, self._swap(sent)[bucket.twin.number]]

    @torch.no_grad()
    def _take(
        self,
        bucket: KeyBucket,
        gradients: Sequence[torch.Tensor],
        options: Mapping[str, Any] | None,
    ) -> None:
        """Update the parts that are updated here."""
        for one, values in zip(bucket.held, gradients, strict=True):
            if self.optimizer is None:
                one.part.copy_(values)
            else:
                one.step(values, self.optimizer, options)

    @torch.no_grad()
    def _apply(
        self, bucket: KeyBucket, values: torch.Tensor, options: Mapping[str, Any] | None
    ) -> None:
        self._take(bucket, self._shared(bucket, values), options)
        self._spread(bucket, bucket.part, self.optimizer is not None)

    def _spread(self, bucket: KeyBucket, part: torch.Tensor, changes: bool) -> None:
        """Give all workers the new values."""
        if bucket.layout is not None and self._narrow is not None and self._narrow.narrows_values:
            self._narrow.spread(bucket, part, changes, self._swap)
        else:
            self._gather(bucket, part, bucket.whole)

    def _check_narrow(self, values: Mapping[str, torch.Tensor]) -> None:
        if self._narrow is not None:
            self._narrow.check(values)

    @torch.no_grad()
    def reduce(self, grads: Mapping[str, torch.Tensor], share: Share) -> Step:
        for name, grad in grads.items():
            if grad.layout != torch.strided:
                raise UserError(f"the gradient of '{name}' is sparse, and reduce takes dense ones")
        self._check_narrow(grads)
        names = sorted(grads)
        forms = {
            name: [list(grads[name].shape), str(grads[name].dtype).removeprefix("torch.")]
            for name in names
        }
        weights = self._meet("reduce", [forms, share.expected], share)
        self._reduce(grads, weights, share.expected)
        return Step(self._steps, self._present)

    def _reduce(
        self, grads: Mapping[str, torch.Tensor], weights: Sequence[float], expected: float | None
    ) -> None:
        factor = weight_factor(weights, expected)
        self._steps += 1
        if self.num_workers == 1 and self._narrow is None:
            if factor != 1.0:
                for grad in grads.values():
                    grad.mul_(factor)
            return
        for bucket in self._buckets_like(grads):
            self._spread(bucket, self._combined(bucket, grads, factor), False)
            for name in bucket.names:
                grads[name].copy_(bucket.views[name])

    def _buckets_like(self, grads: Mapping[str, torch.Tensor]) -> list[KeyBucket]:
        """Buckets for these gradients; those of the last call when they are alike."""
        forms = {
            name: (grads[name].shape, grads[name].dtype, self._device or grads[name].device)
            for name in sorted(grads)
        }
        if self._reduced[0] != forms:
            alike: dict[tuple[str, str], list[str]] = defaultdict(list)
            for name, (_, dtype, device) in forms.items():
                alike[str(dtype), str(device)].append(name)
            made = [
                self._bucket({name: grads[name] for name in names}, 0, torch.device(device))
                for (_, device), names in sorted(alike.items())
            ]
            self._reduced = forms, made
        return self._reduced[1]

    def barrier(self) -> None:
        self._meet("barrier", None)

    # ------------------------------------------------------------------ optimizer and states

    def _set_optimizer(self, spec: OptimizerSpec) -> None:
        self._meet("set_optimizer", [spec.name, list(spec.groups)])
        for bucket in each(self._buckets.values()):
            for one in bucket.held:
                one.optimizer = None
        self._give_whole()
        for table in self._rows.values():
            table.set_optimizer(spec)

    def _set_compression(self, push: dict[str, Any], pull: dict[str, Any]) -> None:
        self._meet("set_gradient_compression", [push, pull])
        none = push == pull == NO_CODEC
        self._give_whole()
        self._narrow = None if none else Narrow(push, pull, self.rank, self.num_workers)
        self._reduced = {}, []
        for bucket in self.ordered_buckets():
            self._cut(bucket, [bucket.names])

    def _give_whole(self) -> None:
        """Where values come back in fewer bits, bring all workers the true ones."""
        for bucket in self.ordered_buckets():
            if bucket.layout is not None:
                self._gather(bucket, bucket.part, bucket.whole)
        if self._narrow is not None:
            self._narrow.forget_values()

    def residuals(self) -> dict[str, torch.Tensor]:
        return self._narrow.residuals() if self._narrow is not None else {}

    def _compresses(self) -> bool:
        return self._narrow is not None and self._narrow.keeps

    def _load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        assert self._narrow is not None
        self._narrow.load_residuals(residuals)

    def held_states(self) -> list[torch.Tensor]:
        """The tensors of the optimizer's state that this process holds of the buckets, as they
        are."""
        return [
            tensor
            for bucket in each(self._buckets.values())
            for one in bucket.held
            if one.optimizer is not None
            for tensor in one.optimizer.state()[0].values()
        ]

    def ordered_buckets(self) -> list[KeyBucket]:
        """The buckets in an order that is the same on all workers."""
        return each(self._buckets[name] for name in sorted(self._buckets))

    def state(self) -> StoreState:
        self._meet("state", None)
        state = StoreState(self._steps)
        for bucket in self.ordered_buckets():
            tensors, numbers = self._state_of(bucket)
            for key in bucket.names:
                if tensors:
                    state.tensors[key] = {name: tensors[name][key].clone() for name in tensors}
                if numbers:
                    state.numbers[key] = dict(numbers)
        for name in sorted(self._rows):
            state.tensors[name] = self._rows[name].state()
        return state

    @torch.no_grad()
    def load_state(self, state: StoreState) -> None:
        self._check_optimizer("load_state")
        assert self.optimizer is not None
        for name in sorted({*state.tensors, *state.numbers} - {*self._buckets, *self._rows}):
            raise UserError(f"the state is of a key '{name}', which is not in the store")
        for name, found in state.tensors.items():
            for what, tensor in found.items():
                if name in self._buckets and tensor.shape != self.shapes[name][0]:
                    raise UserError(
                        f"the state '{what}' of the key '{name}' has shape {list(tensor.shape)}, "
                        f"the key {list(self.shapes[name][0])}"
                    )
        self._meet("load_state", state.step)
        for bucket in list(self.ordered_buckets()):
            # Keys of one bucket that have not taken the same steps must part.
            alike: dict[str, list[str]] = defaultdict(list)
            for name in bucket.names:
                form = [
                    sorted(state.tensors.get(name, ())),
                    sorted(state.numbers.get(name, {}).items()),
                ]
                alike[json.dumps(form)].append(name)
            for part in self._cut(bucket, list(alike.values())) if len(alike) > 1 else [bucket]:
                first = part.names[0]
                tensors = {
                    what: {name: state.tensors[name][what] for name in part.names}
                    for what in state.tensors.get(first, ())
                }
                part.load(tensors, state.numbers.get(first, {}), self.optimizer)
                self._gather(part, part.part, part.whole)
        for name, table in self._rows.items():
            table.load(state.tensors.get(name, {}))
        self._steps = state.step
