"""The line that says how much memory a training took."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner
from allhands.loop import peak
from allhands.world import World
from tests.runner.problems import fit
from tests.worlds import in_world


def test_a_training_says_what_its_process_took(capsys: pytest.CaptureFixture[str]) -> None:
    fit(num_epochs=1)
    found = re.search(
        r"^peak memory: (\d+) MiB of the process$|^peak memory: ([\d.]+) GiB of the process$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert found is not None
    size = float(found[1]) / 1024 if found[1] else float(found[2])
    assert 0.05 < size < 64
    assert size == pytest.approx(
        peak.taken(World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone")) / 2**30, rel=0.05
    )


def hog() -> Any:
    import allhands

    world = allhands.init(device="cpu")
    block = torch.ones(2**27 if world.rank == 1 else 1)  # half a GiB
    del block
    return peak.in_words(peak.by_ranks(world), world)


@pytest.mark.serial
def test_the_rank_that_took_most_is_named() -> None:
    one, other = in_world(2, hog)
    assert one == other
    assert re.fullmatch(r"peak memory: [\d.]+ [GM]iB of the process of rank 1", one)


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_tensors_took(capsys: pytest.CaptureFixture[str]) -> None:
    torch.ones(2**29, device="cuda")  # 2 GiB, before the training
    gc.collect()
    held = torch.cuda.memory_allocated() / 2**20  # by other tests in this process
    model = nn.Linear(4096, 4096, bias=False)
    data = TensorDataset(torch.randn(16, 4096), torch.randn(16, 4096))
    SupervisedRunner(device="cuda").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        step="eager",
        loaders={"train": DataLoader(data, 8)},
    )
    said = capsys.readouterr().out
    found = re.search(r"peak memory: ([\d.]+) (M|G)iB of tensors on the GPU$", said, re.MULTILINE)
    assert found is not None
    size, half_a_digit = float(found[1]), 0.5
    if found[2] == "G":
        size, half_a_digit = 1024 * size, 1024 * 0.005
    assert 128 - half_a_digit <= size - held < 400, "weights and gradients are 128 MiB"
