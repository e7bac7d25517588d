"""Hashes of 64 bits, by the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): neighbouring
numbers get unrelated ones, the same as whole numbers and in arrays of numpy and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

#: An odd number near 2**64 / the golden ratio: what is counted with this step is spread out.
STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1
#: The same bits as int64, which torch has all operations for.
STEP_SIGNED, _FIRST_SIGNED, _SECOND_SIGNED = (n - 2**64 for n in (STEP, _FIRST, _SECOND))


def mixed(number: int) -> int:
    """Of a whole number from 0 to 2**64 - 1."""
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def mixed_array(numbers: np.ndarray, whole: bool = True) -> np.ndarray:
    """Of an array, uint64 of any shape.

    Args:
        numbers: the array.
        whole: False leaves out the last step, which the upper 31 bits do not need.
    """
    import numpy as np

    with np.errstate(over="ignore"):
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(_FIRST)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(_SECOND)
        return numbers ^ (numbers >> np.uint64(31)) if whole else numbers


def mixed_tensor(numbers: torch.Tensor) -> torch.Tensor:
    """Of a tensor, int64 of any shape. Multiplication wraps around; a shift repeats the sign."""
    numbers = (numbers ^ (numbers >> 30 & (1 << 34) - 1)) * _FIRST_SIGNED
    numbers = (numbers ^ (numbers >> 27 & (1 << 37) - 1)) * _SECOND_SIGNED
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)
