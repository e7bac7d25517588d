"""The parts of an optimizer's state that ranks hold, brought to other ranks where some are gone."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn, optim

from allhands.comm import all_gather_text, broadcast_bytes, broadcast_new, calls
from allhands.errors import WorldError
from allhands.strategies.optimizer_means import home_of
from allhands.world import World

WEIGHT = "weight"
#: By the parameter's name: its weight as `WEIGHT`, and entries of its state by the number of the
#: optimizer among those that work together, and their own name.
Shards = dict[str, dict[str, Any]]
#: What the start of an elastic training says where this is so.
KEPT_TWICE = (
    "--elastic: each part of the optimizer's state is on two workers, which both update it; a loss "
    "of both at once ends the training"
)


def working_together(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """An optimizer, and those that it holds in its attributes, as a Lookahead does, and those that
    they hold."""
    found = [optimizer]
    for value in vars(optimizer).values():
        if isinstance(value, optim.Optimizer) and value is not optimizer:
            found += working_together(value)
    return found


def taken(optimizer: optim.Optimizer, named: Mapping[str, nn.Parameter]) -> Shards:
    """Take the state of parameters out of their optimizer, which has none then."""
    found: Shards = {}
    together = working_together(optimizer)
    for name, parameter in named.items():
        found[name] = {WEIGHT: parameter.detach().clone()}
        for number, each in enumerate(together):
            for key, value in each.state.get(parameter, {}).items():
                found[name][f"{number}/{key}"] = value
    for each in together:
        each.state.clear()
    return found


def bring_shards(
    shards: Shards, model: nn.Module, optimizer: optim.Optimizer, world: World
) -> None:
    """Put the weights on all ranks, and the state of each parameter where its optimizer is now; all
    ranks call it together.

    Args:
        shards: what this rank held before.
        model: has the plain parameters.
        optimizer: is over those that this rank updates now, and has no state of them.
        world: the ranks.

    Raises:
        WorldError: no rank has held some parameter's state.
    """
    told = forms_of_all(shards, world)
    parameters = dict(model.named_parameters())
    known = {name for own in told for name in own}
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    here = {id(p) for p in updated}
    names = {id(p): name for name, p in parameters.items()}
    missing = sorted({names[id(p)] for p in updated} - known)
    lacking = (json.loads(text) for text in all_gather_text(json.dumps(missing), world))
    check_none_is_missing({name for own in lacking for name in own})
    for found in sent_by_each(shards, told, world):
        own_state = {
            name: entries if id(parameters[name]) in here else {WEIGHT: entries[WEIGHT]}
            for name, entries in found.items()
        }
        put(own_state, parameters, optimizer)


def forms_of_all(shards: Shards, world: World) -> list[dict[str, dict[str, list[Any]]]]:
    """The forms of what each rank holds, on all ranks, which call it together."""
    calls.note("bringing over parts of the optimizer's state")
    mine = json.dumps({name: _forms(entries) for name, entries in shards.items()})
    return [json.loads(text) for text in all_gather_text(mine, world)]


def sent_by_each(
    shards: Shards, told: list[dict[str, dict[str, list[Any]]]], world: World
) -> Iterator[Shards]:
    """On all ranks: what each has that none before it has.

    Args:
        shards: what this rank holds.
        told: what `forms_of_all` gave, or some of it on all ranks.
        world: the ranks.
    """
    for rank, own in enumerate(told):
        mine = {
            name: entries
            for name, entries in own.items()
            if not any(name in before for before in told[:rank])
        }
        yield _sent(shards if rank == world.rank else None, mine, world, rank)


def copied(shards: Shards, source: int, world: World, group: Any) -> Shards:
    """Rank `source`'s parts on all ranks of a group, which call it together."""
    calls.note("bringing over parts of the model and the optimizer's state")
    told = json.dumps({name: _forms(entries) for name, entries in shards.items()})
    forms = json.loads(broadcast_bytes(told.encode(), world, source, group))
    return _sent(shards if world.rank == source else None, forms, world, source, group)


def put(shards: Shards, targets: Mapping[str, torch.Tensor], optimizer: optim.Optimizer) -> None:
    """Put weights into tensors of these names, and the state of parameters into the optimizer that
    is over them."""
    together = working_together(optimizer)
    for name, entries in shards.items():
        target = targets[name]
        with torch.no_grad():
            target.detach().copy_(entries[WEIGHT])
        for key, value in entries.items():
            if key == WEIGHT:
                continue
            number, _, entry = key.partition("/")
            if isinstance(value, torch.Tensor):
                home = home_of(optimizer, target, value)  # type: ignore[arg-type]
                value = value.to(home, copy=True)  # noqa: PLW2901
            together[int(number)].state[target][entry] = value


def _sent(
    given: Shards | None,
    forms: Mapping[str, Mapping[str, Any]],
    world: World,
    source: int,
    group: Any = None,
) -> Shards:
    """The parts that rank `source` has `given`, of these forms, on all ranks of a group."""
    keys = [(name, key) for name, own in forms.items() for key in own if len(own[key]) == 2]
    shapes = [(forms[n][key][0], getattr(torch, forms[n][key][1])) for n, key in keys]
    tensors = None if given is None else [given[name][key] for name, key in keys]
    found: Shards = {
        name: {key: form[0] for key, form in own.items() if len(form) == 1}
        for name, own in forms.items()
    }
    sent = broadcast_new(tensors, shapes, world, source, group)
    for (name, key), tensor in zip(keys, sent, strict=True):
        found[name][key] = tensor
    return found


def _forms(entries: dict[str, Any]) -> dict[str, list[Any]]:
    """Shape and dtype of each tensor, and what is no tensor as it is."""
    return {
        key: [list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, torch.Tensor)
        else [value]
        for key, value in entries.items()
    }


def check_none_is_missing(names: Collection[str]) -> None:
    """Raise `WorldError` where there are parameters whose state is gone; all ranks know which."""
    if missing := sorted(names):
        more = f" and {len(missing) - 1} more parameters" if len(missing) > 1 else ""
        raise WorldError(
            "workers that keep the same part of the optimizer's state were lost at once, and with "
            f"them that of '{missing[0]}'{more}. Write --max-restarts, and logdir= and "
            "resume='auto', so that all workers start again from the newest checkpoint"
        )
