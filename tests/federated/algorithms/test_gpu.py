"""Every algorithm on a GPU, by every executor, against one client after another on a processor.
TF32 is off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from allhands.federated.algorithms import ALGORITHMS
from tests.federated import simulating as sim

pytestmark = pytest.mark.gpu
SIZES = (10, 6, 12, 9, 7, 8, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "trimmed_mean": {"beta": 0.2},
    "krum": {"byzantine": 2, "select": 2},
}
NAMES = sorted(set(ALGORITHMS) - {"fedbuff"})


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def trained(
    name: str, device: torch.device, executor: str, batchnorm: bool = False, **options: Any
) -> torch.Tensor:
    """The global model, then every client's own."""
    torch.manual_seed(7)
    norm: nn.Module = nn.BatchNorm1d(6) if batchnorm else nn.LayerNorm(6)
    net = nn.Sequential(nn.Linear(5, 6), norm, nn.Tanh(), nn.Linear(6, 1)).double()
    options = {
        **OPTIONS.get(name, {}),
        **({"average_buffers": True} if batchnorm and _asks(name) else {}),
        **options,
    }
    algorithm = ALGORITHMS[name](**options)
    local = {"batch_size": 3, "drop_last": True} if batchnorm else {"batch_size": 4}
    made = sim.rounds(
        algorithm,
        net=net,
        who=sim.clients(SIZES),
        number=3,
        epochs=2,
        executor=executor,
        device=device,
        **local,
    )
    made.run()
    own = made.states.get(list(range(len(made.clients))))
    parts = [
        made.server.weights,
        made.server.integers.double(),
        *(rows.flatten() for rows in own.values()),
    ]
    return torch.cat([part.cpu() for part in parts])


def _asks(name: str) -> bool:
    return not ALGORITHMS[name](**OPTIONS.get(name, {})).average_buffers


@pytest.mark.parametrize("batchnorm", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_all_executors_give_the_model_of_a_processor(name: str, batchnorm: bool) -> None:
    expected = trained(name, sim.CPU, "serial", batchnorm)
    for executor in ("serial", "graph", "stacked"):
        assert (
            trained(name, torch.device("cuda", 0), executor, batchnorm) - expected
        ).abs().max() < 1e-9, executor


@pytest.mark.parametrize("batchnorm", [False, True])
def test_the_gradient_at_the_start_is_that_of_a_processor(batchnorm: bool) -> None:
    expected = trained("scaffold", sim.CPU, "serial", batchnorm, option="I")
    for executor in ("serial", "graph", "stacked"):
        found = trained("scaffold", torch.device("cuda", 0), executor, batchnorm, option="I")
        assert (found - expected).abs().max() < 1e-9, executor
