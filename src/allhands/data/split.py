"""Streams that are split by rank already: each rank's own stream is its share."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from allhands.comm import all_gather_rows
from allhands.data.prefetch import StepBatch
from allhands.data.streams import IterableFeed, is_of_hugging_face
from allhands.errors import UserError
from allhands.world import World

# Stages of a WebDataset by which each rank reads a part, or samples of its own; and the one that
# allows one rank only.
_SPLITS = {"split_by_node", "ResampledShards"}
_ALONE = "single_node_only"


class SplitByRank(IterableDataset[Any]):
    """Says that a stream gives each rank its own samples, none of them twice; they are trained on
    where they are read.

    Without it, every rank must read the whole stream, which is then dealt out. A WebDataset with
    ``split_by_node`` or ``resampled=True`` and a ``datasets.IterableDataset`` from
    ``split_dataset_by_node`` are known to be split.

    Args:
        dataset: an IterableDataset, which looks at the rank itself, such as by the variables RANK
            and WORLD_SIZE.
    """

    def __init__(self, dataset: Any) -> None:
        if not isinstance(dataset, IterableDataset):
            raise UserError(
                f"SplitByRank({type(dataset).__name__}): only a stream, an IterableDataset, can be "
                "split by rank; a data set with indices is dealt out without it"
            )
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


class SplitFeed(IterableFeed):
    """Batches of a stream of which each rank reads its own part.

    In a step, each rank takes its next samples, as many as its share of a global batch. A rank
    whose part has ended is idle until those of all ranks have. `drop_last` leaves out a rank's last
    share, if it is short.
    """

    ordered = False

    def __init__(
        self,
        name: str,
        dataset: IterableDataset[Any],
        deal: dict[str, Any],
        rank: int,
        world: World,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        alone = {"world_size": 1, "level": False, "began_with": None}
        super().__init__(name, dataset, deal | alone, 0, world, seed, options)
        self.kind = "an iterable that is split by rank"
        self.global_batch *= world.world_size
        self.level = bool(deal["level"])
        self._looked = not isinstance(dataset, SplitByRank)  # a stage of the stream's own splits it

    def _read(self, epoch: int, skip: int) -> Iterator[StepBatch]:
        passed, spare = 0, None
        with self._reading(epoch, 0) as loaded:
            while True:
                batches, counts, own, mark = next(loaded, ((), (), 0, 0))
                seen = self._gather([own, len(batches), mark])
                if not self._looked:
                    self._looked = True
                    self._compare(seen)
                total = sum(samples for samples, _, _ in seen)
                if not total:
                    return
                if spare is None and self.level:
                    self._check_all_have(seen)
                spare = batches[0] if batches else spare
                # What each rank has read of its part is only known by reading it again.
                if passed < skip:
                    passed += total
                    continue
                if passed > skip:
                    raise UserError(
                        f"loader '{self.name}' cannot go on after {skip} samples: its steps now "
                        f"end after {passed}. Resume with "
                        "the batch_size and accumulate of the checkpoint"
                    )
                batches, counts = list(batches), list(counts)
                if self.level:
                    missing = max(number for _, number, _ in seen) - len(batches)
                    batches, counts = batches + [spare] * missing, counts + [0] * missing
                yield (
                    batches,
                    counts,
                    total,
                    not self.level and not all(samples for samples, _, _ in seen),
                )
                passed = skip = 0

    def _gather(self, own: list[int]) -> list[list[int]]:
        rows = torch.tensor([own], dtype=torch.int64, device=self.world.device)
        return [row[0].tolist() for row in all_gather_rows(rows, self.world)]

    def _check_all_have(self, seen: list[list[int]]) -> None:
        without = next((rank for rank, (samples, _, _) in enumerate(seen) if not samples), None)
        if without is not None:
            raise UserError(
                f"loader '{self.name}' has no sample for rank {without}, and with this strategy "
                "each rank must call the model; "
                "split the stream so that each rank has some, or write distributed='ddp'"
            )

    def _compare(self, seen: list[list[int]]) -> None:
        """Say it where all ranks begin with equal samples; they may be other samples of equal
        values."""
        if self.world.rank == 0 and seen[0][0] and all(row == seen[0] for row in seen):
            print(
                f"allhands: loader '{self.name}' is said to be split by rank, and all ranks begin "
                "with equal samples. If they read the same stream, each sample is trained on by "
                "every rank: then leave SplitByRank out",
                file=sys.stderr,
            )

    def state_dict(self, within_epoch: bool) -> dict[str, Any]:
        return {"ranks": self.world.world_size} if within_epoch else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = state.get("ranks", self.world.world_size)
        if before != self.world.world_size:
            raise UserError(
                f"resume: the stream of loader '{self.name}' was split for {before} ranks, and the "
                f"checkpoint is from the middle of it; go on with {before} workers"
            )


def taken_as(dataset: Any) -> tuple[Any, bool]:
    """A stream as it is read in a world of several ranks, and whether it is split by rank."""
    said = isinstance(dataset, SplitByRank)
    inner = dataset.dataset if said else dataset
    stages = {_name_of(stage) for stage in _stages(inner)}
    # It would raise an error; every rank reads everything, or its own samples are made elsewhere.
    if _ALONE in stages:
        inner = copy.copy(inner)
        inner.pipeline = [stage for stage in inner.pipeline if _name_of(stage) != _ALONE]
    of_hugging_face = is_of_hugging_face(inner) and getattr(inner, "_distributed", None) is not None
    return SplitByRank(inner) if said else inner, said or of_hugging_face or bool(stages & _SPLITS)


def _stages(dataset: Any) -> list[Any]:
    """The stages of a WebDataset; none of anything else."""
    known = any(kind.__module__.startswith("webdataset") for kind in type(dataset).__mro__)
    return list(getattr(dataset, "pipeline", ())) if known else []


def _name_of(stage: Any) -> str:
    function = getattr(stage, "func", stage)  # of a functools.partial
    return str(getattr(function, "__name__", type(function).__name__))
