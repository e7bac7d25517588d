"""The optimizer's state on servers: saved by some workers and servers, and gone on with by
others."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from allhands.kvstore import RowSparse, Share, Trainer, create, placement, shard_keys
from allhands.kvstore.server_states import take_apart
from allhands.kvstore.store_state import StoreState, read_states
from tests.kvstore.serving import Job, Weights, error_of, job, same, weights_of
from tests.kvstore.training import OPTIMIZERS, SIZES, by_hand, largest_difference, model, take_steps

SAVED_AFTER = 9


def part(
    made: Job,
    name: str,
    steps: range,
    start: Weights | None,
    load: Path | None,
    save: Path | None,
    number: int = 0,
    **options: Any,
) -> list[Weights]:
    """Some steps of the small training, from `start` and what `load` has; all workers' weights in
    the end."""
    nets = [model(seed=rank) for rank in range(made.workers)]

    def work(rank: int) -> Weights:
        store = made.store(rank, number=number)
        net = nets[rank]
        if start is not None and rank == 0:  # worker 0's weights are taken
            net.load_state_dict(start)
        trainer = Trainer(net, OPTIMIZERS[name][0], OPTIMIZERS[name][1], kvstore=store, **options)
        if load is not None:
            trainer.load_states(load)
            assert trainer._num_update == SAVED_AFTER
        take_steps(net, trainer, store, steps)
        if save is not None:
            trainer.save_states(save)
        assert trainer.last_step is not None
        assert trainer.last_step.number == steps.stop or not trainer._on_store
        store.close()
        return weights_of(net)

    return made.run(work)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_a_training_goes_on_with_other_workers_and_servers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "states"
    with job(2, servers=2) as made:
        whole = part(made, name, range(len(SIZES)), None, None, tmp_path / "whole", 0)
        first = part(made, name, range(SAVED_AFTER), None, None, path, 1)
        same_again = part(
            made, name, range(SAVED_AFTER, len(SIZES)), first[0], path, tmp_path / "second", 2
        )
    assert same(same_again[0], whole[0])  # bit for bit
    one, two = read_states(tmp_path / "whole")[0], read_states(tmp_path / "second")[0]
    assert one.step == two.step == len(SIZES)
    assert one.numbers == two.numbers
    assert all(same(one.tensors[key], two.tensors[key]) for key in one.tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_keys, "place", functools.partial(placement.place, chunk_bytes=12))
        with job(2, servers=3) as made:  # cut in another way, on other servers: the same sums
            assert same(
                part(made, name, range(SAVED_AFTER, len(SIZES)), first[0], path, None)[1], whole[0]
            )
        with job(3, servers=3) as made:
            others = part(made, name, range(SAVED_AFTER, len(SIZES)), first[0], path, None)
    for weights in others:
        assert largest_difference(weights, whole[0]) <= 1e-6
        assert largest_difference(weights, by_hand(name)) <= 1e-6


def test_states_go_to_and_from_one_process_and_optimizers_in_the_workers(tmp_path: Path) -> None:
    path = tmp_path / "states"
    with job(2, servers=3) as made:
        first = part(made, "adam", range(SAVED_AFTER), None, None, path)
    net, store = model(), create("local")
    net.load_state_dict(first[0])
    trainer = Trainer(net, "adam", {"lr": 0.01}, kvstore=store)
    trainer.load_states(path)
    take_steps(net, trainer, store, range(SAVED_AFTER, len(SIZES)))
    assert largest_difference(weights_of(net), by_hand("adam")) <= 1e-6

    net, store = model(), create("local")
    trainer = Trainer(net, "adam", {"lr": 0.01}, kvstore=store)
    take_steps(net, trainer, store, range(SAVED_AFTER))
    trainer.save_states(path)
    with job(2, servers=2) as made:
        served = part(made, "adam", range(SAVED_AFTER, len(SIZES)), weights_of(net), path, None, 0)
        here = part(
            made,
            "adam",
            range(SAVED_AFTER, len(SIZES)),
            weights_of(net),
            path,
            None,
            1,
            update_on_kvstore=False,
        )
    assert largest_difference(served[1], by_hand("adam")) <= 1e-6
    assert largest_difference(here[1], by_hand("adam")) <= 1e-6


def test_the_stores_own_methods_and_rows(tmp_path: Path) -> None:
    table, path = RowSparse(2**40, 2, std=0.1), tmp_path / "states"
    ids = torch.tensor([3, 2**33, 8, 2**40 - 1])

    def rows(rank: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            ids[None], torch.full((4, 2), 1.0 + rank), (table.rows, 2), check_invariants=True
        )

    def step(store: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        store.push("w", torch.full((5,), 1.0 + rank))
        store.push("table", rows(rank))
        return store.pull("w"), store.row_sparse_pull("table", row_ids=ids)

    def begin(rank: int) -> Any:
        store = made.store(rank)
        assert "no optimizer" in error_of(lambda: store.save_optimizer_states(path))
        store.set_optimizer("adam", lr=0.1)
        store.init("w", torch.zeros(5))
        store.init("table", table)
        first = [step(store, rank) for _ in range(3)][-1]
        store.save_optimizer_states(path, dump_optimizer=True)
        return first, [step(store, rank) for _ in range(2)][-1], store.state()

    def go_on(rank: int) -> Any:
        store = made.store(rank)
        if rank == 0:
            store.declare({"w": weights, "table": table})
        else:
            store.declare({"w": torch.zeros(5), "table": table})
        store.load_optimizer_states(path)  # with the optimizer
        assert store.optimizer is not None
        assert store.optimizer.name == "adam"
        return [step(store, rank) for _ in range(2)][-1], store.state()

    with job(2, servers=2) as made:
        ((weights, _), expected, state), _ = made.run(begin)
    assert sorted(state.tensors["table"]) == ["exp_avg", "exp_avg_sq", "ids", "rows", "step"]
    assert state.tensors["table"]["ids"].tolist() == sorted(ids.tolist())
    assert state.tensors["table"]["step"].tolist() == [5] * 4
    assert state.numbers["w"] == {"step": 5.0}
    with job(2, servers=3) as made:
        for found, again in made.run(go_on):
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])  # rows are part of the state
            assert again.step == state.step
            assert again.numbers == state.numbers
            assert all(same(again.tensors[key], state.tensors[key]) for key in state.tensors)


def test_states_that_do_not_fit_are_told_on_the_worker_that_loads(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        store = made.store(rank)
        store.set_optimizer("sgd", lr=1.0, momentum=0.9)
        store.init("w", torch.zeros(4))
        if rank == 1:
            return []
        pieces = store._pieces
        return [
            error_of(
                lambda: take_apart(
                    StoreState(1, {"v": {"momentum_buffer": torch.zeros(4)}}, {}), pieces, {}, 2
                )
            ),
            error_of(
                lambda: take_apart(
                    StoreState(1, {"w": {"momentum_buffer": torch.zeros(5)}}, {}), pieces, {}, 2
                )
            ),
            error_of(lambda: store.load_optimizer_states(tmp_path / "none")),
        ]

    with job(2, servers=2) as made:
        unknown, size, missing = made.run(work)[0]
    assert "the state has the key 'v', which is not in the store: w" in unknown
    assert "the state 'momentum_buffer' of 'w' has 5 numbers; the key has 4" in size
    assert missing == f"there is no file {tmp_path / 'none'}"


def test_a_state_of_no_steps_begins_anew() -> None:
    def work(rank: int) -> torch.Tensor:
        store = made.store(rank)
        store.set_optimizer("sgd", lr=1.0, momentum=0.5)
        store.init("w", torch.zeros(2))
        empty = store.state()
        for _ in range(3):
            store.push("w", torch.ones(2))
            before = store.pull("w")
        store.load_state(empty)
        store.push("w", torch.ones(2))
        return store.pull("w") - before

    with job(2) as made:
        for moved in made.run(work):
            assert moved.tolist() == [-2.0, -2.0]  # without what the momentum was


def test_a_state_is_that_of_all_that_was_pushed_before() -> None:
    with job(1) as made:
        store = made.store(0, "dist_async")
        store.set_optimizer("adam", lr=1.0)
        store.init("w", torch.zeros(2))
        for number in range(20):
            store.push("w", torch.ones(2), priority=-3)
            assert store.state().numbers["w"]["step"] == number + 1
        assert store.update({"w": torch.ones(2)}, {}, Share()).number == 21
