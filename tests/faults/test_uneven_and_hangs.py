"""Ranks with other numbers of batches, a rank that raises, work that is repeated behind the user's
back.

Kinds of fault: pytorch/pytorch#33148 and #38174 (unequal numbers of batches), pytorch/pytorch#44425
(while accumulating),
Lightning-AI/pytorch-lightning#6430 (the true error is hidden), #10389 (slow steps and epochs).
Ranks that are killed, stopped or that exit are in tests/runner/test_distributed.py and
tests/launch/test_failures.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from allhands import DDP, Callback, SupervisedRunner, WorkerError
from allhands.comm.host_sum import HostSum
from allhands.loop import agreement
from tests.faults.probes import Found, probe, size, slope_after, sum_of_means, train
from tests.patience import patience
from tests.reference import Slope, mean_output
from tests.refusals import refused

pytestmark = pytest.mark.serial


@probe
def uneven() -> dict[str, float]:
    """Every number of samples from 1 to 13, in batches of 1 and 2; many leave ranks without a
    sample, at once or later."""
    return {f"{n}/{batch}": slope_after(n, batch) for n in range(1, 14) for batch in (1, 2)}


@pytest.mark.parametrize("batch", [1, 2])
def test_every_number_of_samples_is_trained_on_to_the_end(found: Found, batch: int) -> None:
    for values in found(uneven):
        for n in range(1, 14):
            assert values[f"{n}/{batch}"] == pytest.approx(
                sum_of_means(n, batch * found.workers)
            ), n


@probe
def over_epochs() -> list[float]:
    """A short step in each epoch, the first step of all included."""
    return [
        slope_after(2 * size() + 1, 2, epochs=3),
        slope_after(1, 4, epochs=3),
        slope_after(2 * size() + 1, 1, epochs=3),
    ]


def test_short_steps_between_full_ones(found: Found) -> None:
    n = 2 * found.workers + 1
    expected = [3 * sum_of_means(n, 2 * found.workers), 3.0, 3 * sum_of_means(n, found.workers)]
    assert found(over_epochs) == [pytest.approx(expected)] * found.workers


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 2, sparse=sparse)
        nn.init.ones_(self.table.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x).sum(1)


@probe
def sparse_gradients() -> list[list[torch.Tensor]]:
    """An embedding with sparse gradients and one with dense ones, on 1 to 7 samples; some steps
    leave ranks without any."""
    return [[words(n, sparse) for sparse in (True, False)] for n in range(1, 8)]


def words(n: int, sparse: bool) -> torch.Tensor:
    model, x = Words(sparse), torch.arange(n)
    train(model, (x, x.float()), 2, nn.MSELoss(), lr=0.1, epochs=2)
    return model.table.weight.detach()


def test_sparse_gradients_equal_dense_ones(found: Found) -> None:
    for results in found(sparse_gradients):
        for n, (sparse, dense) in enumerate(results, 1):
            torch.testing.assert_close(sparse, dense, msg=f"{n} samples")
            assert not torch.equal(dense, torch.ones(7, 2))


@probe
def a_loss_that_is_not_finite_in_a_sparse_step() -> list[str]:
    """The last sample's loss is infinite: alone in its step, or with others in it."""
    messages = []
    for n in (2 * size(), 2 * size() + 1):
        target = torch.zeros(n)
        target[-1] = float("inf")
        messages.append(
            refused(
                lambda n=n, target=target: train(
                    Words(True), (torch.arange(n), target), 2, nn.MSELoss()
                )
            )
        )
    return messages


def test_a_loss_that_is_not_finite_is_told_on_all_ranks_with_sparse_gradients(found: Found) -> None:
    for messages in found(a_loss_that_is_not_finite_in_a_sparse_step):
        assert len(messages) == 2
        assert all("the training loss is inf" in message for message in messages)


COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_object",
    "broadcast_object_list",
    "barrier",
    "gather",
)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts this process's calls of torch.distributed; the exchange of gradients, which nobody
    waits for at once or which goes past it, apart."""
    calls = dict.fromkeys((*COLLECTIVES, "exchange"), 0)
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls["exchange" if kwargs.get("async_op") else name] += 1
            return originals[name](*args, **kwargs)

        return call

    def add_up(self: HostSum, flat: torch.Tensor) -> None:
        calls["exchange"] += 1
        summed(self, flat)

    summed = HostSum.add_up
    try:
        for name in COLLECTIVES:
            setattr(dist, name, counting(name))
        with mock.patch.object(HostSum, "add_up", add_up):
            yield calls
    finally:
        for name in COLLECTIVES:
            setattr(dist, name, originals[name])


class Quiet(Callback):
    def on_step_end(self, training: Any) -> None:
        pass


@probe
def collectives() -> list[dict[str, int]]:
    """An epoch of 3 steps and one of 60, with metrics, a callback and a log line at each step."""
    found = []
    for steps in (3, 60):
        x, model = torch.ones(2 * size() * steps), Slope()
        data = TensorDataset(x, x)
        # However slow the steps are, the rounds of the agreement lie ever further apart.
        with counted() as calls, mock.patch.object(agreement, "EVERY", 1e6):
            SupervisedRunner(device="cpu").train(
                model=model,
                criterion=mean_output,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                callbacks=[Quiet()],
                loaders={"train": DataLoader(data, 2), "valid": DataLoader(data, 2)},
                distributed=DDP(),
                clip_norm=1.0,
                metrics={"mean": lambda output, target: output.mean()},
                log_every=1,
            )
        found.append(calls)
    return found


def test_no_collective_is_spent_on_logging_a_step(found: Found) -> None:
    for few, many in found(collectives):
        several = found.workers > 1
        assert (few.pop("exchange"), many.pop("exchange")) == ((3, 60) if several else (0, 0))
        assert (sum(few.values()) > 0) == several
        # Whether to go on is asked at intervals that double.
        assert 0 <= many.pop("all_reduce") - few.pop("all_reduce") <= 7
        assert few == many


class Process(Dataset[Any]):
    """Gives the process that reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(os.getpid()), dtype=torch.float64), torch.tensor(0.0)


class Readers(SupervisedRunner):
    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.found: list[float] = []

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        self.found += batch[0].tolist()
        return model(torch.ones(len(batch[0]))), batch[1]


@probe
def loader_processes() -> dict[str, int]:
    """The number of processes that have read in 3 epochs, of 2 loader processes."""
    counts = {}
    for persistent in (True, False):
        model, runner = Slope(), Readers()
        runner.train(
            model=model,
            criterion=mean_output,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            num_epochs=3,
            loaders={
                "train": DataLoader(Process(), 1, num_workers=2, persistent_workers=persistent)
            },
            distributed=DDP(),
        )
        counts[str(persistent)] = len(set(runner.found))
    return counts


def test_persistent_loader_processes_are_started_once(found: Found) -> None:
    for counts in found(loader_processes):
        assert counts == {"True": 2, "False": 6}


class Raises(SupervisedRunner):
    """Fails on rank 1 in its third batch, while the others wait for it in the exchange."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.batches = 0

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        self.batches += 1
        if self.batches == 3 and dist.get_rank() == 1:
            raise KeyError("planted in handle_batch")
        return super().handle_batch(model, batch)


def test_the_error_of_a_rank_that_others_wait_for_is_what_is_told() -> None:
    model, x = Slope(), torch.ones(24)
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        Raises().train(
            model=model,
            criterion=mean_output,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loaders={"train": DataLoader(TensorDataset(x, x), 2)},
            distributed=True,
            workers=3,
            num_epochs=2,
        )
    assert time.monotonic() - started < patience(40)
    message = str(caught.value)
    assert caught.value.rank == 1
    assert caught.value.exit_code != 0
    assert "planted in handle_batch" in message
    if "closed by peer" in message:  # what the others met is told after it
        assert message.index("planted in handle_batch") < message.index("closed by peer")
    assert float(model.w.detach()) == 0.0  # the caller's own model is as it was
