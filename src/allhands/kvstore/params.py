"""What `Trainer` is given: parameters by name, and an optimizer for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allhands.errors import UserError, kind_of
from allhands.kvstore.optimizers import OptimizerSpec, hyper, spec_from, spec_of_torch
from allhands.kvstore.replicas import Replicas
from allhands.kvstore.specs import class_of, native
from allhands.kvstore.store_state import StoreState

_FORMS = (
    "a net, what replicate() gave, a dict of parameters by name, net.named_parameters(), or "
    "net.parameters()"
)
# States that are one number also where the parameter is one number.
_NUMBERS = ("step", "eta", "mu", "mu_product")


@dataclass(frozen=True)
class Slot:
    """A parameter: its name, and the parameter on each device of this worker."""

    name: str
    replicas: list[nn.Parameter]

    @property
    def first(self) -> nn.Parameter:
        """The one that the store writes; the others are copies of it."""
        return self.replicas[0]

    def spread(self) -> None:
        """Give the first one's values to the others."""
        with torch.no_grad():
            for other in self.replicas[1:]:
                other.copy_(self.first)


def slots_of(params: Any) -> list[Slot]:
    """The parameters that are trained. Frozen ones are left out; one with two names comes once,
    under its first name.
    """
    found: dict[int, Slot] = {}
    for name, given in _named(params):
        replicas = list(given) if isinstance(given, (list, tuple)) else [given]
        if not replicas or not all(isinstance(one, nn.Parameter) for one in replicas):
            raise UserError(f"params['{name}'] is {kind_of(given)}; Trainer takes {_FORMS}")
        if any(isinstance(one, nn.parameter.UninitializedParameter) for one in replicas):
            raise UserError(
                f"'{name}' has no shape yet; call the net on one batch before you make the Trainer"
            )
        if len({(one.shape, one.dtype, one.requires_grad) for one in replicas}) > 1:
            raise UserError(
                f"the replicas of '{name}' differ in shape, dtype or requires_grad; make them with "
                "replicate(net, devices)"
            )
        if replicas[0].requires_grad:
            found.setdefault(id(replicas[0]), Slot(name, replicas))
    if not found:
        raise UserError(
            "there is no parameter to train: params is empty, or all have requires_grad=False"
        )
    slots = sorted(found.values(), key=lambda slot: slot.name)
    for before, slot in itertools.pairwise(slots):
        if before.name == slot.name:
            raise UserError(f"two parameters have the name '{slot.name}'; each needs its own")
    return slots


