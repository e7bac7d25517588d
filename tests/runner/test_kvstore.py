"""What the runner does for the strategy "kvstore": run files, servers that it starts, and the proof."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import allhands
from allhands import KVStore, UserError
from allhands.cli.objects import train
from allhands.config import read_run
from tests.runner.problems import arguments, classifier, fit

pytestmark = pytest.mark.serial


class NanOnRankOne(nn.Module):
    """A loss that is NaN on rank 1."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        world = allhands.current_world()
        assert world is not None
        return nn.functional.cross_entropy(output, target) * (float("nan") if world.rank == 1 else 1.0)


RUN = "data: {name: digits, batch_size: 64}\nmodel: {name: mlp}\nworkers: 2\ndevice: cpu\ncheck: true\nlogdir: null\n"


@pytest.mark.timeout(60)
def test_a_run_file_names_it_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(RUN + "strategy: {name: kvstore, mode: ssp, staleness: 3, servers: 2}\n")
    history = train(read_run([path]))
    assert len(history["train"]["staleness"]) == 3
    for override, said in (
        ("strategy.server=1", "kvstore has no such option; did you mean 'servers'"),
        ("strategy.servers=0", "needs parameter servers"),
        ("strategy.mode=sync", "only mode='ssp' bounds staleness"),
    ):
        with pytest.raises(UserError, match=said):
            train(read_run([path], [override]))


@pytest.mark.timeout(60)
def test_verify_holds_it_to_one_process() -> None:
    given = arguments(model=classifier())
    loaders = {"train": given["loaders"]["train"]}
    report = allhands.verify(
        model=given["model"], criterion=given["criterion"], optimizer=given["optimizer"], loaders=loaders, steps=8,
        clip_norm=0.5, strategies=KVStore(servers=1), workers=(2,),
    )  # fmt: skip
    assert [row.verdict for row in report.rows] == ["same"]


@pytest.mark.timeout(60)
def test_a_worker_that_fails_alone_ends_all() -> None:
    """Nobody waits for it in a collective: with "async" the error of the one worker ends the training."""
    with pytest.raises(allhands.AllhandsError, match=r"rank 1"):
        fit(distributed=KVStore("async", servers=1), workers=2, criterion=NanOnRankOne())
