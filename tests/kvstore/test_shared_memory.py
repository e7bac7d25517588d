"""`KVStore.buffer`: memory that servers read themselves gives what other memory gives, and is not
written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allhands import kvstore
from allhands.errors import UserError
from allhands.kvstore.shared_memory import SharedMemory, copy
from tests.kvstore.serving import job

# Over two chunks on one server, over 64 on two.
COUNT = 1_300_001


def _given(rank: int, dtype: torch.dtype, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    if not dtype.is_floating_point:
        return torch.randint(-9, 9, (1, COUNT), generator=draw).to(dtype)
    return torch.randn(1, COUNT, generator=draw).to(dtype)


@pytest.mark.parametrize(
    ("workers", "servers", "kind", "transport", "weighted", "optimizer", "dtype"),
    [
        (1, 1, "dist", "shared", False, None, torch.float32),
        (1, 1, "dist", "shared", True, "sgd", torch.float32),
        (2, 1, "dist", "shared", False, None, torch.int64),
        (2, 2, "dist", "shared", True, None, torch.float32),
        (3, 2, "dist", "shared", False, None, torch.bfloat16),
        (3, 1, "dist", "shared", True, "nag", torch.float32),
        (2, 1, "dist", "tcp", True, None, torch.float32),
        (1, 2, "dist_async", "shared", True, "nag", torch.float32),
    ],
)
def test_a_buffer_gives_the_same_bits_and_stays_as_it_is(
    workers: int,
    servers: int,
    kind: str,
    transport: str,
    weighted: bool,
    optimizer: str | None,
    dtype: torch.dtype,
) -> None:
    with job(workers, servers) as made:

        def work(rank: int) -> None:
            store = made.store(rank, kind, transport=transport)
            if optimizer is not None:
                options: dict[str, Any] = {"learning_rate": 0.1} | (
                    {"momentum": 0.9} if optimizer == "nag" else {}
                )
                store.set_optimizer(optimizer, options)
            for key in ("plain", "laid", "in_place"):
                store.init(key, torch.ones(1, COUNT, dtype=dtype))
            laid, in_place = store.buffer("laid"), store.buffer("in_place")
            assert store.buffer("laid") is laid
            assert laid.dtype == dtype
            assert torch.equal(laid, torch.zeros(1, COUNT, dtype=dtype))
            for step in range(3):
                given, weight = _given(rank, dtype, step), 2.0 + rank if weighted else None
                expected, out = torch.empty_like(given), torch.empty_like(given)
                store.pushpull("plain", given, expected, weight=weight)
                store.pushpull("laid", laid.copy_(given), out, weight=weight)
                assert torch.equal(out, expected)
                assert torch.equal(laid, given)
                store.pushpull("in_place", in_place.copy_(given), weight=weight)
                assert torch.equal(in_place, expected)

        made.run(work)


def test_a_buffer_is_not_copied_and_a_push_of_it_is() -> None:
    with job(2) as made:

        def work(rank: int) -> None:
            store = made.store(rank, transport="shared")
            store.init("w", torch.zeros(COUNT))
            buffer, out = store.buffer("w"), torch.empty(COUNT)
            regions = store.links[0]._regions.values()
            store.pushpull("w", buffer.fill_(1.0 + rank), out)
            assert out.unique().tolist() == [3.0]
            assert not any(region.count_nonzero() for region in regions)
            store.push("w", buffer)
            buffer.fill_(100.0)  # as any tensor may be changed once it is pushed
            assert store.pull("w").unique().tolist() == [3.0]
            store.pushpull("w", buffer.view(COUNT)[:COUNT])
            assert buffer.unique().tolist() == [200.0]

        made.run(work)


@pytest.mark.parametrize("options", [{"reduction": "mean"}, {"aggregate": "sum"}])
def test_gradients_that_a_trainer_computes_lie_in_buffers(options: dict[str, Any]) -> None:
    with job(2) as made:

        def work(rank: int) -> None:
            store, weight = (
                made.store(rank, transport="shared"),
                torch.nn.Parameter(torch.zeros(3, 2)),
            )
            trainer = kvstore.Trainer(
                {"w": weight},
                "sgd",
                {"learning_rate": 1.0, "momentum": 0.0},
                kvstore=store,
                **options,
            )
            gradient = torch.full((2, 3), 2.0 + rank).t()  # 2 and 3, for 1 and 2 samples
            weight.grad = gradient
            trainer.step(1 + rank)
            mean, sums = -(2.0 + 2 * 3.0) / 3, -(2.0 + 3.0 / 2)
            assert torch.equal(
                weight.detach(), torch.full((3, 2), mean if "reduction" in options else sums)
            )
            assert gradient.unique().tolist() == [2.0 + rank]
            # Worker 0's is where the server has made the sum, so that its buffer stays as it is.
            assert store.buffer("w").unique().tolist() == [
                2.0 * (1 + rank * 2) if "reduction" in options else 2.0 - rank / 2
            ]
            assert rank == 0 or not any(
                region.count_nonzero() for region in store.links[0]._regions.values()
            )

        made.run(work)


def test_every_store_has_buffers_for_dense_keys() -> None:
    store = kvstore.create("local")
    store.init(["w", "rows"], [torch.ones(2, 3, dtype=torch.float64), kvstore.RowSparse(10, 2)])
    buffer = store.buffer("w")
    assert buffer is store.buffer("w")
    assert buffer.tolist() == [[0.0] * 3] * 2
    store.pushpull("w", buffer.fill_(4.0))
    assert buffer.tolist() == [[4.0] * 3] * 2
    for key in ("rows", "none"):
        with pytest.raises(UserError, match=key):
            store.buffer(key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_copies_of_any_size(dtype: torch.dtype) -> None:
    memory = SharedMemory(4000)
    for count in (0, 1, 999):
        values = torch.arange(count).to(dtype)
        copy(memory.view(64, count, dtype), values)
        assert torch.equal(memory.view(64, count, dtype), values)
