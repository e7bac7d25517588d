"""Batches are sent ahead by one step, and nothing else changes: their order, where an epoch goes
on, errors, what they hold."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from allhands import World
from allhands.data import build_feeds, prefetch, sources_from_datasets, sources_from_loaders
from allhands.data.feed import InMemoryFeed
from allhands.data.prefetch import SideStream, StepBatch, ahead, is_copied, sent_ahead

Pair = namedtuple("Pair", "left right")


class Noted:
    """A transfer that only says what is asked of it, and hands out copies."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def send(self, batches: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        self.log.append(f"send {batches[0]}")
        return [f"sent {batch}" for batch in batches], batches[0]

    def receive(self, ticket: Any) -> None:
        self.log.append(f"receive {ticket}")


def steps(count: int, log: list[str], error: Exception | None = None) -> Iterator[StepBatch]:
    try:
        for number in range(count):
            log.append(f"read {number}")
            yield [number], [1], 1, False
        if error is not None:
            raise error
    finally:
        log.append("closed")


def test_each_step_is_sent_when_the_one_before_it_is_handed_out() -> None:
    transfer = Noted()
    found = []
    for batches, counts, total, idle in sent_ahead(steps(3, transfer.log), transfer):
        transfer.log.append(f"train {batches[0]}")
        found.append((batches, counts, total, idle))
    assert found == [([f"sent {number}"], [1], 1, False) for number in range(3)]
    assert transfer.log == [
        "read 0",
        "send 0",
        "read 1",
        "send 1",
        "receive 0",
        "train sent 0",
        "read 2",
        "send 2",
        "receive 1",
        "train sent 1",
        "closed",
        "receive 2",
        "train sent 2",
    ]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_error_comes_at_the_step_that_it_belongs_to(count: int) -> None:
    transfer, seen = Noted(), []
    with pytest.raises(ValueError, match="no sample 7"):
        for batches, *_ in sent_ahead(steps(count, [], ValueError("no sample 7")), transfer):
            seen.append(batches[0])
    assert seen == [f"sent {number}" for number in range(count)]


def test_what_cannot_be_sent_is_an_error_of_its_step() -> None:
    class Refuses(Noted):
        def send(self, batches: Sequence[Any]) -> tuple[Sequence[Any], Any]:
            if batches[0] == 2:
                raise RuntimeError("out of memory")
            return super().send(batches)

    seen = []
    with pytest.raises(RuntimeError, match="out of memory"):
        for batches, *_ in sent_ahead(steps(5, []), Refuses()):
            seen.append(batches[0])
    assert seen == ["sent 0", "sent 1"]


def test_an_epoch_that_is_left_ends_the_reading() -> None:
    log: list[str] = []
    reading = sent_ahead(steps(10, log), Noted())
    next(reading)
    assert "closed" not in log
    reading.close()  # type: ignore[attr-defined]
    assert log[-2:] == ["read 1", "closed"]


def test_on_a_processor_nothing_is_sent() -> None:
    reading = steps(2, [])
    assert ahead(reading, torch.device("cpu")) is reading


def test_what_is_copied() -> None:
    assert is_copied(torch.ones(2))
    assert not is_copied(torch.eye(2).to_sparse())
    assert not is_copied(torch.ones(2, requires_grad=True))
    assert not is_copied(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert not is_copied(torch.ones(2, device="meta"))


class Rows(Dataset[Any]):
    """Samples that are trees, as those of language models are."""

    def __init__(self, length: int = 23, bad: int = -1) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError(f"no sample {index}")
        x = torch.full((3,), float(index))
        return {
            "x": x,
            "pair": Pair(x + 1, [x + 2, f"name {index}"]),
            "number": index,
            "draw": torch.rand(2),
        }


class Flow(IterableDataset[Any]):
    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return (Rows()[index] for index in range(self.length))


class Standing:
    """In the place of a side stream, on the processor."""

    sent = 0

    def __init__(self, device: torch.device) -> None:
        pass

    def send(self, batches: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        Standing.sent += 1
        return batches, None

    def receive(self, ticket: Any) -> None:
        pass


def feed_of(data: Any, device: str, workers: int = 0, batch: int = 2, accumulate: int = 2) -> Any:
    world = World(0, 0, 0, 1, 1, torch.device(device), "none", "alone")
    loader = DataLoader(
        data, batch, shuffle=not isinstance(data, IterableDataset), num_workers=workers
    )
    return build_feeds(sources_from_loaders({"train": loader}), world, 1, accumulate)["train"]


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.cpu(), other.cpu())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("data", [Rows(), Flow()], ids=["map", "stream"])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_the_feed_of_a_gpu_gives_what_that_of_a_processor_gives(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "SideStream", Standing)
    monkeypatch.setattr(Standing, "sent", 0)
    for epoch, skip in ((0, 0), (1, 0), (1, 8), (1, 23)):
        wanted = [list(step) for step in feed_of(data, "cpu").epoch(epoch, skip)]
        before = Standing.sent
        found = [list(step) for step in feed_of(data, "cuda").epoch(epoch, skip)]
        assert Standing.sent - before == len(wanted)
        same(found, wanted)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_a_sample_that_cannot_be_read_fails_the_step_that_it_is_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch, "SideStream", Standing)
    counts = {}
    for device in ("cpu", "cuda"):
        feed = feed_of(Rows(bad=11), device)
        counts[device] = 0
        with pytest.raises(ValueError, match="no sample 11"):
            for _ in feed.epoch(0):
                counts[device] += 1
    assert counts["cpu"] == counts["cuda"] > 0


