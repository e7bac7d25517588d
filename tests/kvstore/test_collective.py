"""Workers without servers: each world is started once, and does everything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allhands
from allhands.kvstore import RowSparse, Trainer, create
from allhands.kvstore.row_table import first_rows
from allhands.launch import spawn
from tests.kvstore.collective_worlds import (
    CLIP,
    SAVED_AFTER,
    everything,
    keys_in_another_order,
    trained_on_gpus,
)
from tests.kvstore.training import OPTIMIZERS, SIZES, by_hand, largest_difference, model, take_steps
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


def rows_by_hand(workers: int) -> dict[str, torch.Tensor]:
    """The same, in one process, as dense rows of the few ids that are used."""
    count = 2**40
    ids = [5, 59_000_001, count - 1, *(2**33 + rank for rank in range(workers))]
    table = RowSparse(count, 3, std=0.5, seed=7)
    weights = {
        each: nn.Parameter(first_rows(table, torch.tensor([each]))[0])
        for each in (*ids, 3, 2**33 + 1)
    }
    dense = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([*weights.values(), dense], lr=0.1)
    found = {}
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(workers if step == 1 else 1):
            for row, each in enumerate([5, 59_000_001, 5, 2**33 + rank, count - 1]):
                gradient = (torch.arange(3.0) + 3 * row + 1) * (rank + 1) / workers
                previous = weights[each].grad
                weights[each].grad = gradient if previous is None else previous + gradient
        if step == 2:
            dense.grad = torch.ones(4)
            nn.utils.clip_grad_norm_([*weights.values(), dense], 2.0)
        optimizer.step()
        found[f"after {step}"] = torch.stack(
            [weights[each].detach() for each in (5, count - 1, 3, 2**33, 2**33 + 1, 5)]
        )
    return {**found, "dense": dense.detach()}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank found, in worlds of two and three, the second of which goes on where the first
    has saved."""
    folder = str(tmp_path_factory.mktemp("states"))
    return {workers: in_world(workers, everything, folder, workers) for workers in (2, 3)}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The same in a world of one, in this process."""
    yield everything(str(tmp_path), 1)
    allhands.finalize()


def check_trainings(found: dict[str, dict[str, torch.Tensor]]) -> None:
    for name in OPTIMIZERS:
        assert largest_difference(found[name], by_hand(name)) <= 1e-6, name
    assert largest_difference(found["in the workers"], by_hand("adam")) <= 1e-6
    assert largest_difference(found["allreduce_grads and update"], by_hand("momentum")) <= 1e-6
    assert largest_difference(found["a class that stores cannot run"], by_hand("sgd")) <= 1e-6
    clipped = by_hand("momentum", clip_norm=CLIP)
    assert largest_difference(clipped, by_hand("momentum")) > 1e-3  # the bound is felt
    assert largest_difference(found["clipped"], clipped) <= 1e-6
    assert largest_difference(found["clipped in the workers"], clipped) <= 1e-6


def test_one_worker(alone: dict[str, Any]) -> None:
    check_trainings(alone["trainings"])
    assert alone["parts"]["steps"] == {"a": 4.0, "b": 4.0, "c": 4.0}
    check_rows(alone["rows"], 1)
    # Bit for bit what a local store computes.
    for name, (optimizer, options, _) in OPTIMIZERS.items():
        net, store = model(), create("local")
        take_steps(
            net,
            Trainer(net, optimizer, options, kvstore=store, update_on_kvstore=True),
            store,
            range(len(SIZES)),
        )
        for key, value in net.state_dict().items():
            assert torch.equal(value, alone["trainings"][name][key]), (name, key)


# rare on 2: 3 have what 2 have.
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_steps_equal_those_of_one_process(
    worlds: dict[int, list[dict[str, Any]]], workers: int
) -> None:
    first, *others = worlds[workers]
    check_trainings(first["trainings"])
    for other in others:
        for name, weights in first["trainings"].items():
            assert all(
                torch.equal(other["trainings"][name][key], value) for key, value in weights.items()
            ), name


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_reductions_of_the_loss_and_sums_over_workers(
    worlds: dict[int, list[dict[str, Any]]], workers: int
) -> None:
    sizes = range(1, workers + 1)
    for world in worlds[workers]:
        assert world["reductions"] == pytest.approx(
            {
                "mean": sum(size**2 for size in sizes) / sum(sizes),
                "sum of means": sum(sizes),
                "sum of means of means": sum(sizes),
                "without a gradient on worker 0": sum(size**2 for size in sizes[1:]) / sum(sizes),
            },
            rel=1e-5,
        )


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_single_keys(worlds: dict[int, list[dict[str, Any]]], workers: int) -> None:
    ranks = range(workers)
    for rank, world in enumerate(worlds[workers]):
        found = world["keys"]
        assert torch.equal(found["first"], torch.full((2, 3), 5.0))
        assert torch.equal(found["sums"][0], torch.full((2, 3), float(sum(ranks) + workers)))
        assert found["sums"][1].tolist() == [0.5 * workers + sum(ranks)]
        assert torch.allclose(
            found["mean"], torch.tensor(6.0 * sum(ranks) / sum(each + 1 for each in ranks))
        )
        assert torch.allclose(
            found["stepped"], torch.tensor(1.0 - 0.1 * workers - 0.1 * 1.5 * workers)
        )
        assert "'9' was pushed already and not pulled since" in found["pushed twice"]
        assert (
            "the key '9' has shape [4] and torch.float32, but the key was initialised with [5]"
            in found["another shape"]
        )
        assert "there is no key '8' in the store" in found["unknown"]
        other = 0 if rank == workers - 1 else workers - 1
        assert f"worker {rank} is in" in found["other calls"]
        assert f"worker {other} in " in found["other calls"]
        assert "'barrier'" in found["other calls"]
        assert "'push [\"3\", null]'" in found["other calls"]


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_workers_whose_keys_differ_are_named(
    worlds: dict[int, list[dict[str, Any]]], workers: int
) -> None:
    last = workers - 1
    for rank, world in enumerate(worlds[workers]):
        who = f"this worker ({rank})" if rank == last else f"worker {last}"
        found = world["differing"]
        assert (
            f"the key 'other' is not the same on all workers: {who} has shape [4] of torch.float32"
            in found["shape"]
        )
        assert "worker 0 has shape [2] of torch.float32" in found["shape"]
        assert (
            f"the key 'only' is not the same on all workers: {who} does not have it, worker 0 has "
            "shape [1]" in found["missing"]
        )
        assert "the key 'of worker 0' is not the same on all workers" in found["of worker 0"]


def test_buckets_that_are_cut_keep_their_state(
    worlds: dict[int, list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    for workers in (2, 3):
        for world in worlds[workers]:
            assert world["parts"]["steps"] == {"a": 4.0, "b": 4.0, "c": 4.0}
            assert (world["parts"]["number"], world["parts"]["workers"]) == (4, workers)
            assert largest_difference(world["parts"]["weights"], alone["parts"]["weights"]) <= 1e-6
    assert float(alone["parts"]["weights"]["c"].abs().max()) > 0.1


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_a_worker_without_further_batches_does_not_stop_the_others(
    worlds: dict[int, list[dict[str, Any]]], workers: int
) -> None:
    for rank, world in enumerate(worlds[workers]):
        found = world["more"]
        # The gradient of step t is t, whoever takes part: 0 + 1 + 2 together, and 3 + 4 of worker 0
        # alone.
        assert found["moved"] == pytest.approx(10.0 if rank == 0 else 3.0)
        assert found["workers"] == (1 if rank == 0 else workers)
        assert "this worker has closed the store" in found["closed"]


def check_rows(found: dict[str, Any], workers: int) -> None:
    for name, expected in rows_by_hand(workers).items():
        assert float((found[name] - expected).abs().max()) <= 1e-6, name
    assert found["nothing"] == [0, 3]
    assert found["first"][0].abs().max() > 0.01  # normal numbers
    assert torch.equal(found["first"][0], found["first"][2])
    touched = sorted({5, 59_000_001, 2**40 - 1, *(2**33 + rank for rank in range(workers))})
    assert found["state"]["ids"].tolist() == touched
    assert found["state"]["step"].tolist() == [1 if 2**33 < each < 2**34 else 3 for each in touched]
    assert torch.equal(found["loaded"], found["own"])


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_rows_are_those_of_dense_tensors(
    worlds: dict[int, list[dict[str, Any]]], workers: int
) -> None:
    for world in worlds[workers]:
        check_rows(world["rows"], workers)


def test_states_go_on_with_another_number_of_workers(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    assert largest_difference(worlds[2][0]["states"], by_hand("adam", range(SAVED_AFTER))) <= 1e-6
    for world in worlds[3]:
        assert largest_difference(world["states"], by_hand("adam")) <= 1e-6


SCRIPT = """
import torch
from allhands import kvstore
from allhands.kvstore import SplitSampler, replicate, split_and_load

