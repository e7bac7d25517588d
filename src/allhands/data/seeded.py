"""Random draws in a data set (augmentation): a function of the seed, the loader, the epoch and the
sample's place in it.

So they do not depend on the number of workers or loader processes, on what was read ahead, or on
where the training was interrupted, and the same sample is augmented differently in each epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from allhands.data.random import get_states, set_states
from allhands.split_mix import STEP, mixed

# What the batch sampler hands out: (seed of the epoch, position of the first sample in the epoch's
# order, sample indices).
Request = tuple[int, int, Sequence[int]]

_MASK = (1 << 64) - 1


class SeededDataset(Dataset[Any]):
    """The user's data set, with the global generators of torch, numpy and random seeded before each
    sample.

    A data set that fetches whole batches (``__getitems__``) is asked for whole batches, and seeded
    once for each. Attributes are those of the user's data set, for a ``worker_init_fn`` that
    reaches for them.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: Request) -> list[Any]:
        seed, first, indices = request
        dataset = self._dataset
        with _TorchGeneratorKept():
            fetch = getattr(dataset, "__getitems__", None)
            if fetch is not None:
                seed_sample(seed, first)
                samples = SeededBatch(seed, first, fetch(list(indices)))
            else:
                samples = SeededBatch(seed, first)
                for position, index in enumerate(indices, first):
                    # Measured on one core of an AMD EPYC, on tensors in memory: 345 us a batch of
                    # 32 samples, and 100 us without seeds. Of those 8 us a sample, random takes 4,
                    # numpy 1.6 and torch 1.1.
                    seed_sample(seed, position)
                    samples.append(dataset[index])
        return samples

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by pickle before there is a data set
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_dataset"], name, value)


def seeded_collate(collate: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """The user's collate function, seeded for each batch; one that mixes samples draws the same
    wherever it runs."""
    return None if collate is None or collate is default_collate else _SeededCollate(collate)


class _SeededCollate:
    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        with _TorchGeneratorKept():
            seed_sample(samples.seed ^ _MASK >> 1, samples.first)
            return self.collate(list(samples))


class SeededBatch(list[Any]):
    """A batch's samples, with the seed of the epoch and the position of the first one in it."""

    def __init__(self, seed: int, first: int, samples: Iterable[Any] = ()) -> None:
        super().__init__(samples)
        self.seed = seed
        self.first = first


class StreamGenerators:
    """The global generators while a stream is read: it goes on drawing where it left off, whoever
    draws in between.

    Without this, a stream that is read in the training's own process would take turns with dropout,
    and a training that was resumed would read another stream. An exchange of all states takes 0.2
    ms, mostly numpy's, for each optimizer step; in a loader process where only the stream draws,
    there is none.
    """

    def __init__(self, seed: int, alone: bool) -> None:
        self.alone = alone
        outside = get_states()
        seed_sample(seed, 0)
        self._inside = get_states()
        if not alone:
            set_states(outside)

    def __enter__(self) -> None:
        if not self.alone:
            self._outside = get_states()
            set_states(self._inside)

    def __exit__(self, *_: object) -> None:
        if not self.alone:
            self._inside = get_states()
            set_states(self._outside)


class _TorchGeneratorKept:
    """In the training's own process, torch's generator also makes dropout's masks, and is put back.

    numpy and random stay where the last sample leaves them: that is a place which depends on
    nothing else either, and saving numpy's state takes ten times as long as seeding it.
    """

    def __enter__(self) -> None:
        self.state = torch.get_rng_state() if get_worker_info() is None else None

    def __exit__(self, *_: object) -> None:
        if self.state is not None:
            torch.set_rng_state(self.state)


def seed_sample(seed: int, position: int) -> None:
    """Seed torch (the processor's generator), numpy and random for one position of an epoch."""
    of_sample = mixed((seed + position * STEP) & _MASK)
    # torch.manual_seed would take a hundred times as long.
    torch.default_generator.manual_seed(of_sample >> 1)
    np.random.seed(of_sample & 0xFFFFFFFF)
    random.seed(of_sample)
