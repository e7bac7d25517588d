"""Workers without servers: each world is started once, and does everything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allhands
from allhands.errors import UserError
from allhands.kvstore import RowSparse, Share, Trainer, create
from allhands.kvstore.row_table import first_rows
from allhands.launch import spawn
from tests.kvstore.training import OPTIMIZERS, SIZES, by_hand, largest_difference, model, take_steps
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

CLIP = 0.4
SAVED_AFTER = 9


def trained(
    name: str, two_calls: bool = False, device: str | torch.device = "cpu", **options: Any
) -> dict[str, torch.Tensor]:
    store = create("dist_sync")
    net = model(seed=store.rank).to(device)  # worker 0's weights are taken
    optimizer, optimizer_params, _ = OPTIMIZERS[name]
    trainer = Trainer(net.named_parameters(), optimizer, optimizer_params, kvstore=store, **options)
    take_steps(net, trainer, store, range(len(SIZES)), two_calls)
    store.close()
    return {key: value.cpu() for key, value in net.state_dict().items()}


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return "no error"


def trainings() -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(name) for name in OPTIMIZERS}
    found["clipped"] = trained("momentum", clip_norm=CLIP)
    found["in the workers"] = trained("adam", update_on_kvstore=False)
    found["clipped in the workers"] = trained("momentum", update_on_kvstore=False, clip_norm=CLIP)
    found["allreduce_grads and update"] = trained(
        "momentum", update_on_kvstore=False, two_calls=True
    )
    found["a class that stores cannot run"] = trained_with_a_strange_class()
    return found


class Strange(torch.optim.SGD):
    """An optimizer that no server knows."""


def trained_with_a_strange_class() -> dict[str, torch.Tensor]:
    store = create("dist")
    net = model(seed=store.rank)
    trainer = Trainer(net, lambda params: Strange(params, lr=0.1), kvstore=store)
    take_steps(net, trainer, store, range(len(SIZES)))
    store.close()
    return dict(net.state_dict())


def single_keys() -> dict[str, Any]:
    store = create("dist")
    rank, workers = store.rank, store.num_workers
    store.init([3, 7], [torch.full((2, 3), 5.0 + rank), torch.zeros(1, dtype=torch.float64)])
    found: dict[str, Any] = {"first": store.pull(3)}
    store.push(
        [7, 3],
        [
            torch.tensor([0.5 + rank], dtype=torch.float64),
            [torch.full((2, 3), float(rank)), torch.ones(2, 3)],
        ],
    )
    found["sums"] = store.pull([3, 7])
    store.push(3, torch.full((2, 3), 6.0 * rank), weight=rank + 1)
    found["mean"] = store.pull(3)
    store.init(9, torch.full((5,), 1.0))
    store.set_optimizer("sgd", lr=0.1, momentum=0.5)
    for _ in range(2):
        store.push(9, torch.ones(5))
        found["stepped"] = store.pull(9)
    found["pushed twice"] = message_of(lambda: [store.push(9, torch.ones(5)) for _ in range(2)])
    found["another shape"] = message_of(lambda: store.push(9, torch.ones(4)))
    found["unknown"] = message_of(lambda: store.push(8, torch.ones(4)))
    found["other calls"] = message_of(
        lambda: store.push(3, torch.ones(2, 3)) if rank == workers - 1 else store.barrier()
    )
    store.barrier()
    store.close()
    return found


def differing_keys() -> dict[str, Any]:
    store = create("dist")
    last = store.rank == store.num_workers - 1
    shapes = {"same": torch.zeros(3), "other": torch.zeros(4 if last else 2)}
    found = {"shape": message_of(lambda: store.declare(shapes, complete=True))}
    fewer = {"same": torch.zeros(3)} | ({} if last else {"only": torch.zeros(1)})
    found["missing"] = message_of(lambda: store.declare(fewer, complete=True))
    alone = {"same": torch.zeros(3)} | ({} if store.rank else {"of worker 0": torch.zeros(1)})
    found["of worker 0"] = message_of(lambda: store.declare(alone, complete=True))
    store.declare({"same": torch.zeros(3)}, complete=True)  # nothing of the failed ones is left
    store.close()
    return found


def reductions() -> dict[str, float]:
    """How far SGD with lr=1 moves a weight whose gradient is the input: rank + 1 samples of the
    value rank + 1."""
    found = {}
    for name, options in (
        ("mean", {"reduction": "mean"}),
        ("sum of means", {"aggregate": "sum"}),
        ("sum of means of means", {"aggregate": "sum", "reduction": "mean"}),
        ("without a gradient on worker 0", {}),
    ):
        store = create("dist")
        net = nn.Linear(1, 1, bias=False)
        trainer = Trainer(net, "sgd", {"lr": 1.0}, kvstore=store, **options)  # type: ignore[arg-type]
        before, size = net.weight.item(), store.rank + 1
        output = net(torch.full((size, 1), float(size)))
        if not name.startswith("without"):
            (output.mean() if "reduction" in options else output.sum()).backward()
            trainer.step(size)
        else:
            if store.rank > 0:
                output.sum().backward()
            trainer.step(size, ignore_stale_grad=True)
        found[name] = before - net.weight.item()
        store.close()
    return found


def parts_of_a_step() -> dict[str, Any]:
    """Some keys now, others later: the store cuts its buckets, and nobody's state is lost."""
    store = create("dist")
    store.declare({"a": torch.zeros(5), "b": torch.zeros(3), "c": torch.zeros(2, 2)})
    store.set_optimizer("adam", lr=0.1)
    outs = {"a": torch.empty(5), "b": torch.empty(3), "c": torch.empty(2, 2)}
    for names in (["a", "b", "c"], ["a", "c"], ["b"], ["a", "b", "c"]):
        grads = {
            name: torch.linspace(-1, 2, outs[name].numel()).view_as(outs[name]) for name in names
        }
        step = store.update(grads, outs, Share(2.0, 1.0))
    # A worker without samples has no keys, and follows.
    grads = {name: torch.ones_like(out) for name, out in outs.items()} if store.rank == 0 else {}
    store.update(grads, outs, Share(1.0 if grads else 0.0, 1.0), clip_norm=3.0 if grads else None)
    steps = {name: numbers["step"] for name, numbers in store.state().numbers.items()}
    store.close()
    return {"weights": outs, "steps": steps, "number": step.number, "workers": step.workers}


