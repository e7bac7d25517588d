"""What scripts import from ``horovod.common.util``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

from allhands.horovod.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)

Member = TypeVar("Member")
_HALVES = ("torch", "tensorflow", "keras")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether one of Horovod's halves can be used: "torch", "tensorflow" or "keras", where that is
    installed."""
    return ext_base_name in _HALVES and importlib.util.find_spec(ext_base_name) is not None


def check_extension(ext_name: str, *_: Any) -> None:
    """Raise `ImportError` for a half that cannot be used."""
    name = ext_name.removeprefix("horovod.")
    if not extension_available(name):
        raise ImportError(f"{ext_name} is not here: install {name}, or use one of {_HALVES}")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def is_iterable(value: Any) -> bool:
    """Whether a value can be iterated over."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and not num_rank & (num_rank - 1)


def split_list(values: Sequence[Member], parts: int) -> list[list[Member]]:
    """A list in so many parts, of which the first ones are one longer where they do not divide."""
    each, more = divmod(len(values), parts)
    ends = [number * each + min(number, more) for number in range(parts + 1)]
    return [list(values[first:last]) for first, last in pairwise(ends)]


__all__ = [
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]
