"""Elastic training with PyTorch: ``hvd.elastic.run``, ``TorchState``, ``ElasticSampler``."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sized
from typing import Any

import torch

from allhands.errors import UserError
from allhands.horovod import engine
from allhands.horovod.elastic import ObjectState, State, run, run_fn


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the samples that an epoch has not processed yet to the workers that there are.

    All workers get the same number; as in Horovod, some of the first remaining samples are dealt
    twice where they do not divide. The order is a function of the seed and the epoch alone.

    Args:
        dataset: anything with a length.
        shuffle: whether the order is random.
        seed: of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing is processed. To be called when one ends, not when one is taken
        up."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All workers have processed a batch of `batch_size` samples each. `batch_idx` is for
        Horovod's sake."""
        self.processed_num = min(
            self.processed_num + batch_size * self.num_replicas, len(self.dataset)
        )

    def state_dict(self) -> dict[str, int]:
        """The epoch and how far it is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """The inverse of `state_dict`, for the workers that there are now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal what is left to the workers that there are now."""
        world = engine.current().world
        self.num_replicas, self.rank = world.world_size, world.rank
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            indices = torch.randperm(len(indices), generator=generator).tolist()
        left = indices[self.processed_num :]
        self.num_samples = math.ceil(len(left) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        while left and len(left) < self.total_size:
            left += left[: self.total_size - len(left)]
        self.indices = left[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """A model, an optimizer, and whatever else a training counts: ``TorchState(model=…,
    optimizer=…, epoch=0, batch=0)``.

    Args:
        model: a torch.nn.Module, or None.
        optimizer: a torch.optim.Optimizer, or None.
        values: attributes of the state. Modules, optimizers, schedulers and samplers, which have a
            ``state_dict``, keep being the same objects; others are plain values.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: Any = None, **values: Any
    ) -> None:
        given = {
            **values,
            **{
                name: part
                for name, part in (("model", model), ("optimizer", optimizer))
                if part is not None
            },
        }
        self._parts = {name: part for name, part in given.items() if _has_state(part)}
        super().__init__(**given)

    def contents(self) -> dict[str, Any]:
        """Copies, on the devices where the values are."""
        plain = [name for name in self._names if name not in self._parts]
        copied = {name: copy.deepcopy(getattr(self, name)) for name in plain}
        return {
            **copied,
            **{name: _copied(getattr(self, name).state_dict()) for name in self._parts},
        }

    def set_contents(self, contents: dict[str, Any]) -> None:
        """Set the values, and load the parts."""
        missing = [name for name in self._parts if name not in contents]
        if missing:
            raise UserError(
                f"the commit has nothing for {missing[0]!r}: it is another script's; give all of "
                "its parts"
            )
        for name, value in contents.items():
            if name in self._parts:
                getattr(self, name).load_state_dict(_copied(value))
            else:
                setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """As `State.sync`; samplers deal what the epoch has left, on every rank."""
        super().sync()
        self.reset()

    def reset(self) -> None:
        """Deal samples anew."""
        for name in self._parts:
            if isinstance(getattr(self, name), ElasticSampler):
                getattr(self, name).reset()


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _copied(value: Any) -> Any:
    """A deep copy of a state_dict. Tensors that need gradients cannot be copied by
    copy.deepcopy."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(inner) for inner in value)
    return copy.deepcopy(value)


__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]
