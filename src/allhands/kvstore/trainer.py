"""`Trainer`: takes the gradients of a backward pass, and updates the parameters through a store."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from allhands.checks import check_choice, is_number
from allhands.comm.clipping import check_clip_norm, clip_factor, square_of
from allhands.compat import mark_stepped
from allhands.errors import UserError, kind_of
from allhands.kvstore.factory import create
from allhands.kvstore.optimizers import hyper
from allhands.kvstore.params import (
    build_optimizer,
    learning_rate,
    load_into,
    read_spec,
    scheduler_of,
    slots_of,
    state_of,
    written_spec,
)
from allhands.kvstore.store import KVStore, Share, Step
from allhands.kvstore.store_state import read_states, write_states
from allhands.kvstore.values import sum_on_one_device

# Under this key the workers add up their samples, where their gradients were added up by
# `allreduce_grads`.
_SAMPLES = "allhands/samples"


class Trainer:
    """Updates parameters with an optimizer, on one device or many, with one worker or many.

        trainer = Trainer(net, "adam", {"learning_rate": 0.001}, kvstore=create("dist"))
        for X, Y in batches:
            loss(net(X), Y).backward()  # loss = nn.CrossEntropyLoss(reduction="sum")
            trainer.step(len(X))  # the mean over the samples of all workers

    `step` ends by setting the gradients to None, so that the loop needs no zero_grad; several
    backward passes before a step add up. The weights of worker 0 are taken when the Trainer is
    made, on all workers: load a checkpoint before that.

    Args:
        params: a net, what `replicate` gave or its `collect_params()`, parameters by name (in a
            dict or as pairs), or a list of parameters. Their names are the keys of the store.
            Frozen ones (requires_grad=False) are left out.
        optimizer: a name ("sgd", "adam", …), a class of torch.optim, what `optimizer.create` gave;
            or a torch optimizer of the parameters, or a function that makes one of a list of them.
            A store can run those that `optimizer.known_optimizers` lists; others run in each
            worker.
        optimizer_params: its options under torch's names or MXNet's. ``lr_scheduler`` is a function
            of the number of the step, 1 for the first, which gives the learning rate. Schedulers of
            torch are made on `Trainer.optimizer` and act as usual.
        kvstore: a store, the name of one, or None, which is "device" with the optimizer in this
            worker.
        compression_params: for `KVStore.set_gradient_compression`.
        update_on_kvstore: who runs the optimizer: the store (True) or this worker (False). None: a
            distributed store, if it can.
        reduction: what the loss is over the samples of this worker's batch: their "sum", or their
            "mean" (torch's default; with several replicas only "sum" is right).
        aggregate: "mean", over the samples of all workers; or MXNet's "sum" over the workers of
            each one's gradient / batch_size.
        clip_norm: bound of the L2 norm of the combined gradients of all parameters.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: KVStore | str | None = "device",
        compression_params: str | Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        reduction: str = "sum",
        aggregate: str = "mean",
        clip_norm: float | None = None,
    ) -> None:
        check_choice("reduction", reduction, ("sum", "mean"))
        check_choice("aggregate", aggregate, ("mean", "sum"))
        check_clip_norm(clip_norm)
        self._slots = slots_of(params)
        if reduction == "mean" and any(len(slot.replicas) > 1 for slot in self._slots):
            raise UserError(
                "reduction='mean' with several replicas, whose slices may differ in size; use a "
                "loss that is a sum over the "
                "samples, such as nn.CrossEntropyLoss(reduction='sum'), and reduction='sum'"
            )
        self._reduction, self._aggregate, self._clip_norm = reduction, aggregate, clip_norm
        options = dict(optimizer_params or {})
        self._scheduler = scheduler_of(options)
        self._optimizer, self._spec, reason = build_optimizer(
            optimizer, options, [slot.first for slot in self._slots]
        )
        self._store = self._choose_store(kvstore)
        self._on_store = self._where(kvstore, update_on_kvstore, reason)
        self._num_update = 0
        self._reduced = False
        self._versions: list[list[int]] = []
        self.last_step: Step | None = None
        if compression_params:
            if kvstore is None:
                raise UserError(
                    "compression_params without a kvstore: nothing is sent; leave them out, or "
                    "pass kvstore=create('dist')"
                )
            self._store.set_gradient_compression(compression_params)
        self._start()

    def _choose_store(self, kvstore: KVStore | str | None) -> KVStore:
        if isinstance(kvstore, KVStore):
            if kvstore.optimizer is not None:
                raise UserError(
                    "the store has an optimizer already, of another Trainer or of set_optimizer; "
                    "make a store for each"
                )
            return kvstore
        if kvstore is not None and not isinstance(kvstore, str):
            raise UserError(
                f"kvstore is {kind_of(kvstore)}; write a store, the name of one, or None"
            )
        return create(kvstore or "device")

    def _where(self, kvstore: Any, asked: bool | None, reason: UserError | None) -> bool:
        """Whether the store runs the optimizer."""
        mode = self._store.mode
        if asked is None:
            asked = mode.distributed and (reason is None or mode.wait != "sync")
        if asked and kvstore is None:
            raise UserError(
                "update_on_kvstore=True without a kvstore; pass kvstore='device', or leave "
                "update_on_kvstore out"
            )
        if asked and reason is not None:
            raise reason
        if not asked and mode.wait != "sync":
            raise UserError(
                f"update_on_kvstore=False with '{mode.name}', whose servers apply gradients when "
                "they come; leave it out"
            )
        if (
            not asked
            and self._spec is not None
            and any(group.get("multi_precision") for group in self._spec.groups)
        ):
            raise UserError(
                "multi_precision=True needs update_on_kvstore=True; write that, or train float32 "
                "weights under autocast"
            )
        if asked and any(
            float(state.get("step", 1)) > 0 for state in self._optimizer.state.values() if state
        ):
            raise UserError(
                "the optimizer has taken steps already, and the store would begin anew; give a new "
                "one, then load_states"
            )
        return asked

    def _start(self) -> None:
        """Make the keys, and read the weights of worker 0."""
        store, slots = self._store, self._slots
        if self._on_store:
            assert self._spec is not None
            store.set_optimizer(self._spec)
        if self._on_store or store.mode.distributed:
            numbers = {
                id(one): number
                for number, group in enumerate(self._optimizer.param_groups)
                for one in group["params"]
            }
            values = {slot.name: slot.first.detach() for slot in slots}
            if not self._on_store:
                values[_SAMPLES] = torch.zeros(1, dtype=torch.float64)
            store.declare(
                values, complete=True, groups={slot.name: numbers[id(slot.first)] for slot in slots}
            )
            store.pull([slot.name for slot in slots], [slot.first.detach() for slot in slots])
        for slot in slots:
            slot.spread()
        self._remember()

    # ------------------------------------------------------------------ steps

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the parameters with the gradients of the last backward pass, and set these to
        None.

        Args:
            batch_size: samples of this worker in this step, over all its devices; may differ from
                step to step and from worker to worker. With 0 the worker takes part and its
                gradients, if it has any, are not used.
            ignore_stale_grad: allow parameters that have no gradient. They stay as they are with a
                store of one worker; with several workers, of whom others may have one, their
                gradient counts as 0 here.

        Raises:
            UserError: a parameter has no gradient, or its weights were changed since the last step.
        """
        batch = self._batch(batch_size)
        if self._reduced:
            raise UserError(
                "step after allreduce_grads would add up twice; call update(batch_size), or step "
                "alone"
            )
        grads = self._gradients(batch, ignore_stale_grad)
        share = Share(batch, 1.0)
        if self._aggregate == "sum":
            share = Share()
            if batch and self._reduction == "sum":
                grads = {
                    name: torch.div(grad.detach(), batch, out=self._room(name, grad))
                    for name, grad in grads.items()
                }
        elif self._reduction == "mean":
            grads = {
                name: torch.mul(grad.detach(), batch, out=self._room(name, grad))
                for name, grad in grads.items()
            }
        self._next_update()
        if self._on_store:
            outs = {slot.name: slot.first.detach() for slot in self._slots if slot.name in grads}
            groups = [hyper(group) for group in self._optimizer.param_groups]
            self.last_step = self._store.update(grads, outs, share, groups, self._clip_norm)
            self._finish()
        else:
            self.last_step = self._store.reduce(grads, share)
            self._update(grads)

    def allreduce_grads(self) -> None:
        """Add the gradients up over all devices and workers, and leave the sums in the parameters,
        for `update` to use.

        Between the two, gradients can be looked at and changed. For ``update_on_kvstore=False``.
        """
        self._only_here("allreduce_grads()")
        if self._reduction == "mean":
            raise UserError(
                "allreduce_grads with reduction='mean' does not know the batch_size; use "
                "step(batch_size), or a loss that is a sum over the samples, and reduction='sum'"
            )
        if self._reduced:
            raise UserError("allreduce_grads was called twice; call update(batch_size) in between")
        grads = self._gradients(None, True)
        self.last_step = self._store.reduce(grads, Share())
        for slot in self._slots:
            if slot.name in grads:
                for one in slot.replicas:
                    if one is slot.first:
                        one.grad = grads[slot.name]
                    else:
                        one.grad = grads[slot.name].to(one.device, copy=True)
        self._reduced = True

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the parameters with the gradients that `allreduce_grads` has added up. Both
        together are `step`.

        Args:
            batch_size: samples of this worker, as in `step`.
            ignore_stale_grad: as in `step`.
        """
        self._only_here("update(batch_size)")
        if not self._reduced and (
            self._store.num_workers > 1 or any(len(slot.replicas) > 1 for slot in self._slots)
        ):
            raise UserError(
                "update: the gradients were not added up; call allreduce_grads() first, or "
                "step(batch_size) for both"
            )
        batch = self._batch(batch_size)
        total = torch.tensor([batch], dtype=torch.float64)
        if self._aggregate == "mean" and self._store.mode.distributed:
            self._store.reduce({_SAMPLES: total}, Share())
        if not float(total):
            raise UserError(
                "update(0): no worker has a sample in this step; leave it out on all of them"
            )
        stale = [slot.name for slot in self._slots if slot.first.grad is None]
        if stale and not ignore_stale_grad:
            raise _stale(stale)
        self._next_update()
        grads = {slot.name: slot.first.grad for slot in self._slots if slot.first.grad is not None}
        factor = 1.0 / float(total)
        self._update({name: grad * factor for name, grad in grads.items()})

    def _only_here(self, call: str) -> None:
        if self._on_store:
            raise UserError(
                f"{call} with the optimizer in the store: use step(batch_size), or Trainer(…, "
                "update_on_kvstore=False)"
            )

    def _batch(self, batch_size: float) -> float:
        if not is_number(batch_size) or not 0 <= batch_size < math.inf:
            raise UserError(
                f"batch_size={batch_size!r}; it must be the number of samples of this worker, 0 or "
                "more"
            )
        return float(batch_size)

    def _gradients(self, batch: float | None, ignore_stale: bool) -> dict[str, torch.Tensor]:
        """This worker's gradients by name, each added up over its devices."""
        self._check_unchanged()
        grads, stale = {}, []
        for slot in self._slots:
            found = (
                [one.grad for one in slot.replicas if one.grad is not None] if batch != 0 else []
            )
            if any(grad.layout != torch.strided for grad in found):
                raise UserError(
                    f"the gradient of '{slot.name}' is sparse; use nn.Embedding(…, sparse=False), "
                    f"or keep the table in the store: init('{slot.name}', RowSparse(rows, "
                    "columns)), push and row_sparse_pull"
                )
            if found:
                grads[slot.name] = sum_on_one_device(found).to(slot.first.device)
            elif batch == 0 or (ignore_stale and self._store.mode.distributed):
                grads[slot.name] = torch.zeros_like(slot.first)
            elif not ignore_stale:
                stale.append(slot.name)
        if stale:
            raise _stale(stale)
        return grads

    def _room(self, name: str, grad: torch.Tensor) -> torch.Tensor | None:
        """Where a gradient that is computed here is to lie, so that servers of this host read it
        there; None: anywhere."""
        return self._store._buffers.get(name) if grad.device.type == "cpu" else None

    def _next_update(self) -> None:
        if self._scheduler is not None:
            self._set_rate(self._scheduler(self._num_update + 1))

    def _update(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Step with the worker's own optimizer."""
        if self._clip_norm is not None:
            factor = clip_factor(sum(square_of(grad) for grad in grads.values()), self._clip_norm)
            if factor != 1.0:
                for grad in grads.values():
                    grad.mul_(factor)
        for slot in self._slots:
            slot.first.grad = grads.get(slot.name)
        self._optimizer.step()
        self._finish()

    def _finish(self) -> None:
        for slot in self._slots:
            slot.spread()
            for one in slot.replicas:
                one.grad = None
        self._num_update += 1
        self._reduced = False
        mark_stepped(self._optimizer)
        self._remember()

    def _remember(self) -> None:
        if self._on_store:
            self._versions = [[one._version for one in slot.replicas] for slot in self._slots]

    def _check_unchanged(self) -> None:
        """The store's weights are the ones that are trained; a change of the net's own would be
        lost without a word."""
        if not self._on_store:
            return
        for slot, versions in zip(self._slots, self._versions, strict=True):
            if [one._version for one in slot.replicas] != versions:
                raise UserError(
                    f"the weights of '{slot.name}' were changed since the Trainer last wrote them, "
                    "and the store does not know; load or change weights before the Trainer is "
                    "made, or use update_on_kvstore=False"
                )

    # ------------------------------------------------------------------ learning rate and states

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """A torch optimizer of the parameters, on which torch's schedulers can be made.

        Where the store takes the steps it only holds the options, which travel with each step.
        """
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step; of the first group, if there are several."""
        if self._scheduler is not None:
            return learning_rate(self._scheduler(self._num_update + 1))
        return float(self._optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all groups, from the next step on, also on servers."""
        if self._scheduler is not None:
            raise UserError(
                "set_learning_rate with an lr_scheduler, which would set it back; change the "
                "scheduler, or leave it out"
            )
        self._set_rate(lr)

    def _set_rate(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(lr)

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write the optimizer's state and options into one file. To be called on every worker; rank
        0 writes.

        The weights are the net's; save them with torch.save(net.state_dict(), …).
        """
        if self._on_store:
            state = self._store.state()
        else:
            state = state_of(self._optimizer, self._slots, self._num_update)
        if self._store.rank == 0:
            write_states(fname, state, written_spec(self._optimizer, self._spec))
        self._store.barrier()

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Continue from what `save_states` wrote, with any kind of store and any number of workers;
        on every worker."""
        state, spec = read_states(fname)
        read_spec(self._optimizer, written_spec(self._optimizer, self._spec), spec, fname)
        if self._on_store:
            self._store.load_state(state)
        else:
            load_into(self._optimizer, self._slots, state)
        self._num_update = state.step


def _stale(names: list[str]) -> UserError:
    shown = ", ".join(f"'{name}'" for name in names[:5]) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
    return UserError(
        f"no gradient since the last step: {shown}; call backward on a loss that depends on them, "
        "freeze them with "
        "requires_grad_(False) before the Trainer is made, or pass ignore_stale_grad=True"
    )
