"""`clip_norm` with keys of rows on servers, against a loop with a dense gradient of the table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from allhands.kvstore import KVStore, RowSparse, Share, create
from tests.kvstore.serving import job

ROWS, COLUMNS, STEPS = 12, 3, 6
CLIPS = (None, 0.7, 50.0)  # the last one bounds nothing


def pushed(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Ids, some of them twice, their rows, a dense gradient, and samples; a worker without samples
    in one step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    if rank == 1 and step == 3:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, COLUMNS), torch.zeros(5), 0
    ids = torch.randint(ROWS, (7,), generator=generator)
    return (
        ids,
        torch.randn(7, COLUMNS, generator=generator),
        torch.randn(5, generator=generator),
        2 + rank,
    )


def by_hand(workers: range, only_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    table, weight = nn.Parameter(torch.zeros(ROWS, COLUMNS)), nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([table, weight], lr=0.1)
    for step in range(STEPS):
        parts = [pushed(rank, step) for rank in workers]
        samples = sum(count for *_, count in parts)
        if not samples:
            continue
        table.grad, weight.grad = torch.zeros(ROWS, COLUMNS), torch.zeros(5)
        for ids, rows, dense, _ in parts:
            table.grad.index_add_(0, ids, rows / samples)
            weight.grad += 0 if only_rows else dense / samples
        clip = CLIPS[step % 3]
        if clip is not None:
            nn.utils.clip_grad_norm_([table, weight], clip)
        optimizer.step()
    return table.detach(), weight.detach()


def trained(store: KVStore, only_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    store.set_optimizer("sgd", lr=0.1)
    store.init(["table", "w"], [RowSparse(ROWS, COLUMNS), torch.zeros(5)])
    for step in range(STEPS):
        ids, rows, dense, samples = pushed(store.rank, step)
        grads = {
            "table": torch.sparse_coo_tensor(
                ids[None], rows, (ROWS, COLUMNS), check_invariants=True
            )
        }
        if not only_rows:
            grads["w"] = dense
        outs = {} if only_rows else {"w": torch.empty(5)}
        told = store.update(grads, outs, Share(samples, 1.0), [{"lr": 0.1}], CLIPS[step % 3])
        if store.mode.wait == "sync":
            assert told.workers == store.num_workers
            assert told.number == step + 1
    return store.row_sparse_pull("table", row_ids=torch.arange(ROWS)), store.pull("w")


@pytest.mark.parametrize("only_rows", [False, True])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (3, 2)])
def test_the_norm_of_all_keys_bounds_dense_ones_and_rows(
    workers: int, servers: int, only_rows: bool
) -> None:
    expected = by_hand(range(workers), only_rows)
    with job(workers, servers) as made:
        found = made.run(lambda rank: trained(made.store(rank), only_rows))
    for one in found:
        for ours, theirs in zip(one, expected, strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-6
    if workers == 1:
        assert all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(found[0], trained(create("local"), only_rows), strict=True)
        )


def test_without_waiting_each_worker_bounds_its_own() -> None:
    with job(1) as made:
        found = made.run(lambda rank: trained(made.store(rank, "dist_async"), False))[0]
    for ours, theirs in zip(found, by_hand(range(1), False), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-6