store = kvstore.create('dist')
generator = torch.Generator().manual_seed(0)
inputs, targets = (torch.randn(21, size, generator=generator) for size in (3, 2))
data = torch.utils.data.TensorDataset(inputs, targets)
sampler = SplitSampler(21, store.num_workers, store.rank)
train_data = torch.utils.data.DataLoader(data, 5, sampler=sampler)
ctx = ['cpu', 'cpu']
net = replicate(torch.nn.Linear(3, 2), ctx)
trainer = kvstore.Trainer(net.collect_params(), 'adam', {'learning_rate': .01}, kvstore=store)
loss = torch.nn.MSELoss(reduction='sum')
for batch in train_data:
    data, label = (split_and_load(part, ctx, even_split=False) for part in batch)
    for l in [loss(net(X), Y) for X, Y in zip(data, label)]:
        l.backward()
    trainer.step(batch[0].shape[0])
print('steps', trainer.last_step.number, 'workers', trainer.last_step.workers)
"""


def test_the_tutorials_script_with_one_batch_more_on_the_first_worker(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-c",
        "from allhands.cli.main import main; main()",
        "launch",
        "-n",
        "2",
        "train.py",
    ]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    # 11 samples are three batches, 10 are two.
    assert sorted(line for line in run.stdout.splitlines() if "steps" in line) == [
        "[0] steps 3 workers 1",
        "[1] steps 2 workers 2",
    ]
    assert "leaving the store" not in run.stderr


@pytest.mark.gpu(2)
def test_one_process_a_gpu() -> None:
    worlds = spawn(trained_on_gpus, workers=2)
    assert [found["where"] for found in worlds] == [["nccl", "cuda:0"], ["nccl", "cuda:1"]]
    for found in worlds:
        for name in OPTIMIZERS:
            assert largest_difference(found[name], by_hand(name)) <= 1e-5, name
            assert all(
                torch.equal(found[name][key], value) for key, value in worlds[0][name].items()
            )
        assert largest_difference(found["clipped"], by_hand("momentum", clip_norm=CLIP)) <= 1e-5
        assert largest_difference(found["in the workers"], by_hand("adam")) <= 1e-5
        check_rows(found["rows"], 2)
    assert [found["more"]["moved"] for found in worlds] == [pytest.approx(10.0), pytest.approx(3.0)]


def test_the_order_of_a_list_changes_nothing_and_that_of_calls_is_told() -> None:
    for pulled, told in in_world(2, keys_in_another_order):
        assert pulled == [[2.0], [20.0]]
        assert (
            "worker 0 makes 'of 0' while worker 1 makes 'of 1'. Without servers, workers make "
            "their keys in the same order" in told
        )
        assert (
            "write init([…], […]) with all keys in one call, in which their order changes nothing"
            in told
        )