def _named(params: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(params, Replicas):
        return params.collect_params().items()
    if isinstance(params, nn.Module):
        return params.named_parameters()
    if isinstance(params, Mapping):
        return [(str(name), given) for name, given in params.items()]
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise UserError(f"params is {kind_of(params)}; Trainer takes {_FORMS}")
    listed = list(params)
    if any(isinstance(one, Mapping) for one in listed):
        raise UserError(
            "params is a list of dicts; for groups with options of their own, pass the net as "
            "params, and optimizer=lambda params: torch.optim.SGD([{'params': …, 'lr': …}, …])"
        )
    if listed and all(
        isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in listed
    ):
        return listed
    return [(str(position), one) for position, one in enumerate(listed)]


def build_optimizer(
    optimizer: Any, options: Mapping[str, Any], params: list[nn.Parameter]
) -> tuple[torch.optim.Optimizer, OptimizerSpec | None, UserError | None]:
    """A torch optimizer of `params`, whether it is to take the steps or only to hold the options.

    Args:
        optimizer: a name, a spec, a torch optimizer of `params`, or what makes one when it is
            called with a list of them.
        options: its options, for a name or a class.
        params: what is trained.

    Returns:
        The optimizer; what a store needs to run it; and where a store cannot, why.
    """
    if isinstance(optimizer, type):
        name = optimizer.__name__
        optimizer = (
            name
            if name != "Optimizer" and getattr(torch.optim, name, None) is optimizer
            else optimizer
        )
    if isinstance(optimizer, (str, OptimizerSpec)):
        try:
            spec = spec_from(optimizer, options)
        except UserError as error:
            only_here = _only_here(optimizer)
            if only_here is None:
                raise
            return _called(only_here, params, options), None, error
        groups = [
            {name: native(value) for name, value in group.items() if name != "multi_precision"}
            for group in spec.groups
        ]
        if len(groups) > 1:
            raise UserError(
                "the optimizer has several groups of options, and the Trainer cannot know whose "
                "they are; give it a function of the parameters that makes a torch optimizer"
            )
        return class_of(spec.name)(params, **groups[0]), spec, None
    built = (
        optimizer
        if isinstance(optimizer, torch.optim.Optimizer)
        else _called(optimizer, params, options)
    )
    if built is optimizer and options:
        raise UserError(
            f"optimizer_params {sorted(options)} were given beside a {type(optimizer).__name__}, "
            "which has its own"
        )
    ours = {id(one) for one in params}
    theirs = {id(one) for group in built.param_groups for one in group["params"]}
    if ours != theirs:
        raise UserError(
            f"the {type(built).__name__} has {len(theirs)} parameters, of which "
            f"{len(theirs - ours)} are not among the "
            f"{len(ours)} that the Trainer trains; give both the same ones (of replicas, the first)"
        )
    if isinstance(built, torch.optim.LBFGS):
        raise UserError(
            "LBFGS evaluates the loss several times in one step, which a Trainer cannot; use Adam "
            "or SGD"
        )
    try:
        return built, spec_of_torch(built)[0], None
    except UserError as error:
        return built, None, error


def _only_here(name: str | OptimizerSpec) -> Any:
    """A class of torch.optim that a store cannot run but a worker can, by its name in any case of
    letters."""
    wanted = str(name).lower().replace("_", "")
    for known in ("Adafactor", "Muon", "SparseAdam", "LBFGS"):
        if wanted == known.lower():
            return getattr(torch.optim, known, None)
    return None


def _called(
    maker: Callable[..., Any], params: list[nn.Parameter], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    if not callable(maker):
        raise UserError(
            f"optimizer is {kind_of(maker)}; write a name, such as 'adam', or a torch.optim class"
        )
    torch_names = {
        ("lr" if name == "learning_rate" else "weight_decay" if name == "wd" else name): value
        for name, value in options.items()
    }
    try:
        built = maker(params, **torch_names)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the optimizer {getattr(maker, '__name__', maker)} cannot be made with {torch_names}: "
            f"{error}"
        ) from error
    if not isinstance(built, torch.optim.Optimizer):
        raise UserError(
            f"the optimizer function gave {kind_of(built)}, not a torch.optim.Optimizer"
        )
    if isinstance(built, torch.optim.LBFGS):
        raise UserError(
            "LBFGS evaluates the loss several times in one step, which a Trainer cannot; use Adam "
            "or SGD"
        )
    return built


def learning_rate(value: Any) -> float:
    """A checked learning rate."""
    rate = float(value)
    if not (math.isfinite(rate) and rate >= 0):
        raise UserError(f"a learning rate of {value}; it must be 0 or more")
    return rate


def scheduler_of(options: dict[str, Any]) -> Callable[[int], float] | None:
    scheduler = options.pop("lr_scheduler", None)
    if scheduler is None:
        return None
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise UserError(
            "lr_scheduler is a scheduler of torch, which belongs to another optimizer; make it on "
            "trainer.optimizer"
        )
    if not callable(scheduler):
        raise UserError(
            f"lr_scheduler is {kind_of(scheduler)}; it must be a function of the step's number, "
            "such as lambda n: 0.1 / n"
        )
    rate = options.get("learning_rate", options.get("lr"))
    if rate is not None and hasattr(scheduler, "base_lr"):  # as MXNet's schedulers have
        scheduler.base_lr = rate
    elif rate is None:
        options["lr"] = learning_rate(scheduler(1))
    return scheduler


def written_spec(optimizer: torch.optim.Optimizer, spec: OptimizerSpec | None) -> OptimizerSpec:
    """The optimizer as it is now, for a file."""
    name = spec.name if spec is not None else type(optimizer).__name__.lower()
    whole = spec.groups if spec is not None else [{} for _ in optimizer.param_groups]
    return OptimizerSpec(
        name,
        tuple(
            {**all_, **hyper(group)}
            for all_, group in zip(whole, optimizer.param_groups, strict=True)
        ),
    )


def read_spec(
    optimizer: torch.optim.Optimizer, now: OptimizerSpec, saved: OptimizerSpec | None, path: Any
) -> None:
    """Set the options that may change between steps to what a file says."""
    if saved is None:
        return
    if saved.name != now.name or len(saved.groups) != len(now.groups):
        raise UserError(
            f"{path} has the state of '{saved.name}' with {len(saved.groups)} groups, and this "
            f"Trainer's optimizer is '{now.name}' with {len(now.groups)}"
        )
    for group, values in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update(
            {name: native(value) for name, value in values.items() if name in hyper(group)}
        )


def state_of(optimizer: torch.optim.Optimizer, slots: Iterable[Slot], step: int) -> StoreState:
    """The state of an optimizer that runs in this worker."""
    state = StoreState(step)
    for slot in slots:
        for name, value in optimizer.state.get(slot.first, {}).items():
            if value is None:
                continue
            if isinstance(value, torch.Tensor) and (
                value.dim() or (not slot.first.dim() and name not in _NUMBERS)
            ):
                state.tensors.setdefault(slot.name, {})[name] = value.detach().cpu()
            else:
                state.numbers.setdefault(slot.name, {})[name] = float(value)
    return state


def load_into(optimizer: torch.optim.Optimizer, slots: Iterable[Slot], state: StoreState) -> None:
    """Continue from a state with an optimizer that runs in this worker."""
    by_name = {slot.name: slot.first for slot in slots}
    for name in sorted({*state.tensors, *state.numbers} - by_name.keys()):
        raise UserError(f"the state is of a parameter '{name}', which this Trainer does not train")
    for name in state.tensors:
        if "master" in state.tensors[name]:
            raise UserError(
                f"the state of '{name}' has a float32 copy of the weights (multi_precision), which "
                "needs update_on_kvstore=True"
            )
    for name, param in by_name.items():
        tensors = {
            what: value.to(param.device, copy=True)
            for what, value in state.tensors.get(name, {}).items()
        }
        numbers = {
            what: torch.tensor(value, dtype=torch.float32)
            for what, value in state.numbers.get(name, {}).items()
        }
        optimizer.state.pop(param, None)
        if tensors or numbers:
            optimizer.state[param] = {**tensors, **numbers}
