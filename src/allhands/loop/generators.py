"""The states of the global random generators as tensors, so that a checkpoint can hold them."""

from __future__ import annotations

import math
import random

import numpy as np
import torch


def generator_states() -> dict[str, torch.Tensor]:
    """torch (the processor's, and that of the current GPU once CUDA is in use), numpy and
    random."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, following = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy-rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "random": torch.tensor(words, dtype=torch.int64),
        "random-rest": torch.tensor(
            [version, float("nan") if following is None else following], dtype=torch.float64
        ),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def have_drawn(before: dict[str, torch.Tensor]) -> bool:
    """Whether one of the generators has drawn since `generator_states` gave `before`."""
    after = generator_states()
    return any(
        not torch.equal(state.nan_to_num(), after[name].nan_to_num())
        for name, state in before.items()
    )


def set_generator_states(states: dict[str, torch.Tensor]) -> None:
    """Continue from what `generator_states` gave."""
    torch.set_rng_state(states["torch"])
    position, has_gauss, gauss = states["numpy-rest"].tolist()
    np.random.set_state(
        ("MT19937", states["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), gauss)
    )
    version, following = states["random-rest"].tolist()
    random.setstate(
        (
            int(version),
            tuple(states["random"].tolist()),
            None if math.isnan(following) else following,
        )
    )
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
