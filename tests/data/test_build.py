"""Which loaders and data sets are taken, which are refused, and how streams are dealt out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from allhands import UserError
from allhands.data import (
    build_feeds,
    sources_from_datasets,
    sources_from_loaders,
)
from tests.data.test_feed import Numbers, Stream, loader_feeds, read
from tests.worlds import in_world


class ShuffledStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20).tolist())


class RankStream(IterableDataset[int]):
    """Shards itself by rank, which would lose samples when dealt out again."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(torch.distributed.get_rank(), 20, 2))


def test_datasets_form() -> None:
    data = TensorDataset(torch.arange(9))
    sources = sources_from_datasets(
        {
            "batch_size": 4,
            "num_workers": 0,
            "train": data,
            "valid": {"dataset": data, "batch_size": 3},
        },
        1,
    )
    assert (sources["train"].batch_size, sources["train"].shuffle) == (4, True)
    assert (sources["valid"].batch_size, sources["valid"].shuffle) == (3, False)


def test_datasets_are_made_by_the_users_function_with_equal_seeds() -> None:
    def make(length: int) -> dict[str, Any]:
        return {"train": TensorDataset(torch.rand(length))}

    given = {"batch_size": 4, "get_datasets_fn": make, "length": 5}
    first, second = (sources_from_datasets(given, 1)["train"].dataset.tensors[0] for _ in range(2))
    assert torch.equal(first, second)
    assert len(first) == 5


BAD_DATASETS = [
    ({"batch_size": 4}, "names no data set"),
    ({"batch_size": 4, "train": Numbers(3), "num_worker": 2}, "num_worker"),
    ({"train": {"dataset": Numbers(3), "bach_size": 2}}, "bach_size"),
    ({"train": Numbers(3), "per_gpu_scaling": True}, "per worker already"),
    ({"get_datasets_fn": lambda length: {}, "lenght": 3}, "lenght"),
    ({"get_datasets_fn": lambda: None}, "must return a dict"),
    (
        {"train": {"dataset": Numbers(3), "sampler": SequentialSampler(range(3)), "shuffle": True}},
        "exclude each other",
    ),
    ([Numbers(3)], "must be a dict"),
]


@pytest.mark.parametrize(("given", "message"), BAD_DATASETS)
def test_bad_datasets_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sources_from_datasets(given, 1)


def bad_loaders() -> list[tuple[Any, str]]:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([])

    return [
        ((batch for batch in [1]), "a generator, which cannot be dealt out"),
        (Numbers(3), "pass a torch.utils.data.DataLoader"),
        (Own(Numbers(3)), "its own __iter__"),
        (DataLoader(Numbers(3), batch_size=None), "batch_size=None"),
        (
            DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), 2, 0)),
            "DistributedSampler",
        ),
        (DataLoader(Stream(4), 2, num_workers=2), "every sample would come several times"),
        (DataLoader(Numbers(0), 2), "is empty"),
        (DataLoader(Numbers(4), 2, sampler=["a", "b"]), "integer indices"),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("case", range(8))
def test_bad_loaders_are_refused_by_name(case: int) -> None:
    loader, message = bad_loaders()[case]
    with pytest.raises(UserError, match=message):
        read(loader_feeds(loader, 1))


def stream_rows(kind: str) -> list[list[int]]:
    import allhands

    world = allhands.current_world()
    assert world is not None
    stream = {"plain": Stream(21), "shuffled": ShuffledStream(), "by rank": RankStream()}[kind]
    (feed,) = build_feeds(
        sources_from_loaders({"train": DataLoader(stream, 3)}), world, seed=1
    ).values()
    return [[int(v) for batch in batches for v in batch] for batches, _, _, _ in feed.epoch(0)]


@pytest.mark.serial
def test_streams_are_dealt_out_once() -> None:
    ranks = in_world(2, stream_rows, "plain")
    assert [row for step in zip(*ranks, strict=True) for part in step for row in part] == list(
        range(21)
    )


@pytest.mark.serial
def test_a_stream_that_shuffles_shuffles_alike_on_every_rank() -> None:
    ranks = in_world(2, stream_rows, "shuffled")
    assert sorted(row for rank in ranks for step in rank for row in step) == list(range(20))


@pytest.mark.serial
def test_a_stream_that_shards_itself_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"read different streams.*DataLoader\(allhands.SplitByRank\(dataset\)"
    ):
        in_world(2, stream_rows, "by rank")
