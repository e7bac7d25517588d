"""Random streams, each a function of (seed, purpose, …) and of nothing else.

Global generators are seeded from here only for the time of a training and put back afterwards, so
that a library call never changes what the user's own code draws next.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, for example ``derive_seed(42, "order", "train", epoch)``.

    Hashing keeps the streams of neighbouring seeds, epochs and ranks independent; adding numbers
    would let (seed 1, epoch 0) meet (seed 0, epoch 1).
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in (int(seed), *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (every device), numpy and random."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # torch.manual_seed keeps a stack trace for each kind of device, which takes a hundred times
        # as long.
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def get_states() -> tuple[Any, Any, Any]:
    """Where the processor's global generators of torch, numpy and random are."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_states(states: tuple[Any, Any, Any]) -> None:
    """Put the global generators where `get_states` found them."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the global generators of torch, numpy and random as they were found."""
    states = get_states()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        set_states(states)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
