"""Compression without servers: the numbers of a job with one server, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import allhands
from allhands.errors import UserError
from allhands.kvstore import KVStore, RowSparse, Share, create
from tests.kvstore.serving import job
from tests.worlds import in_world

SIZES = {"a": (37,), "b": (5, 7), "c": (525_000,)}  # "c" is two pieces
COMPRESSIONS: list[dict[str, Any]] = [
    {"type": "fp16"},
    {"type": "bf16", "pull": "none"},
    {"type": "1bit"},
    {"type": "topk", "keep": 0.2},
    {"type": "2bit", "threshold": 0.3, "pull": {"type": "topk", "keep": 0.5}},
    {"type": "none", "pull": "bf16"},
]


def grads(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in SIZES.items()}


def steps(
    store: KVStore, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Clipped steps with momentum, of which the second worker has no samples in one; what it has in
    the end, and residuals."""
    first = grads(9, 9, dtype)
    store.set_optimizer("sgd", lr=0.1, momentum=0.9)
    if "pull" in options:  # before keys are made, or after
        store.set_gradient_compression(options)
    store.declare(first, complete=True)
    if "pull" not in options:
        store.set_gradient_compression(options)
    outs = {name: torch.empty_like(value) for name, value in first.items()}
    for step in range(5):
        idle = step == 2 and store.rank == 1
        given = (
            {name: torch.zeros_like(value) for name, value in first.items()}
            if idle
            else grads(store.rank, step, dtype)
        )
        store.update(
            given,
            outs,
            Share(0 if idle else 1 + store.rank, 1.0),
            [{"lr": 0.1 / (1 + step)}],
            3.0 if step % 2 else None,
        )
    state = store.state()
    found = outs | {f"{name} kept": value for name, value in store.residuals().items()}
    return found | {f"{name} momentum": state.tensors[name]["momentum_buffer"] for name in SIZES}


