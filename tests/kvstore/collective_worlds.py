"""What workers without servers do in the worlds of test_collective."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import allhands
from allhands.kvstore import RowSparse, Share, Trainer, create
from tests.kvstore.training import OPTIMIZERS, SIZES, model, take_steps
from tests.refusals import refused

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
    found["pushed twice"] = refused(lambda: [store.push(9, torch.ones(5)) for _ in range(2)])
    found["another shape"] = refused(lambda: store.push(9, torch.ones(4)))
    found["unknown"] = refused(lambda: store.push(8, torch.ones(4)))
    found["other calls"] = refused(
        lambda: store.push(3, torch.ones(2, 3)) if rank == workers - 1 else store.barrier()
    )
    store.barrier()
    store.close()
    return found


def differing_keys() -> dict[str, Any]:
    store = create("dist")
    last = store.rank == store.num_workers - 1
    shapes = {"same": torch.zeros(3), "other": torch.zeros(4 if last else 2)}
    found = {"shape": refused(lambda: store.declare(shapes, complete=True))}
    fewer = {"same": torch.zeros(3)} | ({} if last else {"only": torch.zeros(1)})
    found["missing"] = refused(lambda: store.declare(fewer, complete=True))
    alone = {"same": torch.zeros(3)} | ({} if store.rank else {"of worker 0": torch.zeros(1)})
    found["of worker 0"] = refused(lambda: store.declare(alone, complete=True))
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
        "closed": refused(store.barrier),
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


def keys_in_another_order() -> tuple[list[list[float]], str]:
    store = create("dist")
    keys = ["a", "b"] if store.rank == 0 else ["b", "a"]
    store.init(keys, [torch.zeros(1)] * 2)
    store.push(keys, [torch.full((1,), 1.0 if key == "a" else 10.0) for key in keys])
    pulled = [value.tolist() for value in store.pull(["a", "b"])]
    return pulled, refused(lambda: store.init(f"of {store.rank}", torch.zeros(1)))
