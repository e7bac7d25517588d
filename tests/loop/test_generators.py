"""Generator states as tensors: every generator goes on where it was."""

from __future__ import annotations

import random

import numpy as np
import torch

from allhands.data import preserved_generators, seed_everything
from allhands.loop.generators import generator_states, set_generator_states


def draws() -> list[float]:
    return [
        float(torch.rand(())),
        float(torch.randn(3).sum()),
        float(np.random.rand()),
        float(np.random.normal()),
        random.random(),
        random.gauss(0, 1),
    ]


def test_every_generator_goes_on_where_it_was() -> None:
    with preserved_generators():
        seed_everything(3)
        draws()  # leaves half of a pair of normal numbers in numpy and in random
        states = {name: value.clone() for name, value in generator_states().items()}
        following = draws()
        draws()
        set_generator_states(states)
        assert draws() == following


def test_states_are_tensors_that_a_checkpoint_can_hold() -> None:
    assert all(
        isinstance(value, torch.Tensor) and value.dtype != torch.bool
        for value in generator_states().values()
    )
