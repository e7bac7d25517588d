"""Optimizers of a store: a name and options that can travel (`OptimizerSpec`), and the update of
one chunk (`ChunkOptimizer`).

The update is torch's, and so are the defaults of options that are left out, also beside those given
under MXNet's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from allhands.errors import UserError
from allhands.kvstore.specs import (
    CLASSES,
    HOW,
    REFUSED,
    OptimizerSpec,
    build,
    changeable,
    changed,
    class_of,
    complete,
    defaults_of,
    known_optimizers,
    layout_of,
    name_of,
    native,
    plain,
)
from allhands.step.update import update_function

__all__ = [
    "ChunkOptimizer",
    "OptimizerSpec",
    "create",
    "hyper",
    "known_optimizers",
    "spec_from",
    "spec_of_torch",
]

_FROM_MXNET = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "epsilon": "eps",
    "gamma1": "alpha",
    "gamma2": "momentum",
    "schedule_decay": "momentum_decay",
}
_NOT_FROM_MXNET = {
    "lr_scheduler": "the learning rate travels with each step: call set_learning_rate(lr) before "
    "it, or use a torch scheduler",
    "rescale_grad": "gradients are weighed by their samples: write step(batch_size), or push(key, "
    "grad, weight=samples)",
    "clip_gradient": "clamp the gradients before they are pushed: grad.clamp_(-bound, bound)",
    "param_idx2name": "keys are names here; leave it out",
    "param_dict": "keys are names here; leave it out",
    "sym": "there are no symbols here; leave it out",
    "begin_num_update": "load the optimizer's state to go on from a step",
    "aggregate_num": "each key is updated by itself; leave it out",
    "use_fused_step": "leave it out",
}


def create(name: str, **options: Any) -> OptimizerSpec:
    """An optimizer by name: ``create("adam", lr=0.001)``. Options have torch's names or MXNet's.

    Raises:
        UserError: no such optimizer or option, or a value out of range.
    """
    return spec_from(name, options)


def spec_from(
    optimizer: str | OptimizerSpec | torch.optim.Optimizer, options: Mapping[str, Any] | None = None
) -> OptimizerSpec:
    """The checked, complete form of an optimizer.

    Args:
        optimizer: a name ("sgd", "adam", "nag", …), a spec, or a torch optimizer with one group
            that has taken no step.
        options: for a name only: its options, under torch's names or MXNet's (``learning_rate``,
            ``wd``, ``beta1``, …).
    """
    if isinstance(optimizer, str):
        return _named(optimizer, options or {})
    what = type(optimizer).__name__
    if options:
        raise UserError(
            f"options {sorted(options)} were given beside {what}, which has its own; give them to "
            "one of both"
        )
    if isinstance(optimizer, OptimizerSpec):
        name = name_of(optimizer.name)
        if not optimizer.groups:
            raise UserError(
                f"the optimizer '{name}' has no group of options; write create('{name}', lr=…)"
            )
        return OptimizerSpec(name, tuple(complete(name, group) for group in optimizer.groups))
    if isinstance(optimizer, torch.optim.Optimizer):
        spec, _ = spec_of_torch(optimizer)
        if len(spec.groups) > 1:
            raise UserError(
                f"the {what} has {len(spec.groups)} groups, and the store cannot know which keys "
                "belong to which; give it to Trainer, or set an optimizer with one group"
            )
        if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state):
            raise UserError(
                f"the {what} has taken steps, and its state would be lost; give a new one, then "
                "load_optimizer_states"
            )
        return spec
    raise UserError(
        f"{optimizer!r} is no optimizer; write a name ({', '.join(known_optimizers())}) or a "
        "torch.optim optimizer"
    )


def spec_of_torch(
    optimizer: torch.optim.Optimizer,
) -> tuple[OptimizerSpec, list[list[torch.nn.Parameter]]]:
    """A torch optimizer's options and parameters, group by group. Its state is not looked at.

    ``foreach`` is dropped: it changes how fast an update is, not what it is.
    """
    cls = type(optimizer)
    name = next((name for name in CLASSES if CLASSES[name] is cls), None)
    if name is None:
        name = next((known for known in known_optimizers() if class_of(known) is cls), None)
    if name is None:
        if cls.__name__.lower() in REFUSED:
            name_of(cls.__name__)
        raise UserError(
            f"{cls.__module__}.{cls.__name__} is no optimizer that a store knows "
            f"({', '.join(known_optimizers())}); it can "
            "run it once an entry point of the group 'allhands.optimizers' names the class"
        )
    groups = []
    for group in optimizer.param_groups:
        for flag in HOW[1:]:
            if group.get(flag):
                raise UserError(
                    f"{cls.__name__}(…, {flag}=True): a store updates with torch's plain loop; "
                    f"leave {flag} out"
                )
        groups.append(
            complete(
                name, {option: group[option] for option in defaults_of(name) if option in group}
            )
        )
    return OptimizerSpec(name, tuple(groups)), [
        list(group["params"]) for group in optimizer.param_groups
    ]


def hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a torch optimizer's group that may change between steps (lr, momentum, betas,
    …), as JSON has them.

    What a scheduler keeps there for itself (``initial_lr``) is left out.
    """
    known = frozenset[str]().union(*(changeable(name) for name in CLASSES))
    return {name: plain(value) for name, value in group.items() if name in known}


