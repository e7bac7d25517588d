"""Training that talks rarely: workers take steps of their own, and now and then their weights are
brought together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allhands.comm import broadcast_tensors
from allhands.compat import step_hooks
from allhands.errors import UserError
from allhands.step.exchange import Placement
from allhands.step.loss import LossRule
from allhands.strategies.alike import refuse_going_on
from allhands.strategies.base import BIND_OPTIONS, BindOptions, Bound, Strategy
from allhands.strategies.local_sgd_exchange import LocalSGDExchange
from allhands.strategies.local_sgd_fragments import layers_of, offsets_of
from allhands.strategies.local_sgd_replicas import LocalReplicas
from allhands.strategies.local_sgd_settings import LocalSGDSettings
from allhands.strategies.model_state import ReplicatedState
from allhands.strategies.own_weights import OwnWeights
from allhands.world import World


class LocalSGDState(ReplicatedState):
    """What is evaluated and saved is the mean of the workers' weights and optimizer states."""

    def __init__(self, own: OwnWeights, replicas: LocalReplicas | None) -> None:
        super().__init__(own.model, own.optimizer, own.world)
        self._own, self._replicas, self._for_a_moment = own, replicas, False

    def collect(self) -> None:
        self._own.settle_all()

    def sync_buffers(self) -> None:
        self._own.settle()
        replicas = self._replicas
        if replicas is not None:
            replicas.mean_of_statistics()
        super().sync_buffers()
        if replicas is not None and not self._for_a_moment:
            replicas.synced()

    @contextmanager
    def buffers_made_equal(self) -> Iterator[dict[str, torch.Tensor]]:
        self._for_a_moment = True
        try:
            with self._own.settled(), super().buffers_made_equal() as buffers:
                yield buffers
        finally:
            self._for_a_moment = False


