"""fp16 where ranks hold parts of gradients: one loss scale, and a step that one rank's overflow
leaves out on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, Callback, KVStore, Mesh, SupervisedRunner, Tensor, UserError
from tests.conformance.table import difference
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded"), pytest.mark.timeout(240)]

WORKERS, SAMPLES, BATCH, CLIP = 3, 24, 12, 0.05
# name -> (strategy, workers that see samples of their own)
STRATEGIES: dict[str, tuple[Any, int]] = {
    "sharded state": (DDP(optimizer_state="sharded"), 3),
    "fsdp": ("fsdp", 3),  # the exchange divides by 3, which is no power of two
    "store": (KVStore(), 3),
    "pipeline": ("pipeline", 1),
    "tensor": (Tensor(plan={"0": "colwise", "2": "rowwise"}), 1),
    "replicas": (Mesh(dp=3), 3),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)  # the first stage of a pipeline has nothing to look at
    return model


def overflowing() -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of one sample, of the last rank, is too large at the first scales."""
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(SAMPLES, 6, generator=generator),
        torch.randn(SAMPLES, 3, generator=generator),
    )
    y[11] = 60.0
    return x, y


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.5, momentum=0.9)


class Scales(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, training: Any) -> None:
        self.seen.append(training.loop.precision.scaler.get_scale())


def trained(name: str, folder: Path) -> tuple[Any, list[float]]:
    """Two epochs, the second of them from a checkpoint."""
    strategy, shares = STRATEGIES[name]
    scales = Scales()
    for epochs in (1, 2):
        model = network()
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=optimizer_of(model),
            num_epochs=epochs,
            clip_norm=CLIP,
            loaders={"train": DataLoader(TensorDataset(*overflowing()), BATCH // shares)},
            precision="fp16",
            resume="auto",
            distributed=strategy,
            callbacks=[scales],
            logdir=folder / name.replace(" ", "-"),
        )
    return model.state_dict(), scales.seen


def all_of_them(folder: str) -> dict[str, Any]:
    return {name: trained(name, Path(folder)) for name in STRATEGIES}


def by_hand() -> tuple[Any, list[float]]:
    model, scaler, scales = network(), torch.amp.GradScaler("cpu"), []
    optimizer, (x, y) = optimizer_of(model), overflowing()
    for _ in range(2):
        for first in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            for part in range(first, first + BATCH, 4):
                with torch.autocast("cpu", torch.float16):
                    loss = nn.functional.mse_loss(model(x[part : part + 4]), y[part : part + 4])
                scaler.scale(loss / 3).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return model.state_dict(), scales


def test_scales_and_clipped_steps_are_those_of_one_process(tmp_path: Path) -> None:
    weights, scales = by_hand()
    assert len(set(scales)) > 1, "nothing overflowed"
    for found in in_world(WORKERS, all_of_them, str(tmp_path)):
        for name, (ours, seen) in found.items():
            assert seen == scales, name
            assert difference(ours, weights) < 3e-3, name  # fp16 has 11 bits


def test_workers_that_do_not_wait_would_have_scales_of_their_own() -> None:
    with pytest.raises(UserError, match=r"mode='async'.*write precision='bf16', or mode='sync'"):
        SupervisedRunner(device="cpu").train(
            model=(model := network()),
            criterion=nn.MSELoss(),
            optimizer=optimizer_of(model),
            precision="fp16",
            num_epochs=1,
            loaders={"train": DataLoader(TensorDataset(*overflowing()), 4)},
            distributed=KVStore("async", servers=1),
            workers=2,
        )