def _named(given: str, options: Mapping[str, Any]) -> OptimizerSpec:
    nag = given.lower() == "nag"
    name = "sgd" if nag else name_of(given)
    defaults = defaults_of(name)
    # Nesterov's momentum with a momentum of 0 is none; MXNet's default is this.
    under_torch: dict[str, Any] = {"nesterov": True, "momentum": 0.9} if nag else {}
    betas: dict[int, Any] = {}
    seen: dict[str, str] = {}
    for option, value in options.items():
        if option in _NOT_FROM_MXNET:
            raise UserError(
                f"the option '{option}' of '{given}' cannot be set: {_NOT_FROM_MXNET[option]}"
            )
        if option in HOW:
            raise UserError(
                f"the option '{option}' of '{given}' cannot be set: a store updates with torch's "
                "plain loop; leave it out"
            )
        if option == "lazy_update":
            if value is not True:
                raise UserError(
                    "lazy_update=False: rows of a RowSparse key are updated only when they are "
                    "touched; leave it out"
                )
            continue
        target = option if option in defaults else _FROM_MXNET.get(option, option)
        if "betas" in defaults and option in ("beta1", "beta2"):
            if "betas" in seen.values():
                raise UserError(
                    f"'betas' and '{option}' of '{given}' are the same option; give one of them"
                )
            betas[int(option[-1]) - 1] = value
        elif target in seen or (target == "betas" and betas):
            other = seen.get(target, "beta1 or beta2")
            raise UserError(
                f"'{other}' and '{option}' of '{given}' are the same option; give one of them"
            )
        else:
            under_torch[target] = value
            seen[target] = option
    if betas:
        under_torch["betas"] = [
            betas.get(place, default) for place, default in enumerate(defaults["betas"])
        ]
    return OptimizerSpec(name, (complete(name, under_torch),))