def sums(store: KVStore, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """No optimizer: sums that come back with error feedback, by push, by another set of keys, and
    by reduce."""
    store.set_gradient_compression(options)
    store.declare(grads(9, 9))
    found = {}
    for step in range(3):
        given = grads(store.rank, step)
        for name in ("c", "a"):
            store.push(name, given[name], weight=1 + store.rank)
            found[f"{name} {step}"] = store.pull(name)
        some = {name: given[name] for name in (("a", "b") if step % 2 else ("b", "c"))}
        store.reduce(some, Share(1.0, None))
        found |= {f"{name} {step} reduced": value for name, value in some.items()}
    return found


def all_of(make: Any) -> list[dict[str, torch.Tensor]]:
    found = [steps(make(number), options) for number, options in enumerate(COMPRESSIONS)]
    found.append(steps(make(10), {"type": "topk", "keep": 0.3, "pull": "none"}, torch.bfloat16))
    found.append(sums(make(11), {"type": "topk", "keep": 0.3}))
    return [*found, sums(make(12), {"type": "fp16"})]


def assert_same(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.keys() == other.keys()
        for name, value in one.items():
            # torch rounds bfloat16 in another way at the end of a tensor than within, and tensors
            # are not cut alike.
            rounding = 2**-7 if value.dtype == torch.bfloat16 else 0.0
            assert torch.allclose(value, other[name], rtol=rounding, atol=rounding), (number, name)


def without_servers() -> Any:
    found = all_of(lambda number: create("dist"))
    store = create("dist")
    store.set_gradient_compression({"type": "fp16"})
    store.set_optimizer("sgd", lr=1.0)
    store.init("w", torch.zeros(8))
    told = []
    for value, rate in (
        (float("nan"), 1.0),
        (1.0, 1.0),
        (100.0, 3e38),
    ):  # the last one's weights are infinite
        # The others do not even begin the step of a worker that is refused.
        if store.rank or value > 0:
            try:
                store.update({"w": torch.full((8,), value)}, {}, Share(), [{"lr": rate}])
                told.append("")
            except UserError as error:
                told.append(str(error))
    return found, told, closes_early()


def closes_early() -> torch.Tensor:
    """Worker 1 leaves after one step; what it had kept goes into the steps of worker 0."""
    store = create("dist")
    store.set_gradient_compression({"type": "topk", "keep": 0.1, "pull": "none"})
    store.set_optimizer("sgd", lr=1.0)
    store.init("w", torch.zeros(10))
    out = torch.zeros(10)
    for _ in range(1 if store.rank else 14):
        store.update(
            {"w": torch.arange(10.0) if store.rank else torch.zeros(10)}, {"w": out}, Share()
        )
    store.close()
    return out


# rare: test_collective.py trains several workers without servers.
@pytest.mark.rare
@pytest.mark.serial
def test_the_same_as_with_one_server() -> None:
    workers = 3
    with job(workers, servers=1) as made:
        expected = made.run(lambda rank: all_of(lambda number: made.store(rank, number=number)))
    found = in_world(workers, without_servers)
    for rank, (ours, told, left) in enumerate(found):
        assert_same(ours, expected[rank])
        assert not rank or told.pop(0).startswith("8 of 8 values for 'w' are NaN or infinite")
        assert told[0] == ""
        assert told[1].startswith("on worker 0: 8 of 8 values for 'w' are NaN or infinite")
        if rank == 0:
            assert torch.equal(left, -(workers - 1) * torch.arange(10.0))


def test_one_worker_too() -> None:
    with job(1) as made:
        expected = made.run(lambda rank: all_of(lambda number: made.store(rank, number=number)))[0]
    for kind in ("local", "device", "dist"):
        assert_same(all_of(lambda number, kind=kind: create(kind)), expected)
    allhands.finalize()


def test_residuals_go_on_in_another_store() -> None:
    options = {"type": "topk", "keep": 0.1, "pull": "none"}

    def made() -> KVStore:
        store = create("local")
        store.set_gradient_compression(options)
        store.init(["a", "b"], [torch.zeros(37), torch.zeros(5, 7)])
        return store

    def pushed(store: KVStore, some: range) -> list[torch.Tensor]:
        found = []
        for step in some:
            given = grads(0, step)
            store.push(["a", "b"], [given["a"], given["b"]])
            found += store.pull(["a", "b"])
        return found

    whole = pushed(made(), range(8))
    first, second = made(), made()
    halves = pushed(first, range(4))
    second.load_residuals(first.residuals())
    halves += pushed(second, range(4, 8))
    assert all(torch.equal(one, other) for one, other in zip(whole, halves, strict=True))
    with pytest.raises(UserError, match="38 numbers for 'a', which has 37"):
        second.load_residuals({"a": torch.zeros(38)})
    with pytest.raises(UserError, match="call set_gradient_compression first"):
        create("local").load_residuals(first.residuals())


def test_what_is_never_compressed_and_turning_it_off() -> None:
    store = create("local")
    store.set_gradient_compression({"type": "2bit"})
    store.init(
        ["exact", "rows", "narrow"],
        [torch.zeros(2, dtype=torch.float64), RowSparse(9, 2), torch.zeros(2)],
    )
    store.push("exact", torch.full((2,), 0.1, dtype=torch.float64))
    store.push(
        "rows",
        torch.sparse_coo_tensor(
            torch.tensor([[4]]), torch.full((1, 2), 0.1), (9, 2), check_invariants=True
        ),
    )
    store.push("narrow", torch.tensor([0.1, -0.7]))
    assert store.pull("exact").tolist() == [0.1, 0.1]
    assert (
        store.row_sparse_pull("rows", row_ids=torch.tensor([4])).tolist()
        == torch.full((1, 2), 0.1).tolist()
    )
    assert store.pull("narrow").tolist() == [0.0, -0.5]
    store.set_gradient_compression({"type": "none"})
    assert store.residuals() == {}
    store.push("narrow", torch.tensor([0.1, -0.7]))
    assert torch.equal(store.pull("narrow"), torch.tensor([0.1, -0.7]))
    for options, said in (
        ({"type": "3bit"}, "there is no codec '3bit'"),
        ({"threshold": 1.0}, "write the name of a codec"),
    ):
        with pytest.raises(UserError, match=said):
            store.set_gradient_compression(options)