def rows() -> dict[str, Any]:
    """A table of 2**40 rows: ids that are pushed twice, by several workers and by nobody, and a
    worker without any."""
    store = create("dist")
    rank, count = store.rank, 2**40
    store.init("table", RowSparse(count, 3, std=0.5, seed=7))
    ids = torch.tensor([5, 59_000_001, 5, 2**33 + rank, count - 1])
    found: dict[str, Any] = {"first": store.row_sparse_pull("table", row_ids=ids)}
    store.set_optimizer("adam", lr=0.1)
    dense = torch.zeros(4)
    store.init("dense", dense)
    for step in range(3):
        mine = ids if rank == 0 or step == 1 else ids[:0]
        values = (torch.arange(float(3 * len(mine))).view(-1, 3) + 1) * (rank + 1)
        pushed = torch.sparse_coo_tensor(mine[None], values, (count, 3), check_invariants=True)
        if step < 2:
            store.push("table", pushed, weight=1)
        else:
            store.update(
                {"table": pushed, "dense": torch.ones(4)},
                {"dense": dense},
                Share(1.0, 1.0),
                clip_norm=2.0,
            )
        found[f"after {step}"] = store.row_sparse_pull(
            "table", row_ids=torch.tensor([5, count - 1, 3, 2**33, 2**33 + 1, 5])
        )
    found["dense"] = dense
    found["nothing"] = list(store.row_sparse_pull("table", row_ids=ids[:0]).shape)
    state = store.state()
    found["state"] = state.tensors["table"]
    again = create("dist")
    again.declare({"table": RowSparse(count, 3, std=0.5, seed=7), "dense": dense})
    again.set_optimizer("adam", lr=0.1)
    again.load_state(state)
    found["loaded"] = again.row_sparse_pull("table", row_ids=ids[1:])
    found["own"] = store.row_sparse_pull("table", row_ids=ids[1:])
    for each in (store, again):
        each.close()
    return found


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