class ChunkOptimizer:
    """The optimizer of one chunk: torch's own class over one 1-D tensor.

    Cut a parameter as you like: the numbers are those of torch's plain loop (``foreach=False,
    fused=False``) over the whole.

    Args:
        spec: what `spec_from` gave.
        group: which of its groups.
        weights: 1-D, updated in place.
    """

    def __init__(self, spec: OptimizerSpec, group: int, weights: torch.Tensor) -> None:
        if weights.dim() != 1:
            raise UserError(f"a chunk is a 1-D tensor, not one of shape {list(weights.shape)}")
        options = dict(spec.groups[group])
        self.name = spec.name
        self.weights = weights
        narrow = weights.dtype in (torch.float16, torch.bfloat16)
        self._master = (
            weights.detach().float() if options.pop("multi_precision", False) and narrow else None
        )
        # Another tensor on the same memory: its `.grad` is nobody else's.
        self._param = (weights if self._master is None else self._master).detach()
        self._options = options
        self._last: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._optimizer = build(self.name, [self._param], self._options)
        self._update = update_function(self._optimizer)

    def step(self, grad: torch.Tensor, options: Mapping[str, Any] | None = None) -> None:
        """Take one step.

        Args:
            grad: of the weights' shape; converted to the type that is updated. It is not changed.
            options: numbers of the group from this step on, under torch's names: ``{"lr": 0.01}``.

        Raises:
            UserError: another shape, or an option that does not exist, cannot change or is out of
                range.
        """
        if grad.shape != self.weights.shape:
            raise UserError(
                f"a gradient of shape {list(grad.shape)} for a chunk of shape "
                f"{list(self.weights.shape)}"
            )
        if options and options != self._last:
            new = changed(self.name, self._options, options)
            state = self._optimizer.state.get(self._param)
            if (
                state
                and self.name == "rmsprop"
                and new["momentum"] > 0
                and "momentum_buffer" not in state
            ):
                raise UserError(
                    "rmsprop began with momentum 0 and cannot get one later; set it from the start"
                )
            self._options, self._last = new, dict(options)
            self._optimizer.param_groups[0].update({name: native(new[name]) for name in options})
        self._param.grad = grad.detach().to(self._param.dtype)
        try:
            self._update()
        finally:
            self._param.grad = None
        if self._master is not None:
            self.weights.copy_(self._master)

    def options(self) -> dict[str, Any]:
        """The numbers of the group as they are now, under torch's names."""
        return self._options

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Go on with numbers that `options` gave, before `load_state`."""
        self._options, self._last = dict(options), {}
        self._begin()

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The state by name: tensors of the weights' shape (not copies), and numbers such as
        "step".

        With ``multi_precision``, "master" is the float32 copy of 16-bit weights. Before the first
        step there may be nothing else.
        """
        tensors: dict[str, torch.Tensor] = {} if self._master is None else {"master": self._master}
        single: dict[str, float] = {}
        for name, value in self._optimizer.state.get(self._param, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                tensors[name] = value
            elif value is not None:
                single[name] = float(value)
        return tensors, single

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, float]) -> None:
        """Continue from what `state` gave, cut in any way. Values are copied.

        With ``multi_precision``, the weights become the rounded "master"; without one, it is made
        from the weights. Empty mappings bring back the beginning.

        Raises:
            UserError: a state is missing, unknown, or of another shape.
        """
        if "master" in tensors and self._master is None:
            raise UserError(
                f"the state has a 'master' copy, but {self.weights.dtype} weights of this "
                "optimizer have none"
            )
        for name, value in tensors.items():
            if value.shape != self.weights.shape:
                raise UserError(
                    f"the state '{name}' has shape {list(value.shape)}; the chunk has "
                    f"{list(self.weights.shape)}"
                )
        state = self._check(
            {name: value for name, value in tensors.items() if name != "master"}, numbers
        )
        if self._master is not None:
            self._master.copy_(tensors.get("master", self.weights))
            self.weights.copy_(self._master)
        self._begin()  # some optimizers make their first state when they are built, and only then
        if state:
            self._optimizer.state[self._param] = state

    def _check(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, float]
    ) -> dict[str, Any]:
        if not tensors and not numbers:
            return {}
        layout = {**layout_of(self.name, self._options)}
        # A momentum that was 0 for a while, or is now, lacks or leaves this one.
        wanted = set(layout) - {"momentum_buffer"}
        if self.name in ("sgd", "rmsprop"):
            layout["momentum_buffer"] = None
        found = set(tensors) | set(numbers)
        if wanted - found or found - set(layout):
            raise UserError(
                f"the optimizer '{self.name}' with these options keeps {sorted(layout)}, but the "
                f"state has {sorted(found)}"
            )
        state: dict[str, Any] = {}
        for name in sorted(found):
            kind = layout[name]
            if name not in (tensors if kind is None else numbers):
                raise UserError(
                    f"the state '{name}' of '{self.name}' must be "
                    f"{'a tensor' if kind is None else 'a number'}"
                )
            if kind is None:
                state[name] = (
                    tensors[name]
                    .detach()
                    .to(self._param.device, self._param.dtype, copy=True)
                    .contiguous()
                )
            elif isinstance(kind, torch.dtype):
                state[name] = torch.tensor(numbers[name], dtype=kind)
            else:
                state[name] = kind(numbers[name])
        return state
