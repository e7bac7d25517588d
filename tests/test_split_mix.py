"""One hash for Python's numbers, numpy's and torch's."""

from __future__ import annotations

import random

import numpy as np
import torch

from allhands.split_mix import STEP, STEP_SIGNED, mixed, mixed_array, mixed_tensor


def test_the_hash_is_that_of_split_mix() -> None:
    # The first numbers of the generator with seed 1234567, as its authors' program prints them.
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mixed((1234567 + n * STEP) % 2**64) for n in (1, 2, 3)] == first
    assert STEP_SIGNED % 2**64 == STEP


def test_arrays_and_tensors_have_the_same_bits() -> None:
    drawn = random.Random(5)
    numbers = [0, 1, 2**63, 2**64 - 1, *(drawn.getrandbits(64) for _ in range(200))]
    expected = np.array([mixed(number) for number in numbers], dtype=np.uint64)
    array = np.array(numbers, dtype=np.uint64)
    assert (mixed_array(array) == expected).all()
    assert (mixed_array(array.reshape(2, -1)) == expected.reshape(2, -1)).all()
    tensor = torch.from_numpy(array.view(np.int64))
    assert (mixed_tensor(tensor).numpy().view(np.uint64) == expected).all()
    part = mixed_array(array, whole=False)
    assert (part >> np.uint64(33) == expected >> np.uint64(33)).all()
