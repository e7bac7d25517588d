"""The workers' own optimizer states under `local_sgd`: their mean, for what all share, and each
one's, for its checkpoint."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from allhands.comm import all_gather_text, all_reduce_sum, broadcast_tensors
from allhands.world import World

State = Any  # torch's: {parameter: {key: tensor or number}}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """In the order in which the optimizer's state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def mean_state(
    optimizer: torch.optim.Optimizer, world: World, states: Sequence[State] | None = None
) -> tuple[State, int]:
    """The mean of the ranks' optimizer states, a new state that all ranks hold alike; and the bytes
    that this rank has sent.

    Floating-point tensors are averaged over the ranks that have them; counters and all else are
    rank 0's, which never is a rank without samples. What rank 0 does not have is left out.

    Args:
        optimizer: has the parameters.
        world: the ranks.
        states: this rank's, where it has not one but several, or none; the mean is over all.
    """
    states = [optimizer.state] if states is None else states
    first = states[0] if states else {}
    parameters = parameters_of(optimizer)
    entries: list[list[Any]] = []
    for number, parameter in enumerate(parameters):
        for key, value in first.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                entries.append(
                    [
                        number,
                        key,
                        _kind(value),
                        list(value.shape),
                        str(value.dtype).removeprefix("torch."),
                    ]
                )
            elif isinstance(value, torch.Tensor):
                entries.append(
                    [number, key, "counter", value.item(), str(value.dtype).removeprefix("torch.")]
                )
            else:
                entries.append([number, key, "plain", value, ""])
    text = all_gather_text(json.dumps(entries), world)[0]
    known = json.loads(text)
    large: dict[str, list[torch.Tensor]] = {"mean": [], "rank 0": []}
    held = []
    state: State = defaultdict(dict)
    for number, key, kind, value, dtype in known:
        parameter = parameters[number]
        own = first.get(parameter, {}).get(key)
        if kind == "plain":
            state[parameter][key] = value
        elif kind == "counter":
            made = torch.tensor(value, dtype=getattr(torch, dtype), device="cpu")
            state[parameter][key] = made.to(
                own.device if own is not None else home_of(optimizer, parameter, made)
            )
        else:
            there = [
                one
                for one in (each.get(parameter, {}).get(key) for each in states)
                if one is not None
                and list(one.shape) == value
                and str(one.dtype) == f"torch.{dtype}"
            ]
            made = torch.zeros(value, dtype=getattr(torch, dtype), device=parameter.device)
            if there:
                made = there[0].detach().clone()
                for one in there[1:] if kind == "mean" else ():
                    made += one.detach()
            state[parameter][key] = made
            large[kind].append(made)
            held += [float(len(there))] * (kind == "mean")
    holders = torch.tensor(held, device=world.device)
    if held:
        all_reduce_sum([holders], world)
        all_reduce_sum(large["mean"], world)
    broadcast_tensors(large["rank 0"], world)
    for made, ranks in zip(large["mean"], holders.tolist(), strict=True):
        made.div_(ranks)
    size = world.world_size
    summed = sum(made.nbytes for made in large["mean"])
    told = sum(made.nbytes for made in large["rank 0"])
    return state, 2 * (size - 1) * summed // size + (told if world.rank == 0 else 0) + (
        size - 1
    ) * len(text)


def _kind(value: torch.Tensor) -> str:
    return "mean" if value.is_floating_point() else "rank 0"


def home_of(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, value: torch.Tensor
) -> torch.device:
    """Where torch keeps this tensor of a state: counters stay on the processor, unless a kernel
    reads them."""
    group = next(
        group for group in optimizer.param_groups if any(p is parameter for p in group["params"])
    )
    on_device = value.dim() > 0 or group.get("capturable") or group.get("fused")
    return parameter.device if on_device else torch.device("cpu")


def own_state(state: State, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """One rank's state as tensors by name, for its part of a checkpoint; Python's numbers become
    tensors, too."""
    found = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer/{number}/{key}"] = value.detach()
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                found[f"number/{number}/{key}"] = torch.tensor(value, dtype=dtype)
    return found


def take_own_state(tensors: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> State:
    """The state that `own_state` took apart; what it did not hold, as flags, is that of the
    optimizer."""
    parameters = parameters_of(optimizer)
    state: State = defaultdict(dict)
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in ("optimizer", "number"):
            continue
        number, _, key = rest.partition("/")
        parameter = parameters[int(number)]
        if parameter not in state:
            others = optimizer.state.get(parameter, {}).items()
            state[parameter] = {k: v for k, v in others if v is None or isinstance(v, (bool, str))}
        there = optimizer.state.get(parameter, {}).get(key)
        if isinstance(there, torch.Tensor):
            home = there.device
        else:
            home = home_of(optimizer, parameter, value)
        state[parameter][key] = value.item() if kind == "number" else value.to(home, copy=True)
    return state
