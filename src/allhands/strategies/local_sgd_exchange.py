"""The steps of a worker of `local_sgd`, and the exchanges after some of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allhands.comm import sum_gradients
from allhands.comm.codecs import codec_from
from allhands.comm.coded_sum import exchange, part_length
from allhands.compat import mark_stepped
from allhands.errors import UserError
from allhands.step.exchange import Count, Exchange
from allhands.step.update import update_function
from allhands.strategies.alike import check_weights_equal
from allhands.strategies.local_sgd_fragments import Fragment, shares, weighted_mean
from allhands.strategies.local_sgd_replicas import LocalReplicas
from allhands.strategies.local_sgd_settings import LocalSGDSettings
from allhands.strategies.optimizer_means import own_state, take_own_state
from allhands.strategies.own_weights import OwnWeights


class LocalSGDExchange(Exchange):
    """Takes the worker's own steps, and brings weights together after every H of them.

    Args:
        settings: of the strategy.
        own: the worker's weights.
        replicas: those that this rank trains, in an elastic job; else None.
    """

    alone = True
    after_backward = True

    def __init__(
        self, settings: LocalSGDSettings, own: OwnWeights, replicas: LocalReplicas | None = None
    ) -> None:
        self.replicas = own.replicas = replicas
        if replicas is not None:
            replicas.end_step = self._end_step
        self.after_step = self._stepped
        self._settings, self.own, self._world = settings, own, own.world
        self._codec = codec_from(settings.compress)
        self._loaded: dict[str, Any] = {}
        self._loaded_own: dict[str, torch.Tensor] = {}
        self._epoch = [0, 0]  # bytes sent in exchanges and steps, since the last `epoch_values`

    def begin(self, step: int) -> None:
        own, world, replicas = self.own, self._world, self.replicas
        self._update = update_function(own.optimizer)
        if replicas is not None and replicas.begun:  # members of the world have changed
            own.step = step
            return
        loaded, tensors = self._loaded, self._loaded_own
        self._loaded, self._loaded_own = {}, {}
        same_size = loaded.get("workers") == world.world_size
        for number, part in enumerate(own.parts):
            present = part.read()  # of a checkpoint, the mean of its workers
            part.anchor = part.joined(loaded.get("anchor", {}), present)
            zeros = torch.zeros_like(present)
            if loaded.get("momentum"):
                part.momentum = part.joined(loaded["momentum"], zeros)
            if any(name in loaded.get("mean", {}) for name in part.names):
                part.mean, part.due = part.joined(loaded["mean"], zeros), loaded["due"][number]
            kept = {}
            for kind, default in (("residual", zeros), ("owed", zeros), ("weights", present)):
                given = {
                    name: tensors[f"{kind}/{name}"]
                    for name in part.names
                    if f"{kind}/{name}" in tensors
                }
                if given:
                    kept[kind] = part.joined(given, default)
            if same_size and self._settings.compress is not None:
                part.residual = kept.get("residual")
                part.owed = self._own_place(kept["owed"]).clone() if "owed" in kept else None
            elif "residual" in kept:
                # Each rank's own, or on rank 0 the sums over all who saved. A rank's part in the
                # next mean is about 1 / N.
                part.residual = world.world_size * (
                    kept["residual"] / loaded["workers"] + kept.get("owed", 0.0)
                )
            if "weights" in kept and same_size:
                own.aside = own.aside or [None] * len(own.parts)
                own.aside[number] = kept["weights"]
                part.alike, part.seen = False, float(tensors["seen"][number])
        if same_size and "seen" in tensors:
            own.optimizer_state = take_own_state(tensors, own.optimizer)
        own.begin(step)
        if replicas is not None:
            replicas.begin(alike=not tensors)

    def _own_place(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of a vector."""
        length = part_length(len(values), self._world.world_size)
        return values[self._world.rank * length : (self._world.rank + 1) * length]

    def go_on(self) -> None:
        self.own.take_up()

    def finish(self, lost: bool = False) -> None:
        if lost:
            return
        self.own.settle_all()
        for part in self.own.parts:
            if part.mean is not None:
                part.arrived()

    # ------------------------------------------------------------------ a step

    def exchange_all(
        self, own: Count, total: float, clip_norm: float | None, missing: bool
    ) -> bool:
        weights = self.own
        assert weights.step is not None
        if self.before_step is not None:
            if self.replicas is not None:
                raise UserError(
                    "gradients are looked at before each step, which local_sgd under --elastic "
                    "does not show: a worker may train several replicas; write distributed='ddp'"
                )
            self._show(own)
        if total:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(weights.parameters, clip_norm)
            self._update()
        return True

    def _stepped(self, own: Count) -> None:
        mark_stepped(self.own.optimizer)
        for part in self.own.parts:
            part.count(own)
        if self.replicas is None:
            self._end_step()

    def _end_step(self) -> None:
        """This rank's own steps are taken: exchange what is due after this one."""
        weights, replicas = self.own, self.replicas
        assert weights.step is not None
        weights.step = step = weights.step + 1
        self._epoch[1] += 1
        for part in weights.parts:
            part.alike = self._world.world_size == 1 and (replicas is None or replicas.count == 1)
            exchanges = (step - part.offset) % self._settings.every == 0
            if part.mean is not None and (exchanges or step >= part.due):
                self._apply(part, part.arrived())
            if exchanges:
                self._exchange(part)
                if replicas is not None:
                    replicas.add_copies()

    def _exchange(self, part: Fragment) -> None:
        """Bring a fragment's weights together, and take the outer optimizer's step; with `overlap`
        begin to."""
        settings, size, replicas = self._settings, self._world.world_size, self.replicas
        averages = settings.outer["name"] == "average"
        if size == 1 and averages and part.residual is None and part.alike:
            # the mean of one: no arithmetic, which would round
            part.anchor, part.seen = part.read(), 0.0
            return
        if replicas is None:
            delta = part.anchor - part.read()
        else:
            delta, part.seen = replicas.deltas()
        if part.residual is not None:
            delta += part.residual
        if settings.overlap:
            assert self.own.step is not None
            self._count(part.begin_mean(delta, self.own.step + settings.overlap, self._world))
            part.seen = 0.0
            return
        if size == 1 or settings.compress is None:
            lost = None
            sent = weighted_mean([delta], [part.seen], self._world) if size > 1 else 0
        else:
            given = delta if part.seen else torch.zeros_like(delta)
            delta, lost, part.owed, sent = exchange(
                given, part.seen, self._codec, self._codec, part.owed, mean=True
            )
        if part.seen:  # else this rank has sent nothing, and keeps what it owes
            part.residual = lost
        self._apply(part, delta)
        part.seen = 0.0
        if replicas is not None:
            replicas.exchanged()
        self._count(sent)

    def _count(self, sent: int) -> None:
        self._settings.sent += sent
        self._epoch[0] += sent

    def _apply(self, part: Fragment, delta: torch.Tensor) -> None:
        """Take the outer optimizer's step along the mean of the deltas."""
        settings = self._settings
        if settings.outer["name"] == "average":
            part.anchor -= delta
        else:
            lr, momentum = settings.outer["lr"], settings.outer["momentum"]
            part.momentum = (
                delta.clone() if part.momentum is None else part.momentum.mul_(momentum).add_(delta)
            )
            part.anchor.sub_(delta.add_(part.momentum, alpha=momentum), alpha=lr)
        mix, part.mean = settings.mix, None
        part.write(torch.lerp(part.anchor, part.read(), mix) if mix else part.anchor)
        part.alike = not mix or self._world.world_size == 1

    def _show(self, own: Count) -> None:
        """Call `before_step` with the mean of the ranks' gradients, which the weights' mean follows
        when ``every`` is 1."""
        parameters = self.own.parameters
        grads = [p.grad for p in parameters]
        weight = float(shares([float(own)], self._world)[self._world.rank])
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = None if grad is None else grad * weight
        sum_gradients(parameters, self._world)
        assert self.before_step is not None
        self.before_step()
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad

    # ------------------------------------------------------------------ between steps

    def check_equal(self, where: str) -> None:
        if self._world.world_size > 1:
            names = [name for part in self.own.parts for name in part.names]
            check_weights_equal(self.own.model, names, where)

    def epoch_values(self) -> dict[str, float]:
        sent, steps = self._epoch
        self._epoch = [0, 0]
        return {"bytes_per_step": sent / steps if steps else 0.0}

    # ------------------------------------------------------------------ checkpoints

    @property
    def _is_one_each(self) -> bool:
        """Whether each rank has one worker's own state; else checkpoints hold the means alone."""
        return self.replicas is None or self.replicas.count == self._world.world_size

    def state_dict(self) -> dict[str, Any]:
        if self.own.step is None:
            return {}
        parts = self.own.parts
        anchors = {
            name: value for part in parts for name, value in part.by_name(part.anchor).items()
        }
        momentum = {
            name: value
            for part in parts
            if part.momentum is not None
            for name, value in part.by_name(part.momentum).items()
        }
        means = {
            name: value
            for part in parts
            if part.mean is not None
            for name, value in part.by_name(part.arrived()).items()
        }
        return {
            "workers": self._world.world_size if self._is_one_each else 0,
            "fragments": self._settings.fragments,
            "outer": dict(self._settings.outer),
            "anchor": anchors,
            "momentum": momentum,
            "mean": means,
            "due": [part.due for part in parts],
            "epoch": list(self._epoch),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return  # saved under another strategy: all begin with the weights that it saved
        before, outer = state["fragments"], state["outer"]
        if before != self._settings.fragments:
            raise UserError(
                f"resume: the checkpoint was written with fragments={before}, each at its own "
                f"place between two exchanges; set fragments to {before}"
            )
        if outer["name"] != self._settings.outer["name"]:
            written = outer["name"] if outer["name"] == "average" else outer
            raise UserError(
                "resume: the checkpoint was written with another outer optimizer; set outer to "
                f"{written!r}"
            )
        self._loaded, self._epoch = state, list(state["epoch"])

    def own_tensors(self) -> dict[str, torch.Tensor]:
        own = self.own
        if self._world.world_size == 1 or own.step is None or not self._is_one_each:
            return {}
        found = {"seen": torch.tensor([part.seen for part in own.parts], dtype=torch.float64)}
        for number, part in enumerate(own.parts):
            kept = {"residual": part.residual}
            # Of the whole vector's length, so that the ranks' add up to it.
            if part.owed is not None:
                kept["owed"] = owed = torch.zeros_like(part.anchor)
                self._own_place(owed).copy_(part.owed)
                kept["residual"] = (
                    torch.zeros_like(part.anchor) if part.residual is None else part.residual
                )
            if not part.alike:
                aside = own.aside[number] if own.aside is not None else None
                kept["weights"] = part.read() if aside is None else aside
            for kind, values in kept.items():
                if values is not None:
                    found |= {
                        f"{kind}/{name}": value for name, value in part.by_name(values).items()
                    }
        state = own.optimizer.state if own.optimizer_state is None else own.optimizer_state
        return found | own_state(state, own.optimizer)

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> bool:
        self._loaded_own = tensors
        return True
