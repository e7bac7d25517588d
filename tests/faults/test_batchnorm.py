"""Buffers: statistics that differ between ranks, counters averaged into nonsense, dtypes that do
not travel.

Kinds of fault: pytorch/pytorch#13711 and #30718, huggingface/pytorch-image-models#110 (BatchNorm by
rank), TsingZ0/PFLlib#260 and
SymbioticLab/FedScale#57 (buffers forgotten, counters averaged).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner
from tests.faults.probes import Found, probe, probe_each, size, train
from tests.reference import relative_difference
from tests.refusals import refused

pytestmark = pytest.mark.serial


def levels() -> torch.Tensor:
    """3 steps of 2 samples a rank; rank r's samples are 4r - 1 and 4r + 1, so its mean is 4r and
    its variance 2."""
    one_step = torch.tensor([[4.0 * rank + sign] for rank in range(size()) for sign in (-1.0, 1.0)])
    return one_step.repeat(3, 1)


@probe
def batch_norm() -> dict[str, Any]:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    x = levels()
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loaders={
            "train": DataLoader(TensorDataset(x, x), 2),
            "valid": DataLoader(TensorDataset(x, x), 1),
        },
    )
    model.eval()
    with torch.no_grad():
        whole = float(nn.functional.mse_loss(model(x), x))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"state": state, "measured": history["valid"]["loss"][0], "whole": whole}


def test_running_statistics_are_the_mean_over_the_ranks(found: Found) -> None:
    kept = 0.9**3
    for result in found(batch_norm):
        state = result["state"]
        assert state["0.running_mean"].tolist() == pytest.approx(
            [(1 - kept) * 2 * (found.workers - 1)]
        )
        assert state["0.running_var"].tolist() == pytest.approx([kept + (1 - kept) * 2])
        assert state["0.num_batches_tracked"].dtype == torch.int64
        assert int(state["0.num_batches_tracked"]) == 3


def test_all_ranks_end_with_the_same_weights_and_buffers(found: Found) -> None:
    ranks = found(batch_norm)
    for result in ranks:
        assert all(
            torch.equal(value, ranks[0]["state"][name]) for name, value in result["state"].items()
        )


def test_an_evaluation_in_shares_is_that_of_one_process(found: Found) -> None:
    for result in found(batch_norm):
        assert result["measured"] == pytest.approx(result["whole"], rel=1e-6)


@probe
def instance_norm() -> list[float]:
    model = nn.Sequential(
        nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(2, 1)
    )
    x = torch.tensor([[[4.0 * rank - 1, 4.0 * rank + 1]] for rank in range(size())])
    train(model, (x, torch.zeros(size(), 1)), 1, nn.MSELoss(), lr=0.01)
    return model[0].running_mean.tolist()


def test_instance_norm_statistics_as_well(found: Found) -> None:
    assert found(instance_norm) == [pytest.approx([0.1 * 2 * (found.workers - 1)])] * found.workers


DTYPES = (
    torch.bool,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
)


class Constants(nn.Module):
    """Holds what models hold: masks, tables, an empty tensor. They differ between ranks at
    first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        for number, dtype in enumerate(DTYPES):
            self.register_buffer(f"b{number}", torch.full((3,), float(rank == 0)).to(dtype))
        self.register_buffer("empty", torch.ones(0, 4))
        self.register_buffer("unsaved", torch.full((2,), float(rank)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


@probe
def buffers() -> list[list[float]]:
    import allhands

    world = allhands.current_world()
    assert world is not None
    model, x = Constants(world.rank), torch.ones(6)
    train(model, (x, x), 1)
    return [buffer.to(torch.complex64).real.flatten().tolist() for buffer in model.buffers()]


def test_buffers_of_any_dtype_become_rank_0s(found: Found) -> None:
    assert found(buffers) == [[[1.0] * 3] * len(DTYPES) + [[], [0.0, 0.0]]] * found.workers


@probe
def one_sample_a_rank() -> str:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    n = 5 * size()  # batches of 4: the last global batch leaves one sample a rank
    return refused(
        lambda: train(model, (torch.rand(n, 2), torch.rand(n, 1)), 4, nn.MSELoss(), lr=0.01)
    )


def test_a_batch_of_one_sample_says_what_to_change(found: Found) -> None:
    for rank, message in enumerate(found(one_sample_a_rank)):
        assert "BatchNorm cannot train on one sample" in message
        assert "drop_last=True" in message
        assert (f"of rank {rank}" in message) == (found.workers > 1)


@probe
def evenly_cut() -> list[int] | str:
    """9 samples in batches of 8 on one rank, two of which make a step: a DataLoader has one of 8
    and one of 1."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    n = 9 * size()
    data = torch.rand(n, 2), torch.rand(n, 1)
    if size() == 1:
        return refused(lambda: train(model, data, 8, nn.MSELoss(), lr=0.01, accumulate=2))
    return train(model, data, 8, nn.MSELoss(), lr=0.01, accumulate=2)["step"]


def test_a_rest_of_one_sample_is_evened_out_with_several_workers(found: Found) -> None:
    if found.workers == 1:
        assert "BatchNorm cannot train on one sample" in found(evenly_cut)[0]
    else:
        assert found(evenly_cut) == [[1]] * found.workers


@probe_each(("22", "24", "26"))
def accumulated(samples: str) -> dict[str, torch.Tensor]:
    """Weights and statistics after batches of 4, two or three of which make a step."""
    model = normalised()
    train(
        model,
        some_rows(int(samples)),
        4,
        nn.MSELoss(),
        lr=0.1,
        accumulate=3 if samples == "26" else 2,
    )
    return model.state_dict()


def normalised() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def some_rows(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 6, generator=generator), torch.randn(
        samples, 1, generator=generator
    )


@pytest.mark.parametrize("samples", [22, 24, 26])
def test_one_process_normalises_the_batches_of_a_dataloader(found: Found, samples: int) -> None:
    if found.workers > 1:
        pytest.skip("each worker's statistics are of its own share")
    model, window = normalised(), 3 if samples == 26 else 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(DataLoader(TensorDataset(*some_rows(samples)), batch_size=4))
    for first in range(0, len(batches), window):
        optimizer.zero_grad()
        of_step = batches[first : first + window]
        total = sum(len(x) for x, _ in of_step)
        for x, y in of_step:
            (nn.functional.mse_loss(model(x), y) * len(x) / total).backward()
        optimizer.step()
    assert relative_difference(found(accumulated, str(samples))[0], model.state_dict()) < 1e-5
