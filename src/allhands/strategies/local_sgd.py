"""Training that talks rarely: workers take steps of their own, and now and then their weights are
brought together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allhands.checks import check_whole, is_number
from allhands.comm import broadcast_tensors, calls, sum_gradients
from allhands.comm.codecs import codec_from
from allhands.comm.coded_sum import exchange, part_length
from allhands.comm.compress import NO_MATRICES, NO_THRESHOLD, checked_compress, merged_old
from allhands.compat import mark_stepped, step_hooks
from allhands.errors import UserError, warn_renamed
from allhands.step.loss import LossRule
from allhands.step.update import update_function
from allhands.strategies.alike import check_weights_equal, make_buffers_equal, refuse_going_on
from allhands.strategies.base import Strategy
from allhands.strategies.local_sgd_exchange import (
    Fragment,
    cut_in_fragments,
    layers_of,
    shares,
    weighted_mean,
)
from allhands.strategies.local_sgd_state import State, mean_state, own_state, take_own_state
from allhands.world import World

_NESTEROV = {"lr": 0.7, "momentum": 0.9}


class LocalSGD(Strategy):
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
    communication, 2025), whose exchanges run beside the next steps; here the steps wait for them.

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

    Raises:
        UserError: a setting that there is not, or that has no meaning beside the others.
    """

    name = "local_sgd"
    own_in_words = (
        "what each worker had for itself (its weights and its optimizer's state); all "
        "go on with the means of them"
    )
    exact = False
    alone = True
    takes_step = True
    resumes_anywhere = True

    def __init__(
        self,
        every: int = 32,
        outer: str | Mapping[str, Any] = "average",
        fragments: int = 1,
        exchange: str | None = None,
        mix: float = 0.0,
        compress: str | Mapping[str, Any] | None = None,
    ) -> None:
        check_whole("every", every, of="LocalSGD", unit="steps")
        check_whole("fragments", fragments, of="LocalSGD")
        if fragments > every:
            raise UserError(
                f"LocalSGD(every={every}, fragments={fragments}): each fragment has a step of its "
                f"own among the {every}; set fragments to {every} or less, or every to {fragments}"
            )
        if exchange == "fp32":
            warn_renamed("LocalSGD(exchange='fp32')", "LocalSGD(), which sends weights as they are")
            exchange = None
        wanted = merged_old(compress, exchange, "LocalSGD", "exchange")
        self.compress = checked_compress(
            wanted, "LocalSGD(compress=", {"powersgd": NO_MATRICES, "2bit": NO_THRESHOLD}
        )
        self._codec = codec_from(self.compress)
        if not is_number(mix) or not 0 <= mix < 1:
            raise UserError(
                f"LocalSGD(mix={mix!r}); it must be at least 0 and below 1; 0 takes the exchanged "
                "weights alone"
            )
        self.every, self.fragments, self.mix = every, fragments, float(mix)
        self.outer = _checked_outer(outer)
        self._note = ""

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
        other = self.every == 1 and not self.exact_for(settings.optimizer, settings.clip_norm)
        self._note = (
            "note: local_sgd lets each worker take its own step before weights are averaged, "
            "which with these settings is another training than that of one process; write "
            "distributed='ddp' for the same one"
            if other
            else ""
        )

    def notes(self) -> list[str]:
        return [self._note] if self._note and self.world.world_size > 1 else []

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

    # ------------------------------------------------------------------ before the first step

    def compiled(self, workers: int) -> str | None:
        return "model"

    def prepare(self, model: nn.Module, world: World) -> nn.Module:
        self.world, self.bare = world, model
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
        broadcast_tensors([*(p.detach() for p in model.parameters()), *model.buffers()], world)
        self._parts = cut_in_fragments(layers, self.fragments, self.every)
        self._parameters = [p for part in self._parts for p in part.parameters]
        self._optimizer: torch.optim.Optimizer | None = None
        self._loaded: dict[str, Any] = {}
        self._loaded_own: dict[str, torch.Tensor] = {}
        # What a worker goes on with, while the model holds the mean for all: its weights by
        # fragment, its optimizer's state.
        self._aside: list[torch.Tensor | None] | None = None
        self._own_state: State | None = None
        self._between = False
        #: Bytes that this rank has sent: in exchanges, and for means that are evaluated and saved.
        self.sent = self.sent_for_means = 0
        self._epoch = [0, 0]  # bytes sent in exchanges and steps, since the last `epoch_values`
        return model

    def begin(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        self._optimizer, self._step = optimizer, step
        self._update = update_function(optimizer)
        loaded, own = self._loaded, self._loaded_own
        self._loaded, self._loaded_own = {}, {}
        same_size = loaded.get("workers") == self.world.world_size
        for number, part in enumerate(self._parts):
            present = part.read()  # of a checkpoint, the mean of its workers
            part.anchor = part.joined(loaded.get("anchor", {}), present)
            zeros = torch.zeros_like(present)
            if loaded.get("momentum"):
                part.momentum = part.joined(loaded["momentum"], zeros)
            kept = {}
            for kind, default in (("residual", zeros), ("owed", zeros), ("weights", present)):
                given = {
                    name: own[f"{kind}/{name}"] for name in part.names if f"{kind}/{name}" in own
                }
                if given:
                    kept[kind] = part.joined(given, default)
            if same_size and self.compress is not None:
                part.residual = kept.get("residual")
                part.owed = self._own_place(kept["owed"]).clone() if "owed" in kept else None
            elif "residual" in kept:
                # Each rank's own, or on rank 0 the sums over all who saved. A rank's part in the
                # next mean is about 1 / N.
                part.residual = self.world.world_size * (
                    kept["residual"] / loaded["workers"] + kept.get("owed", 0.0)
                )
            if "weights" in kept and same_size:
                self._aside = self._aside or [None] * len(self._parts)
                self._aside[number] = kept["weights"]
                part.alike, part.seen = False, float(own["seen"][number])
        if same_size and "seen" in own:
            self._own_state = take_own_state(own, optimizer)
        self._between = True
        self._note_versions()

    def _own_place(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of a vector."""
        length = part_length(len(values), self.world.world_size)
        return values[self.world.rank * length : (self.world.rank + 1) * length]

    # ------------------------------------------------------------------ a step

    def exchange_all(
        self, own: float, total: float, clip_norm: float | None, missing: bool
    ) -> bool:
        assert self._optimizer is not None
        if self.before_step is not None:
            self._show(own)
        if own:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters, clip_norm)
            self._update()
        mark_stepped(self._optimizer)
        self._step += 1
        self._epoch[1] += 1
        for part in self._parts:
            part.seen += own
            part.alike = self.world.world_size == 1
            if (self._step - part.offset) % self.every == 0:
                self._exchange(part)
        return True

    def _exchange(self, part: Fragment) -> None:
        """Bring a fragment's weights together, and take the outer optimizer's step."""
        averages, size = self.outer["name"] == "average", self.world.world_size
        if size == 1 and averages and part.residual is None:
            part.anchor, part.seen = (
                part.read(),
                0.0,
            )  # the mean of one: no arithmetic, which would round
            return
        delta = part.anchor - part.read()
        if part.residual is not None:
            delta += part.residual
        if size == 1 or self.compress is None:
            lost = None
            sent = weighted_mean([delta], [part.seen], self.world) if size > 1 else 0
        else:
            given = delta if part.seen else torch.zeros_like(delta)
            delta, lost, part.owed, sent = exchange(
                given, part.seen, self._codec, self._codec, part.owed, mean=True
            )
        if part.seen:  # else this rank has sent nothing, and keeps what it owes
            part.residual = lost
        if averages:
            part.anchor -= delta
        else:
            lr, momentum = self.outer["lr"], self.outer["momentum"]
            part.momentum = (
                delta.clone() if part.momentum is None else part.momentum.mul_(momentum).add_(delta)
            )
            part.anchor.sub_(delta.add_(part.momentum, alpha=momentum), alpha=lr)
        part.write(torch.lerp(part.anchor, part.read(), self.mix) if self.mix else part.anchor)
        part.seen, part.alike = 0.0, not self.mix or size == 1
        self.sent += sent
        self._epoch[0] += sent

    def _show(self, own: float) -> None:
        """Call `before_step` with the mean of the ranks' gradients, which the weights' mean follows
        when ``every`` is 1."""
        grads = [p.grad for p in self._parameters]
        weight = float(shares([own], self.world)[self.world.rank])
        for p, grad in zip(self._parameters, grads, strict=True):
            p.grad = None if grad is None else grad * weight
        sum_gradients(self._parameters, self.world)
        assert self.before_step is not None
        self.before_step()
        for p, grad in zip(self._parameters, grads, strict=True):
            p.grad = grad

    # ------------------------------------------------------------------ between steps

    def _settle(self) -> None:
        """Let the model be the mean of the workers' present weights; each one's own are put
        aside."""
        if self._aside is not None or self.world.world_size == 1 or self._optimizer is None:
            return
        apart = [part for part in self._parts if not part.alike]
        self._aside = [None if part.alike else part.read() for part in self._parts]
        if apart:
            calls.note(("the mean of the weights after optimizer step", self._step))
            deltas = [part.anchor - part.read() for part in apart]
            self.sent_for_means += weighted_mean(deltas, [part.seen for part in apart], self.world)
            for part, delta in zip(apart, deltas, strict=True):
                part.write(part.anchor - delta)
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [p._version for p in self._parameters]

    def collect(self) -> None:
        self._settle()
        if self.world.world_size > 1 and self._optimizer is not None and self._own_state is None:
            state, sent = mean_state(self._optimizer, self.world)
            self.sent_for_means += sent
            self._own_state, self._optimizer.state = self._optimizer.state, state

    def sync_buffers(self) -> None:
        self._settle()
        self._between = True
        if self.world.world_size > 1:
            make_buffers_equal(self.bare, self.world)

    @contextmanager
    def buffers_made_equal(self, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
        between = self._between
        try:
            with super().buffers_made_equal(model) as own:
                self._settle()
                yield own
        finally:
            self._between = between
            if not between:
                self.go_on()

    def go_on(self) -> None:
        self._lay_out_anew()
        aside, self._aside, self._between = self._aside, None, False
        if self._own_state is not None:
            assert self._optimizer is not None
            self._optimizer.state, self._own_state = self._own_state, None
        if aside is None:
            return
        versions = dict(zip(self._parameters, self._versions, strict=True))
        for part, own in zip(self._parts, aside, strict=True):
            if own is None:
                continue
            for name, parameter in zip(part.names, part.parameters, strict=True):
                if parameter._version != versions[parameter]:
                    raise UserError(
                        f"the weights of '{name}' were changed while they were the mean that is "
                        "evaluated and saved, and each worker goes on with its own weights; change "
                        "them in on_step_end, or set every to a divisor of the steps of an epoch"
                    )
            part.write(own)

    def _lay_out_anew(self) -> None:
        """Exchange what is trained now, where a callback has frozen, unfrozen or replaced
        parameters between two epochs."""
        trained = {id(p): name for name, p in self.bare.named_parameters() if p.requires_grad}
        changed = trained.keys() ^ {id(p) for p in self._parameters}
        if not changed or self._optimizer is None:
            return
        if (
            self.every > 1
            or self.outer["name"] != "average"
            or self.compress is not None
            or self.mix
        ):
            names = {id(p): name for name, p in self.bare.named_parameters()}
            name = next(
                (names[key] for key in changed if key in names), "a parameter that was replaced"
            )
            raise UserError(
                f"'{name}' was frozen, unfrozen or replaced in the middle of the training, and "
                "local_sgd has laid out its "
                "exchanges before; train in two calls of train(), or write LocalSGD(every=1)"
            )
        self._aside = None  # after each step the weights are those of all ranks
        self._parts = cut_in_fragments(layers_of(self.bare), self.fragments, self.every)
        self._parameters = [p for part in self._parts for p in part.parameters]
        for part in self._parts:
            part.anchor = part.read()
        self._note_versions()

    def check_equal(self, where: str) -> None:
        if self.world.world_size > 1:
            check_weights_equal(
                self.bare, [name for part in self._parts for name in part.names], where
            )

    def epoch_values(self) -> dict[str, float]:
        sent, steps = self._epoch
        self._epoch = [0, 0]
        return {"bytes_per_step": sent / steps if steps else 0.0}

    def finish(self) -> None:
        self.collect()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        if self._optimizer is None:
            return {}
        anchors = {
            name: value for part in self._parts for name, value in part.by_name(part.anchor).items()
        }
        momentum = {
            name: value
            for part in self._parts
            if part.momentum is not None
            for name, value in part.by_name(part.momentum).items()
        }
        return {
            "workers": self.world.world_size,
            "fragments": self.fragments,
            "outer": dict(self.outer),
            "anchor": anchors,
            "momentum": momentum,
            "epoch": list(self._epoch),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return  # saved under another strategy: all begin with the weights that it saved
        before, outer = state["fragments"], state["outer"]
        if before != self.fragments:
            raise UserError(
                f"resume: the checkpoint was written with fragments={before}, each at its own "
                f"place between two exchanges; set fragments to {before}"
            )
        if outer["name"] != self.outer["name"]:
            written = outer["name"] if outer["name"] == "average" else outer
            raise UserError(
                "resume: the checkpoint was written with another outer optimizer; set outer to "
                f"{written!r}"
            )
        self._loaded, self._epoch = state, list(state["epoch"])

    def own_tensors(self) -> dict[str, torch.Tensor]:
        if self.world.world_size == 1 or self._optimizer is None:
            return {}
        found = {"seen": torch.tensor([part.seen for part in self._parts], dtype=torch.float64)}
        for number, part in enumerate(self._parts):
            kept = {"residual": part.residual}
            # Of the whole vector's length, so that the ranks' add up to it.
            if part.owed is not None:
                kept["owed"] = owed = torch.zeros_like(part.anchor)
                self._own_place(owed).copy_(part.owed)
                kept["residual"] = (
                    torch.zeros_like(part.anchor) if part.residual is None else part.residual
                )
            if not part.alike:
                own = self._aside[number] if self._aside is not None else None
                kept["weights"] = part.read() if own is None else own
            for kind, values in kept.items():
                if values is not None:
                    found |= {
                        f"{kind}/{name}": value for name, value in part.by_name(values).items()
                    }
        state = self._optimizer.state if self._own_state is None else self._own_state
        return found | own_state(state, self._optimizer)

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> bool:
        self._loaded_own = tensors
        return True


def _checked_outer(given: Any) -> dict[str, Any]:
    """The outer optimizer with all its numbers."""
    wanted = {"name": given} if isinstance(given, str) else given
    example = "{'name': 'nesterov', 'lr': 0.7, 'momentum': 0.9}"
    if not isinstance(wanted, Mapping) or wanted.get("name") not in ("average", "nesterov"):
        raise UserError(f"LocalSGD(outer={given!r}); it must be 'average' or {example}")
    options = {key: value for key, value in wanted.items() if key != "name"}
    if wanted["name"] == "average":
        if options:
            raise UserError(
                f"LocalSGD(outer={given!r}): 'average' has no options; write outer='average', or "
                f"outer={example}"
            )
        return {"name": "average"}
    unknown = [key for key in options if key not in _NESTEROV]
    if unknown:
        raise UserError(
            f"LocalSGD(outer={given!r}): 'nesterov' has no option {unknown[0]!r}; it has lr and "
            "momentum"
        )
    options = _NESTEROV | options
    bounds: dict[str, Callable[[float], bool]] = {
        "lr": lambda x: 0 < x < math.inf,
        "momentum": lambda x: 0 <= x < 1,
    }
    said = {
        "lr": "a positive number, such as 0.7",
        "momentum": "at least 0 and below 1, such as 0.9",
    }
    for key, value in options.items():
        if not is_number(value) or not bounds[key](value):
            raise UserError(f"LocalSGD(outer={given!r}): {key} must be {said[key]}")
    return {"name": "nesterov", **options}