class LocalSGD(LocalSGDSettings, Strategy):
    """The model and an optimizer on every worker, which takes its own steps on its share of each
    global batch.

    After every `every` steps the workers exchange what their weights have changed by since the last
    exchange, and an outer optimizer applies the mean of it, weighted by the samples that each has
    seen, on all workers alike. What is evaluated, saved and handed back is the mean of the workers'
    present weights, weighted likewise; each worker then goes on with its own.

    Averaging is local SGD (Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019;
    Zhang et al., Parallel SGD: When does Averaging Help?, 2016). Nesterov momentum is DiLoCo
    (Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023),
    with fragments streaming DiLoCo (Douillard et al., Streaming DiLoCo with overlapping
    communication, 2025). With `overlap` the exchanges run beside the next steps, as there.

    Not what one process computes (`exact` is False), except with ``every=1``, plain averaging in
    fp32, and SGD without momentum or clipping. `clip_norm` bounds the norm of each worker's own
    gradient. The values of an epoch have ``bytes_per_step``, what a worker has sent in exchanges.

    Args:
        every: H, optimizer steps between two exchanges of the same weights, counted over the whole
            training.
        outer: "average", or ``{"name": "nesterov", "lr": 0.7, "momentum": 0.9}``, whose numbers are
            the defaults.
        fragments: cut the model into so many fragments of consecutive layers and about the same
            size, and spread their exchanges evenly over the `every` steps.
        exchange: the old name of `compress`; "fp32" is None.
        mix: the part of its own weights that a worker keeps at an exchange, beside the outer
            optimizer's; 0 takes those alone.
        compress: what is sent is narrowed: "fp16", "bf16", "int8", "1bit", "topk", or ``{"name":
            "topk", "keep": 0.01}``. What a number has lost is added to the next one that this
            worker sends (Seide et al., Interspeech 2014). None sends fp32 (float64 weights stay
            so).
        overlap: the optimizer steps that a worker takes while an exchange is on its way; the outer
            optimizer's step, which begins from the weights of the last exchange, and `mix` follow
            after them. 0 waits. At the end of a training what is on its way is left out.

    Raises:
        UserError: a setting that there is not, or that has no meaning beside the others.
    """

    name = "local_sgd"
    whole_model = True
    own_in_words = (
        "what each worker had for itself (its weights and its optimizer's state); all "
        "go on with the means of them"
    )
    exact = False
    alone = True
    takes_step = True
    copies_alike = True

    def exact_for(self, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> bool:
        averages = (
            self.every == 1
            and self.outer["name"] == "average"
            and self.compress is None
            and not self.mix
        )
        plain = type(optimizer) is torch.optim.SGD and not any(
            group["momentum"] for group in optimizer.param_groups
        )
        return averages and plain and not step_hooks(optimizer) and clip_norm is None

    def kinds_of_step(self) -> tuple[list[int], dict[int, int]]:
        every = self.every
        sends = {(offset - 1) % every for offset in offsets_of(self.fragments, every)}
        # Steps in which the outer optimizer takes its step along what has arrived meanwhile.
        applies = {number + self.overlap for number in sends}
        first = sorted(sends | applies)
        begin = (first[-1] // every + 1) * every
        kinds = {begin + number: 1 for number in sorted(sends)}
        kinds |= {begin + number: 1 for number in sorted(applies) if number % every not in sends}
        plain = set(range(every)) - {number % every for number in kinds}
        if plain:
            kinds[begin + min(plain)] = len(plain)
        return first, kinds

    def check_settings(self, settings: Any) -> None:
        if callable(getattr(settings.optimizer, "eval", None)):
            raise UserError(
                f"{type(settings.optimizer).__name__} evaluates other weights than it trains, made "
                "from its own state, which "
                "differs between the workers of local_sgd; write distributed='ddp'"
            )
        if settings.precision == "fp16":
            raise UserError(
                "precision='fp16': each worker would scale its own loss, and checkpoints keep one "
                "scale; write precision='bf16'"
            )
        criterion = getattr(settings, "criterion", None)  # a step function has none
        if criterion is not None and LossRule(criterion).sums:
            raise UserError(
                "the criterion sums over its samples, so that each worker would step along the sum "
                "over its own part alone; write reduction='mean'"
            )

    def over_batch_refused(self, workers: int) -> str | None:
        if self.every == 1 or workers == 1:
            return None
        return (
            "between two exchanges each worker has weights of its own; write LocalSGD(every=1) "
            f"in place of every={self.every}"
        )

    def check(self, world: World) -> None:
        refuse_going_on(
            "workers of local_sgd exchange weights among themselves",
            ", a logdir and save_every to start again from the newest checkpoint",
        )

    def regroup_refused(self) -> str | None:
        compress = None if self.compress is None else self.compress["name"]
        for setting, value, plain in (
            ("fragments", self.fragments, 1),
            ("mix", self.mix, 0),  # and so `overlap`
            ("compress", compress, None),
        ):
            if value != plain:
                return (
                    f"LocalSGD({setting}={value!r}) leaves each worker something of its own after "
                    f"an exchange, which is lost with it; leave {setting} out"
                )
        return None

    def replicas(self, workers: int) -> int | None:
        return None if self.regroup_refused() else workers

    def capture_refused(self, model: nn.Module, world: World) -> str | None:
        return None

    def bind(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: BindOptions = BIND_OPTIONS,
    ) -> Bound:
        layers = layers_of(model)
        strange = [
            f"'{name}' is {p.dtype}"
            for layer in layers
            for name, p in layer
            if not p.is_floating_point()
        ]
        if not layers or strange:
            what = strange[0] if strange else "no parameter is trained"
            raise UserError(
                f"local_sgd exchanges floating-point weights, but {what}; write distributed='ddp'"
            )
        if self.fragments > len(layers):
            raise UserError(
                f"LocalSGD(fragments={self.fragments}): the model has {len(layers)} layers with "
                f"trained parameters of their own; set fragments to {len(layers)} or less"
            )
        before = options.before
        if before is not None and options.replicas is not None:
            before.placement = Placement(model, world)
            return before
        if not options.weights_follow:
            broadcast_tensors([*(p.detach() for p in model.parameters()), *model.buffers()], world)
        self.sent = self.sent_for_means = self.sent_for_copies = 0
        own = OwnWeights(self, model, optimizer, world)
        count = options.replicas
        replicas = None if count is None else LocalReplicas(own, count)
        exchange = LocalSGDExchange(self, own, replicas)
        alike = self.every > 1 or self.exact_for(optimizer, options.clip_norm)
        if not alike and world.world_size > 1:
            exchange.notes = [
                "note: local_sgd lets each worker take its own step before weights are averaged, "
                "which with these settings is another training than that of one process; write "
                "distributed='ddp' for the same one"
            ]
        if replicas is not None:
            exchange.notes = [
                *exchange.notes,
                f"--elastic: {count} workers of local_sgd are trained whoever is there; "
                "after each exchange every worker sends a copy of its optimizer's state to "
                "another, and what a lost one has done since then is repeated. A loss of both at "
                "once ends the training",
            ]
        return Bound(Placement(model, world), exchange, LocalSGDState(own, replicas))
