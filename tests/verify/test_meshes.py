"""verify on models that lie in parts on the workers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from allhands import FSDP, Mesh
from tests.verify.problems import data, network, only, verified

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


class OtherOnRankOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self.inner(x) * (1 + 0.01 * here)


def test_parts_are_the_same_training() -> None:
    report = verified(
        strategies=[FSDP(), Mesh(pp=2), Mesh(dp=2)],
        workers=2,
        steps=4,
        accumulate=2,
        clip_norm=0.5,
        loaders={"train": DataLoader(data(ignored=5), 5)},
    )
    assert [row.verdict for row in report.rows] == ["same"] * 3
    assert report.ok


def test_a_fault_in_one_share_is_seen() -> None:
    report = verified(model=OtherOnRankOne(), strategies=[FSDP()], workers=2, steps=2)
    assert not report.ok
    assert only(report).step == 1
