"""The optimizer's state of a store: as one process would have it, and in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file

from allhands.atomic_write import atomic_write
from allhands.errors import UserError
from allhands.kvstore.optimizers import OptimizerSpec

_FORMAT = "allhands optimizer states 1"


@dataclass
class StoreState:
    """The optimizer's state of a store.

    Attributes:
        step: optimizer steps taken.
        tensors: by key, then by the name of the state ("exp_avg"), in the key's own shape; for a
            `RowSparse` key, also "ids" (int64, shape [n]) and "rows" (shape [n, columns]), and
            states of shape [n, columns].
        numbers: by key, then by name: states that are one number, such as Adam's "step".
    """

    step: int = 0
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)


def write_states(
    path: str | os.PathLike[str], state: StoreState, spec: OptimizerSpec | None
) -> None:
    """Write `state` into one safetensors file, which appears whole or not at all."""
    target = Path(path)
    # Names of states hold no tab; keys may hold anything else.
    tensors = {
        f"{name}\t{key}": value
        for key, values in state.tensors.items()
        for name, value in values.items()
    }
    about: dict[str, Any] = {"format": _FORMAT, "step": state.step, "numbers": state.numbers}
    if spec is not None:
        about["optimizer"] = {"name": spec.name, "groups": spec.groups}
    write_file(target, about, tensors)


def write_file(target: Path, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, and what is none, into one safetensors file, which appears whole or not at
    all."""
    with atomic_write(target) as aside:
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            aside,
            {"allhands": json.dumps(about)},
        )
        with aside.open("rb") as written:
            os.fsync(written.fileno())


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What `write_file` wrote; in another safetensors file there are only tensors.

    Raises:
        OSError, SafetensorError, ValueError: there is no such file, or it is damaged.
    """
    with safe_open(os.fspath(path), "pt") as file:
        about = json.loads((file.metadata() or {}).get("allhands", "{}"))
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_states(path: str | os.PathLike[str]) -> tuple[StoreState, OptimizerSpec | None]:
    """What `write_states` wrote."""
    try:
        about, tensors = read_file(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path} is damaged, or no file of optimizer states: {error}") from error
    if about.get("format") != _FORMAT:
        raise UserError(f"{path} was not written by save_optimizer_states")
    state = StoreState(about["step"], {}, about["numbers"])
    for name, value in tensors.items():
        what, key = name.split("\t", 1)
        state.tensors.setdefault(key, {})[what] = value
    told = about.get("optimizer")
    return state, OptimizerSpec(told["name"], tuple(told["groups"])) if told else None


def pack_state(state: StoreState) -> bytes:
    """`state` as bytes, to be sent; `unpack_state` is the way back."""
    names = [(key, what) for key, values in state.tensors.items() for what in values]
    about = json.dumps([state.step, state.numbers, names]).encode()
    tensors = {
        str(number): state.tensors[key][what].contiguous()
        for number, (key, what) in enumerate(names)
    }
    return len(about).to_bytes(8) + about + save(tensors)


def unpack_state(data: bytes) -> StoreState:
    """What `pack_state` was given."""
    end = 8 + int.from_bytes(data[:8])
    step, numbers, names = json.loads(data[8:end])
    state, tensors = StoreState(step, {}, numbers), load(data[end:])
    for number, (key, what) in enumerate(names):
        state.tensors.setdefault(key, {})[what] = tensors[str(number)]
    return state


def part_of(state: StoreState, wanted: Callable[[str], bool]) -> StoreState:
    """The state of those keys alone."""
    return StoreState(
        state.step,
        {name: value for name, value in state.tensors.items() if wanted(name)},
        {name: value for name, value in state.numbers.items() if wanted(name)},
    )