def more_batches_here() -> dict[str, Any]:
    """Worker 0 takes two more steps than the others, which have left the store meanwhile."""
    store = create("dist")
    net = nn.Linear(1, 1, bias=False)
    trainer = Trainer(net, "sgd", {"lr": 1.0}, kvstore=store)
    store_of_sums = create("dist")
    other_net = nn.Linear(1, 1)
    other = Trainer(other_net, "sgd", {"lr": 1.0}, kvstore=store_of_sums, update_on_kvstore=False)
    before = net.weight.item()
    for step in range(5 if store.rank == 0 else 3):
        net(torch.full((2, 1), float(step))).sum().backward()
        trainer.step(2)
    workers = trainer.last_step.workers if trainer.last_step else 0
    if store.rank == 0:  # in one store, while the others leave another one
        other_net(torch.ones(1, 1)).sum().backward()
        other.step(1)
    store.close()
    store_of_sums.close()
    return {
        "moved": before - net.weight.item(),
        "workers": workers,
        "closed": message_of(store.barrier),
    }


def continued(folder: str, saves: bool) -> dict[str, torch.Tensor]:
    """Steps before the states are saved, or after they are loaded, here with another number of
    workers."""
    store = create("dist")
    net = model()
    if not saves:
        net.load_state_dict(torch.load(f"{folder}/weights.pt"))
    trainer = Trainer(net, "adam", {"learning_rate": 0.01}, kvstore=store)
    if saves:
        take_steps(net, trainer, store, range(SAVED_AFTER))
        trainer.save_states(f"{folder}/states")
        if store.rank == 0:
            torch.save(net.state_dict(), f"{folder}/weights.pt")
    else:
        trainer.load_states(f"{folder}/states")
        take_steps(net, trainer, store, range(SAVED_AFTER, len(SIZES)))
    store.close()
    return dict(net.state_dict())


def everything(folder: str, workers: int) -> dict[str, Any]:
    return {
        "trainings": trainings(),
        "keys": single_keys(),
        "differing": differing_keys() if workers > 1 else None,
        "parts": parts_of_a_step(),
        "reductions": reductions() if workers > 1 else None,
        "rows": rows(),
        "more": more_batches_here() if workers > 1 else None,
        "states": continued(folder, saves=workers < 3),
    }


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


def trained_on_gpus() -> dict[str, Any]:
    world = allhands.init()
    found: dict[str, Any] = {name: trained(name, device=world.device) for name in OPTIMIZERS}
    found["clipped"] = trained("momentum", device=world.device, clip_norm=CLIP)
    found["in the workers"] = trained("adam", device=world.device, update_on_kvstore=False)
    found["more"] = more_batches_here()
    found["rows"] = rows()
    found["where"] = [world.backend, str(world.device)]
    allhands.finalize()
    return found


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


def keys_in_another_order() -> tuple[list[list[float]], str]:
    store = create("dist")
    keys = ["a", "b"] if store.rank == 0 else ["b", "a"]
    store.init(keys, [torch.zeros(1)] * 2)
    store.push(keys, [torch.full((1,), 1.0 if key == "a" else 10.0) for key in keys])
    pulled = [value.tolist() for value in store.pull(["a", "b"])]
    return pulled, message_of(lambda: store.init(f"of {store.rank}", torch.zeros(1)))


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
