"""Executors on a GPU: recorded in CUDA graphs, stacked, compiled; all against one client after
another. TF32 is off."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from allhands.errors import UserError
from allhands.federated.executors import Auto, Graph, Stacked
from tests.federated import simulating as sim
from tests.federated.executors.comparing import (
    SIZES,
    Pulled,
    augmented,
    difference,
    images,
    network,
    trained,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
ALL = [
    "serial",
    "graph",
    "stacked",
    {"name": "stacked", "chunk": 2},
    {"name": "stacked", "record": False},
]


@pytest.fixture(autouse=True)
def _exact():
    before = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    yield
    (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
    ) = before


def on_gpu(executors: list, **options) -> float:
    return difference(executors, device=CUDA, **options)


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_all_executors_give_one_model(norm, optimizer, options):
    given = {
        "norm": norm,
        "optimizer": optimizer,
        "options": options,
        "batch_size": 3,
        "drop_last": norm == "batch",
        "epochs": 2,
        "clip_norm": 1.0,
    }
    assert on_gpu(ALL, **given) < 1e-10
    assert on_gpu(ALL, **given, dtype=torch.float32) < 1e-5


def test_a_gpu_draws_the_masks_of_a_processor():
    cpu, gpu = (
        trained("serial", norm="group", batch_size=4),
        trained("stacked", norm="group", batch_size=4, device=CUDA),
    )
    assert (cpu[0] - gpu[0].cpu()).abs().max() < 1e-10


def test_a_gpu_crops_and_flips_as_a_processor():
    assert on_gpu(ALL, net=augmented, batch_size=4, epochs=2) < 1e-10
    cpu, gpu = (
        trained("serial", net=augmented(), batch_size=4, device=device)
        for device in (sim.CPU, CUDA)
    )
    assert (cpu[0] - gpu[0].cpu()).abs().max() < 1e-10


def test_an_algorithm_that_corrects_and_keeps_states():
    assert (
        on_gpu(ALL, norm="batch", algorithm=Pulled(), number=3, batch_size=5, drop_last=True)
        < 1e-10
    )


def test_full_batches_of_unequal_clients_and_local_steps():
    assert on_gpu(ALL, norm="group", batch_size=None, epochs=2) < 1e-10
    assert on_gpu(ALL, norm="group", batch_size=7, steps=5) < 1e-10


def test_learning_rates_that_change_between_rounds_reach_the_recorded_steps():
    weights = []
    for executor in ("serial", "graph", "stacked"):
        made = sim.rounds(
            executor=executor,
            device=CUDA,
            batch_size=4,
            optimizer=torch.optim.Adam,
            options={"lr": 0.01},
        )
        for round_ in range(3):
            made.work.local.optimizer.options[0]["lr"] = 0.01 / (1 + round_)
            made.one_round()
        weights.append(made.server.weights)
    assert (weights[0] - weights[1]).abs().max() < 1e-10
    assert (weights[0] - weights[2]).abs().max() < 1e-10


def test_stacked_and_compiled():
    given = {"norm": "none", "batch_size": 5, "options": {"lr": 0.05}, "dtype": torch.float32}
    assert on_gpu(["serial", {"name": "stacked", "compile": True}], **given) < 1e-5


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_bf16_is_the_same_to_its_rounding(norm):
    given = {
        "norm": norm,
        "batch_size": 5,
        "drop_last": True,
        "epochs": 2,
        "dtype": torch.float32,
        "device": CUDA,
    }
    start = sim.rounds(
        net=network(norm, dtype=torch.float32),
        given=images(torch.float32),
        who=sim.clients(SIZES),
        criterion=nn.CrossEntropyLoss(),
        device=CUDA,
    ).server.weights
    wide, *narrow = [trained("serial", **given)[0]] + [
        trained(name, precision="bf16", **given)[0] for name in ALL
    ]
    assert all(one.dtype == torch.float32 for one in narrow)
    whole = float((wide - start).norm())
    assert float((narrow[0] - wide).norm()) > 1e-4 * whole
    assert all(float((one - narrow[0]).norm()) < 0.02 * whole for one in narrow)


def test_several_groups_of_parameters_and_momentum():
    def optimizer(parameters, **options):
        first, *rest = parameters
        return torch.optim.SGD(
            [{"params": rest}, {"params": [first], "lr": 0.01, "momentum": 0.5}], **options
        )

    assert on_gpu(ALL, norm="group", optimizer=optimizer, batch_size=4, epochs=2) < 1e-10


def test_recordings_are_made_once():
    made = sim.rounds(executor="graph", device=CUDA, batch_size=4, number=3)
    made.run()
    assert isinstance(made.executor, Graph)
    recorded = dict(made.executor._recorded)
    assert sorted(recorded) == [1, 2, 3, 4]  # clients of 10, 25, 17 and 3 samples
    made.rounds = 5
    made.run()
    assert made.executor._recorded == recorded


def test_many_sizes_of_chunks_reuse_the_recordings_of_larger_ones(monkeypatch):
    monkeypatch.setattr("allhands.federated.executors.stacked._GRAPHS", 1)
    weights = []
    for executor in ("serial", "stacked"):
        made = sim.rounds(executor=executor, device=CUDA, batch_size=4)
        for cohort in ([0, 1, 2, 3], [0, 1, 2], [3], [1, 2]):
            made.select = lambda round_, cohort=cohort: cohort
            made.one_round()
        weights.append(made.server.weights)
    assert isinstance(made.executor, Stacked)
    assert list(made.executor._stacks) == [4]
    assert (weights[0] - weights[1]).abs().max() < 1e-10


def test_a_chunk_for_which_memory_runs_out_is_halved_and_nobody_is_trained_twice(
    monkeypatch, capsys
):
    from allhands.federated.executors.stack import Stack

    whole = Stack.gradient

    def gradient(self, *given):
        if len(self.rows) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return whole(self, *given)

    expected = trained("serial", batch_size=4, device=CUDA)[0]
    monkeypatch.setattr(Stack, "gradient", gradient)
    made = sim.rounds(
        net=network(),
        given=images(),
        who=sim.clients(SIZES),
        criterion=nn.CrossEntropyLoss(),
        number=2,
        executor={"name": "stacked", "chunk": 5},
        device=CUDA,
        batch_size=4,
    )
    made.run()
    assert made.executor.chunk == 2
    assert "going on with chunk=" in capsys.readouterr().out
    assert (made.server.weights - expected).abs().max() < 1e-10


class _Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.abs().max() > 0)


class _Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training)


def test_what_cannot_be_recorded_is_refused_by_name():
    made = sim.rounds(executor="graph", net=nn.Sequential(sim.model(), _Asks()), device=CUDA)
    with pytest.raises(Exception, match="cannot record a step"):
        made.one_round()
    with pytest.raises(UserError, match=r"draws numbers .*nn\.Dropout"):
        sim.rounds(executor="graph", net=nn.Sequential(sim.model(), _Draws()), device=CUDA)


def test_auto_times_those_that_do_not_refuse_and_says_so(capsys):
    made = sim.rounds(executor="auto", device=CUDA, batch_size=4, algorithm=Pulled())
    made.run()
    said = capsys.readouterr().out
    assert isinstance(made.executor, Auto)
    assert made.executor.chosen is not None
    assert f"executor: {made.executor.chosen.name} (" in said
    assert said.count(" ms") == 3
    assert on_gpu(["serial", "auto"], batch_size=4, norm="group") < 1e-10
    capsys.readouterr()
    made = sim.rounds(executor="auto", device=CUDA, net=nn.Sequential(sim.model(), _Draws()))
    made.run()
    said = capsys.readouterr().out
    assert "executor: serial (" in said
    assert "stacked refuses: the model draws" in said


def test_resnet_with_group_norm_in_float32():
    from allhands.models import ResNet18

    drawn = torch.Generator().manual_seed(1)
    given = torch.randn(40, 3, 32, 32, generator=drawn), torch.randint(10, (40,), generator=drawn)
    rows = []
    torch.manual_seed(2)
    net = ResNet18(norm="group")
    for executor in ("serial", "graph", "stacked"):
        made = sim.rounds(
            net=net,
            given=given,
            who=sim.clients((10, 14, 16)),
            criterion=nn.CrossEntropyLoss(),
            number=1,
            options={"lr": 0.01},
            executor=executor,
            device=CUDA,
            batch_size=8,
        )
        made.run()
        rows.append(made.server.weights)
    for other in rows[1:]:
        assert float((other - rows[0]).norm() / rows[0].norm()) < 1e-4


def test_tf32_does_not_make_the_trial_of_a_stack_refuse():
    from allhands.models import ResNet18

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    drawn = torch.Generator().manual_seed(1)
    given = torch.randn(20, 3, 32, 32, generator=drawn), torch.randint(10, (20,), generator=drawn)
    made = sim.rounds(
        net=ResNet18(norm="group"),
        given=given,
        who=sim.clients((10, 10)),
        criterion=nn.CrossEntropyLoss(),
        number=1,
        executor="stacked",
        device=CUDA,
        batch_size=10,
    )
    made.run()
    assert bool(made.server.weights.isfinite().all())
