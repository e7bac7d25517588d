"""The parts of a store without servers that its workers hold, brought to other workers where some
are gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from allhands.comm.flat_layout import FlatLayout
from allhands.kvstore.bucket import KeyBucket
from allhands.kvstore.store_state import StoreState
from allhands.strategies.shards import (
    WEIGHT,
    Shards,
    check_none_is_missing,
    forms_of_all,
    sent_by_each,
)
from allhands.world import World

# Of a part: the keys of its bucket.
_KEYS = "keys"
# What a state's name begins with: a store has one optimizer.
_STATE = "0/"


def parts_of(buckets: Iterable[KeyBucket], workers: int) -> Shards:
    """What this worker holds of a store: by the number of workers, of the bucket and of the part,
    its keys, weights and optimizer's state.

    Args:
        buckets: in an order that is the same on all workers.
        workers: into how many parts each is cut.
    """
    found: Shards = {}
    for number, bucket in enumerate(buckets):
        for one in bucket.held:
            tensors, numbers = one.optimizer.state() if one.optimizer is not None else ({}, {})
            found[f"{workers}/{number}/{one.number}"] = _part(one.names, one.part, tensors, numbers)
    return found


def whole_of(named: Mapping[str, nn.Parameter], state: StoreState) -> Shards:
    """The same of a worker that holds all of it outside of a store."""
    return {
        f"1/{number}/0": _part(
            [name],
            parameter.detach().flatten(),
            {key: value.flatten() for key, value in state.tensors.get(name, {}).items()},
            state.numbers.get(name, {}),
        )
        for number, (name, parameter) in enumerate(named.items())
    }


def _part(
    keys: list[str],
    weights: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, float],
) -> dict[str, Any]:
    state = {f"{_STATE}{key}": value for key, value in {**tensors, **numbers}.items()}
    return {_KEYS: keys, WEIGHT: weights, **state}


def bring_parts(shards: Shards, named: Mapping[str, nn.Parameter], world: World) -> StoreState:
    """Put the weights on all ranks; all ranks call it together.

    Args:
        shards: what this rank held: of a store, or all.
        named: the parameters that were in the store.
        world: the ranks.

    Returns:
        The whole state of the optimizer, without its number of steps.

    Raises:
        WorldError: no rank has held some part.
    """
    told = forms_of_all(shards, world)
    # A rank that had not come into the store holds all, and no step was taken since it had it.
    cut_into = min((int(name.partition("/")[0]) for own in told for name in own), default=1)
    told = [
        {name: forms for name, forms in own.items() if name.startswith(f"{cut_into}/")}
        for own in told
    ]
    keys_of = {name.split("/")[1]: forms[_KEYS][0] for own in told for name, forms in own.items()}
    layouts = {
        bucket: FlatLayout({key: named[key] for key in keys}) for bucket, keys in keys_of.items()
    }
    known = {name for own in told for name in own}
    check_none_is_missing(_keys_in_parts(layouts, cut_into, known))
    parts: Shards = {}
    for found in sent_by_each(shards, told, world):
        parts |= found
    state = StoreState()
    for bucket, layout in layouts.items():
        own = [parts[f"{cut_into}/{bucket}/{number}"] for number in range(cut_into)]
        _put_together(own, layout, named, state)
    return state


def _keys_in_parts(
    layouts: Mapping[str, FlatLayout], cut_into: int, known: Collection[str]
) -> set[str]:
    """The keys of which some number lies in a part that is not known."""
    found = set()
    for bucket, layout in layouts.items():
        length = -(-layout.length // cut_into)
        gone = [n for n in range(cut_into) if f"{cut_into}/{bucket}/{n}" not in known]
        for place in layout.places:
            if any(place.start < (n + 1) * length and place.stop > n * length for n in gone):
                found.add(place.name)
    return found


def _put_together(
    parts: list[dict[str, Any]],
    layout: FlatLayout,
    named: Mapping[str, nn.Parameter],
    state: StoreState,
) -> None:
    """Put the parts of a bucket into parameters and into the state."""
    for entry, value in parts[0].items():
        if entry == _KEYS:
            continue
        name = entry.removeprefix(_STATE)
        if not isinstance(value, torch.Tensor):
            for place in layout.places:
                state.numbers.setdefault(place.name, {})[name] = value
            continue
        for key, values in layout.named(torch.cat([part[entry] for part in parts])).items():
            if entry == WEIGHT:
                with torch.no_grad():
                    named[key].copy_(values)
            else:
                state.tensors.setdefault(key, {})[name] = values
