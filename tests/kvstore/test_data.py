from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from allhands.data import global_order
from allhands.errors import UserError
from allhands.kvstore import SplitSampler, split_and_load, split_data


def sizes(size: int, parts: int) -> list[int]:
    return [len(part) for part in split_data(torch.arange(size), parts, even_split=False)]


def test_slices_are_the_batch_in_order() -> None:
    batch = torch.arange(24).view(2, 12)
    slices = split_data(batch, 3, batch_axis=1)
    assert [list(part.shape) for part in slices] == [[2, 4]] * 3
    assert torch.equal(torch.cat(slices, 1), batch)
    assert slices[0].data_ptr() == batch.data_ptr()  # a view
    assert torch.equal(torch.cat(split_data([[1], [2], [3]], 3)), torch.tensor([[1], [2], [3]]))


def test_uneven_slices_differ_by_one() -> None:
    assert sizes(10, 4) == [3, 3, 2, 2]
    assert sizes(2, 3) == [1, 1, 0]
    with pytest.raises(
        UserError,
        match="10 samples cannot be cut into 4 slices of one size; write even_split=False",
    ):
        split_data(torch.arange(10), 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.arange(4), 0), "num_slice=0"),
        ((torch.arange(4), 2, 1), r"batch_axis=1\), but the data has shape \[4\]"),
    ],
)
def test_what_cannot_be_split(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_data(*arguments)  # type: ignore[arg-type]


def test_slices_are_loaded_onto_their_devices() -> None:
    slices = split_and_load(torch.arange(6.0), ["cpu", torch.device("meta")])
    assert [part.device.type for part in slices] == ["cpu", "meta"]
    assert slices[0].tolist() == [0, 1, 2]
    (whole,) = split_and_load(torch.arange(5), ["cpu"])
    assert len(whole) == 5
    with pytest.raises(UserError, match="list of devices is empty"):
        split_and_load(torch.arange(6), [])
    with pytest.raises(UserError, match="'gpu0' is no device"):
        split_and_load(torch.arange(6), ["gpu0"])


@pytest.mark.parametrize(("length", "parts"), [(10, 3), (3, 5), (0, 2), (12, 4), (7, 1)])
def test_parts_cover_the_data_set_once(length: int, parts: int) -> None:
    samplers = [SplitSampler(length, parts, part) for part in range(parts)]
    for _ in range(3):
        dealt = [list(sampler) for sampler in samplers]
        assert sorted(chain.from_iterable(dealt)) == list(range(length))
        assert [len(part) for part in dealt] == [len(sampler) for sampler in samplers]
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_each_epoch_has_a_new_order_and_a_seed_the_same_one() -> None:
    first, second, other = (
        SplitSampler(50, 2, 1, seed=3),
        SplitSampler(50, 2, 1, seed=3),
        SplitSampler(50, 2, 1, seed=4),
    )
    epochs = [list(first) for _ in range(3)]
    assert epochs == [list(second) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(epochs[0]) != set(epochs[1])  # the parts are dealt anew, not only shuffled
    assert list(other) != epochs[0]
    second.set_epoch(1)
    assert [list(second), list(second)] == epochs[1:]


def test_batches_of_all_workers_are_those_of_one() -> None:
    order = global_order(103, 0, 0)
    workers = [list(SplitSampler(103, 3, part)) for part in range(3)]
    for step in range(9):
        batch = chain.from_iterable(worker[4 * step : 4 * step + 4] for worker in workers)
        assert set(batch) == set(order[12 * step : 12 * step + 12].tolist())


def test_in_a_data_loader_with_processes() -> None:
    data = TensorDataset(torch.arange(11))
    sampler = SplitSampler(11, 2, 0)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True)
    assert len(loader) == 2
    expected = SplitSampler(11, 2, 0)
    for _ in range(2):
        assert torch.cat([batch for (batch,) in loader]).tolist() == list(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1,), "length=-1"), ((5, 0), "num_parts=0"), ((5, 2, 2), "num_parts=2, part_index=2")],
)
def test_parts_that_do_not_exist(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SplitSampler(*arguments)
