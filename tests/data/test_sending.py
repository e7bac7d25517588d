"""Loader processes that cannot send a batch: the reader gets an error, and does not wait for
ever."""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from allhands import SupervisedRunner, UserError
from allhands.data import build_feeds, sources_from_loaders
from tests.data.test_seeded import world_of

ROWS = TensorDataset(torch.ones(8, 1), torch.zeros(8, 1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def read(data: Any = ROWS, **options: Any) -> list[Any]:
    loader = DataLoader(data, batch_size=2, num_workers=1, **options)
    feeds = build_feeds(sources_from_loaders({"train": loader}), world_of(0, 1), seed=0)
    return list(feeds["train"].epoch(0))


def with_member(member: Any) -> Any:
    return lambda samples: {"x": torch.stack([x for x, _ in samples]), "more": [1, member()]}


@pytest.mark.parametrize("data", [ROWS, Stream()])
@pytest.mark.parametrize(
    ("member", "said"),
    [
        (
            threading.Lock,
            "batch['more'][1] is a lock: TypeError: cannot pickle '_thread.lock' object",
        ),
        (lambda: Path(os.devnull).open(), "batch['more'][1] is a TextIOWrapper"),  # noqa: SIM115
        (lambda: lambda: 1, "batch['more'][1] is a function"),
        (lambda: (torch.ones(1), threading.Lock()), "batch['more'][1][1] is a lock"),
    ],
)
def test_a_batch_that_cannot_be_pickled_is_named_with_its_member(
    data: Any, member: Any, said: str
) -> None:
    with pytest.raises(
        UserError, match="a loader process of loader 'train' cannot send its batch"
    ) as caught:
        read(data, collate_fn=with_member(member))
    assert said in str(caught.value)
    assert ("write num_workers=0" in str(caught.value)) == (data is ROWS)


def test_a_batch_that_can_be_pickled_arrives() -> None:
    steps = read(collate_fn=with_member(lambda: "text"))
    assert [batches[0]["more"] for batches, *_ in steps] == [[1, "text"]] * 4


def test_a_long_path_of_temporary_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(folder))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="TMPDIR"):
        read(worker_init_fn=forget_sharer)


def forget_sharer(_: int) -> None:
    """Have the process listen anew, also where the one that forked it does so already."""
    from multiprocessing import resource_sharer

    resource_sharer._resource_sharer._listener = None  # type: ignore[attr-defined]


def test_a_limit_of_open_files_is_named() -> None:
    with pytest.raises(UserError, match=r"too many files are open.*ulimit -n"):
        read(worker_init_fn=only_eight_files)


def only_eight_files(_: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))


def test_full_shared_memory_is_named() -> None:
    with pytest.raises(UserError, match=r"/dev/shm is full.*num_workers=0"):
        read(collate_fn=full)


def full(_: Any) -> Any:
    class Full:
        def __reduce__(self) -> Any:
            raise OSError(28, "No space left on device")

    return Full()


def test_a_loader_process_that_dies_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"loader 'train': DataLoader worker .* exited unexpectedly"
    ):
        read(collate_fn=lambda samples: os._exit(3))


@pytest.mark.serial
def test_a_distributed_training_ends_too(preloaded: None) -> None:
    model, loader = (
        nn.Linear(1, 1),
        DataLoader(ROWS, 2, num_workers=1, collate_fn=with_member(threading.Lock)),
    )
    with pytest.raises(UserError, match="cannot send its batch: batch.'more'..1. is a lock"):
        SupervisedRunner().train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loaders={"train": loader},
            distributed=True,
            workers=2,
        )
