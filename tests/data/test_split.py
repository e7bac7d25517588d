"""Streams that are split by rank: each sample is trained on once, also where the ranks' parts have
other lengths."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import allhands
from allhands import DDP, FSDP, SplitByRank, SupervisedRunner, UserError
from allhands.comm import all_gather_text
from allhands.data import build_feeds, sources_from_datasets, sources_from_loaders
from allhands.data.split import taken_as
from tests.data.test_feed import world_of
from tests.reference import Slope, mean_output
from tests.refusals import refused
from tests.runner.problems import StopAt
from tests.worlds import in_world


class Parts(IterableDataset[Any]):
    """A part a rank, of samples ``(x, x)``; in one process, all of them."""

    def __init__(self, *parts: list[float]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        own = (
            self.parts[int(os.environ["RANK"])]
            if ranks > 1
            else [x for part in self.parts for x in part]
        )
        return ((torch.tensor(x), torch.tensor(x)) for x in own)


UNEVEN = Parts([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [10.0, 20.0])
# In batches of 2: (1 + 2 + 10 + 20) / 4, (3 + 4) / 2, (5 + 6) / 2, 7
SUM_OF_MEANS = 33 / 4 + 3.5 + 5.5 + 7


def train(data: Any, model: Any = None, **options: Any) -> tuple[float, Any]:
    model = model or Slope()
    given: dict[str, Any] = {
        "loaders": {"train": DataLoader(data, 2), "valid": DataLoader(data, 2)},
        "distributed": DDP(),
    }
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=mean_output,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        **given | options,
    )
    return -float(model.w.detach()), history


def on_two_workers() -> dict[str, Any]:
    world = allhands.current_world()
    assert world is not None
    split = SplitByRank(UNEVEN)
    found: dict[str, Any] = {
        "ddp": train(split),
        "fsdp": train(split, distributed=FSDP()),
        "accumulated": train(split, accumulate=2),
    }
    found["datasets"] = train(None, loaders=None, datasets={"batch_size": 2, "train": split})
    found["dropped"] = train(None, loaders={"train": DataLoader(split, 2, drop_last=True)})
    found["epochs"] = train(split, steps_per_epoch=3, num_epochs=2)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(all_gather_text(own, world)[0])
        train(split, logdir=folder, callbacks=[StopAt(2)])
        found["resumed"] = train(split, logdir=folder, callbacks=[StopAt(0)], resume="auto")
        all_gather_text("done", world)
    found["evaluated"] = SupervisedRunner(device="cpu").evaluate(
        model=Slope(),
        criterion=lambda output, target: target.mean(),
        loaders={"valid": DataLoader(split, 2)},
    )["valid"]["loss"]
    found["predicted"] = refused(
        lambda: SupervisedRunner(device="cpu").predict(model=Slope(), loader=DataLoader(split, 2))
    )
    found["empty"] = refused(lambda: train(SplitByRank(Parts([1.0], [])), distributed=FSDP()))
    found["plain"] = refused(lambda: train(UNEVEN))
    return found


@pytest.mark.serial
def test_each_rank_trains_on_its_own_part(preloaded: None) -> None:
    ranks = in_world(2, on_two_workers)
    for found in ranks:
        for case in ("ddp", "fsdp", "datasets", "resumed"):
            assert found[case][0] == pytest.approx(SUM_OF_MEANS), case
        assert found["accumulated"][0] == pytest.approx((10 + 30) / 6 + 18 / 3)
        assert found["dropped"][0] == pytest.approx(33 / 4 + 3.5 + 5.5)
        assert found["epochs"][0] == pytest.approx(SUM_OF_MEANS + 33 / 4 + 3.5)
        assert found["ddp"][1]["step"] == [4]
        assert found["evaluated"] == pytest.approx(58 / 9)
        assert "is split by rank" in found["predicted"]
        assert "SplitByRank" in found["plain"]
        assert "has no sample for rank 1" in found["empty"]


def test_one_process_reads_all_of_it() -> None:
    assert train(SplitByRank(UNEVEN), distributed=False)[0] == pytest.approx(
        1.5 + 3.5 + 5.5 + 8.5 + 20
    )


def feeds_of(data: Any, **options: Any) -> Any:
    sources = sources_from_loaders({"train": DataLoader(data, 2)})
    return build_feeds(sources, world_of(0, 2), 1, same_everywhere=True, **options)["train"]


def test_it_goes_on_within_an_epoch_on_as_many_workers_only() -> None:
    feed = feeds_of(SplitByRank(UNEVEN))
    feed.load_state_dict(feed.state_dict(within_epoch=True))
    feed.load_state_dict(feed.state_dict(within_epoch=False))
    with pytest.raises(UserError, match=r"was split for 3 ranks.*go on with 3 workers"):
        feed.load_state_dict({"ranks": 3})


@pytest.mark.parametrize("marks", [(5, 5), (5, 6)])
def test_ranks_that_begin_with_equal_samples_are_told(
    marks: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    feeds_of(SplitByRank(UNEVEN))._compare([[2, 1, mark] for mark in marks])
    assert ("then leave SplitByRank out" in capfd.readouterr().err) == (marks[0] == marks[1])


def test_ranks_that_compute_with_the_same_samples_cannot_have_their_own() -> None:
    with pytest.raises(UserError, match="2 ranks compute with the same samples"):
        feeds_of(SplitByRank(UNEVEN), place=(0, 1))


def test_a_data_set_with_indices_needs_no_split() -> None:
    with pytest.raises(UserError, match="is dealt out without it"):
        SplitByRank(TensorDataset(torch.ones(2)))
    assert sources_from_datasets({"train": SplitByRank(UNEVEN)}, 1)["train"].shuffle is False


# ------------------------------------------------------------- streams of other libraries, imitated


class Pipeline(IterableDataset[Any]):
    """As a WebDataset is made: a list of stages, of which the first gives and the others pass
    on."""

    def __init__(self, *stages: Any) -> None:
        self.pipeline = list(stages)

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.pipeline[0])
        for stage in self.pipeline[1:]:
            source = stage(source)
        return source


Pipeline.__module__ = "webdataset.pipeline"
NUMBERS = [1.0, 2.0, 3.0]


def single_node_only(source: Any) -> Iterator[Any]:
    raise ValueError("you need to add an explicit nodesplitter")


def split_by_node(source: Any, group: Any = None) -> Iterator[Any]:
    return source


class ResampledShards(list[float]):
    pass


class OfHuggingFace(IterableDataset[Any]):
    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def __iter__(self) -> Iterator[Any]:
        return iter(NUMBERS)


OfHuggingFace.__module__ = "datasets.iterable_dataset"


@pytest.mark.parametrize(
    ("data", "split"),
    [
        (Pipeline(NUMBERS, single_node_only), False),
        (Pipeline(NUMBERS, split_by_node), True),
        (Pipeline(NUMBERS, functools.partial(split_by_node, group=1)), True),
        (Pipeline(ResampledShards(NUMBERS), single_node_only), True),
        (SplitByRank(Pipeline(NUMBERS, single_node_only)), True),
        (OfHuggingFace(None), False),
        (OfHuggingFace((0, 2)), True),
        (UNEVEN, False),
    ],
)
def test_streams_that_are_known_to_be_split(data: Any, split: bool) -> None:
    taken, found = taken_as(data)
    assert found == split
    assert isinstance(taken, SplitByRank) == isinstance(data, SplitByRank)
    if data is not UNEVEN:
        assert list(taken) == NUMBERS  # whole, or what the split leaves in one process