@pytest.mark.parametrize(
    ("given", "pinned"), [({}, True), ({"pin_memory": False}, False), ({"pin_memory": True}, True)]
)
def test_loaders_pin_unless_told_otherwise(given: dict[str, Any], pinned: bool) -> None:
    gpu = World(0, 0, 0, 1, 1, torch.device("cuda"), "none", "alone")
    cpu = World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone")
    for data in (Rows(), Flow()):
        for world in (gpu, cpu):
            sources = sources_from_datasets({"batch_size": 2, "train": data, **given}, 1)
            feed: Any = build_feeds(sources, world, 1)["train"]
            assert feed.loader.pin_memory is (pinned and (world is gpu or "pin_memory" in given))
    # Its pin_memory=False is what everybody has who said nothing.
    loader: Any = DataLoader(Rows(), 2)
    feed = build_feeds(sources_from_loaders({"train": loader}), gpu, 1)["train"]
    assert feed.loader.pin_memory is True
    loader = DataLoader(Rows(), 2, collate_fn=list)
    feed = build_feeds(sources_from_loaders({"train": loader}), gpu, 1)["train"]
    assert feed.loader.pin_memory is False, (
        "what a collate function makes is not taken apart in a thread"
    )


# ------------------------------------------------------------------ on a GPU


def on_device(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return all(map(on_device, parts))


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["map", "stream", "memory"])
def test_batches_lie_on_the_gpu_and_hold_the_same(
    kind: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InMemoryFeed, "_fits_on_device", lambda feed: False)
    memory = TensorDataset(
        torch.randn(23, 5), torch.arange(23), torch.rand(23, 2, 2, dtype=torch.float64) > 0.5
    )
    data = {"map": Rows(), "stream": Flow(), "memory": memory}[kind]
    for epoch, skip in ((0, 0), (1, 8)):
        found = list(feed_of(data, "cuda:0", workers).epoch(epoch, skip))
        wanted = list(feed_of(data, "cpu", workers).epoch(epoch, skip))
        assert len(found) == len(wanted)
        for (batches, *rest), (others, *other_rest) in zip(found, wanted, strict=True):
            assert rest == other_rest
            assert on_device(batches)
            same(list(batches), list(others))


@pytest.mark.gpu
def test_strides_are_those_of_a_plain_copy() -> None:
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    tensors = [images, torch.randn(4, 6).t(), torch.ones(1).expand(7)]
    side = SideStream(torch.device("cuda:0"))
    (moved,), ticket = side.send([tensors])
    side.receive(ticket)
    for own, other in zip(moved, tensors, strict=True):
        assert own.stride() == other.to("cuda:0").stride()
        assert torch.equal(own.cpu(), other)


@pytest.mark.gpu
def test_a_gpu_that_lags_behind_sees_each_batch_whole() -> None:
    """The loop runs far ahead of the GPU and lets go of batches that are yet to be used: their
    memory must wait."""
    data = torch.arange(400 * 256, dtype=torch.float32).view(400, 256)

    def read() -> Iterator[StepBatch]:
        for number in range(400):
            yield [data[number].clone()], [1], 1, False

    sums = []
    for (batch,), *_ in ahead(read(), torch.device("cuda:0")):
        torch.cuda._sleep(200_000)
        sums.append((batch * 1.0).sum())
        del batch
    assert torch.equal(torch.stack(sums).cpu(), data.sum(1))
