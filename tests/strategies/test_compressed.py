"""Gradients in bf16: the sum itself, trainings against a loop by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allhands import DDP, UserError
from allhands.strategies.compressed import sum_in_bf16
from tests.reference import relative_difference
from tests.runner.problems import arguments, fit
from tests.strategies.workers_by_hand import Gradients, train, train_by_hand
from tests.verify.problems import verified
from tests.worlds import in_world


def sums(length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `sum_in_bf16` makes of a buffer of each rank; the same by hand; the exact sum."""
    buffers = [
        torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
        for rank in range(dist.get_world_size())
    ]
    found = buffers[dist.get_rank()].clone()
    sum_in_bf16(found)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    by_hand = torch.stack([buffer.bfloat16() for buffer in buffers]).to(wide).sum(0).bfloat16().to(dtype)
    return found, by_hand, torch.stack(buffers).double().sum(0)


def by_hand_in_bf16(gradients: list[Gradients]) -> Gradients:
    return {
        name: torch.stack([own[name].bfloat16() for own in gradients]).float().sum(0).bfloat16().float() for name in gradients[0]
    }


def compressed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for length in (1, 7, 4096):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            found[f"sum of {length} {dtype}"] = sums(length, dtype)
    workers = dist.get_world_size()
    by_hand, exact = train_by_hand(workers, by_hand_in_bf16).state_dict(), train(DDP()).state_dict()
    # In one bucket, and in one for each parameter.
    for cap in (None, 1e-6):
        trained = train(DDP(compress="bf16", bucket_cap_mb=cap)).state_dict()
        found[f"by hand, {cap}"] = relative_difference(trained, by_hand)
        found[f"exact, {cap}"] = relative_difference(trained, exact)
    return found


@pytest.mark.serial
@pytest.mark.parametrize("workers", [2, 3])
def test_in_bf16_the_same_as_by_hand(workers: int) -> None:
    results = in_world(workers, compressed)
    for found in results:
        for name, value in found.items():
            if name.startswith("sum"):
                ours, by_hand, exact = value
                assert torch.equal(ours, results[0][name][0]), name
                assert torch.equal(ours, by_hand), name
                assert float((ours.double() - exact).norm() / exact.norm()) < 2**-7, name
            elif name.startswith("exact"):
                assert 1e-5 < value < 0.05, (name, value)
            else:
                assert value < 1e-6, (name, value)


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_verify_measures_how_far_compression_drifts() -> None:
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4))
    strategies = [DDP(), DDP(compress="bf16"), DDP(compress="powersgd", powersgd_start=2)]
    report = verified(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.2), strategies=strategies)
    exact, bf16, powersgd = report.rows
    assert [row.verdict for row in report.rows] == ["same", "lossy as declared", "lossy as declared"]
    assert [row.strategy for row in report.rows] == ["ddp", "ddp, bf16 gradients", "ddp, powersgd 1"]
    assert report.ok
    assert exact.difference < 1e-6
    assert 1e-5 < bf16.difference < 1e-2
    assert bf16.difference < powersgd.difference < 1
    assert powersgd.curves["parameters"]["difference"][1] < 1e-6  # the first two steps are exchanged as they are


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compress": "fp16"}, r"compress='fp16'\); it must be 'bf16' or 'powersgd'.*Set compress to 'bf16'"),
        ({"compress": True}, r"compress=True\); it must be 'bf16' or 'powersgd'"),
        ({"powersgd_rank": 2}, r"compress=None, powersgd_rank=2\): only compress='powersgd' has it; leave powersgd_rank out"),
        ({"compress": "bf16", "powersgd_start": 5}, r"compress='bf16', powersgd_start=5\).*leave powersgd_start out"),
        ({"compress": "powersgd", "powersgd_rank": 0}, r"powersgd_rank=0\); it must be a whole number, at least 1"),
        ({"compress": "powersgd", "powersgd_start": 2.5}, r"powersgd_start=2.5\); .* such as powersgd_start=10"),
        ({"compress": "powersgd", "find_unused_parameters": True}, "leave find_unused_parameters out, or set compress to"),
    ],
)
def test_settings_that_there_are_not(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        DDP(**settings)


def test_gradients_that_cannot_travel_so_are_refused_before_workers_start() -> None:
    sparse = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))
    for compress in ("bf16", "powersgd"):
        with pytest.raises(UserError, match=r"'0' has sparse gradients.*sparse=False, or leave compress out"):
            fit(model=sparse, optimizer=torch.optim.SGD(sparse.parameters()), distributed=DDP(compress=compress), workers=2)
    strange = nn.Linear(4, 4, dtype=torch.complex64)
    settings = arguments(model=strange, optimizer=torch.optim.SGD(strange.parameters(), lr=0.1))
    with pytest.raises(UserError, match="'weight' is complex64, which is not compressed; leave compress out"):
        fit(**settings, distributed=DDP(compress="bf16"), workers=2)
    with pytest.raises(UserError, match=r"precision='fp16'.*write precision='bf16', or set compress to 'bf16'"):
        fit(distributed=DDP(compress="powersgd"), precision="fp16", workers=2)
