from __future__ import annotations

from typing import Any

import pytest
import torch

from allhands.errors import UserError
from allhands.kvstore import specs
from allhands.kvstore.optimizers import create
from allhands.kvstore.row_table import RowTable, first_rows, sum_rows
from allhands.kvstore.values import RowSparse

HUGE = 2**40
FAR = torch.tensor(
    [0, 1, 2**24, 2**24 + 1, 59_999_999, 2**31 - 1, 2**31, 2**31 + 1, 2**32, HUGE - 1]
)

CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.01}),
    ("adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("adam", {"betas": (0.7, 0.9)}),
    ("adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("adamw", {}),
    ("rmsprop", {}),
    ("rmsprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.01}),
]


def identify(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value)


def dense(name: str, weight: torch.Tensor, options: dict[str, Any]) -> torch.optim.Optimizer:
    return specs.CLASSES[name]([weight], foreach=False, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CASES, ids=identify)
def test_rows_that_are_all_in_each_push_equal_the_dense_optimizer_bit_for_bit(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    form = RowSparse(37, 5, std=0.5, seed=2, dtype=dtype)
    table = RowTable(form, create(name, **options))
    every = torch.arange(37)
    weight = table.pull(every).requires_grad_()
    optimizer = dense(name, weight, options)
    for step in range(15):
        pushes = [
            (
                torch.cat(
                    [
                        torch.randperm(37, generator=generator),
                        torch.randint(37, (20,), generator=generator),
                    ]
                ),
                torch.randn(57, 5, generator=generator, dtype=dtype),
            )
            for _ in range(3)
        ]
        weight.grad = torch.zeros(37, 5, dtype=dtype)
        for ids, rows in pushes:
            weight.grad.index_add_(0, ids, rows)
        ids, rows = sum_rows(pushes)
        assert torch.equal(ids, every)
        assert torch.allclose(rows, weight.grad, rtol=1e-5, atol=1e-5)
        weight.grad.copy_(rows)  # whatever order index_add has
        rate = 0.1 / (1 + step // 3)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        table.push(ids, rows, {"lr": rate})
    assert torch.equal(table.pull(every), weight.detach())
    assert not torch.equal(table.pull(every), first_rows(form, every))


@pytest.mark.parametrize(("name", "options"), CASES, ids=identify)
def test_each_row_goes_its_own_way_when_it_is_touched_now_and_then(
    name: str, options: dict[str, Any]
) -> None:
    """Each row equals a dense optimizer of its own that only steps when the row is pushed; also
    over a reload, split over two."""
    generator = torch.Generator().manual_seed(3)
    form = RowSparse(HUGE, 3, std=0.5)
    tables = [RowTable(form, create(name, **options))]
    weights = [row.clone().requires_grad_() for row in tables[0].pull(FAR)]
    optimizers = [dense(name, weight, options) for weight in weights]
    for step in range(24):
        touched = (torch.rand(len(FAR), generator=generator) < 0.4).nonzero().view(-1)
        grads = torch.randn(len(touched), 3, generator=generator)
        for which, grad in zip(touched.tolist(), grads, strict=True):
            weights[which].grad = grad.clone()
            optimizers[which].step()
        if step == 12:
            state = tables[0].state()
            assert torch.equal(state["ids"], state["ids"].sort().values)
            tables = [RowTable(form, create(name, **options)) for _ in range(2)]
            for rest, table in enumerate(tables):
                mine = (state["ids"] % 2 == rest).nonzero().view(-1).flip(0)
                table.load({part: value[mine] for part, value in state.items()})
        for rest, table in enumerate(tables):
            mine = FAR[touched] % len(tables) == rest
            table.push(FAR[touched][mine], grads[mine])
    for rest, table in enumerate(tables):
        for which in (rest == FAR % 2).nonzero().view(-1).tolist():
            assert torch.equal(table.pull(FAR[which : which + 1])[0], weights[which].detach())


def test_without_an_optimizer_rows_are_assigned_and_read_in_any_order() -> None:
    table = RowTable(RowSparse(HUGE, 2))
    values = torch.arange(20.0).view(10, 2)
    table.push(FAR, values)
    table.push(FAR[3:4], torch.tensor([[-1.0, -2.0]]))
    values[3] = torch.tensor([-1.0, -2.0])
    order = torch.tensor([9, 3, 3, 0, 9, 5])
    assert torch.equal(table.pull(FAR[order]), values[order])
    assert torch.equal(
        table.pull(torch.tensor([7, HUGE - 1])), torch.stack([torch.zeros(2), values[9]])
    )
    empty = torch.empty(0, dtype=torch.int64)
    assert table.pull(empty).shape == (0, 2)
    table.push(empty, torch.empty(0, 2))
    assert len(table) == 10


def test_first_values_depend_on_seed_and_id_alone() -> None:
    form = RowSparse(HUGE, 33, std=0.1, seed=4)
    ids = torch.randint(HUGE, (3001,), generator=torch.Generator().manual_seed(5)).unique()
    values = first_rows(form, ids)
    for begin, end in ((0, 1), (1, 8), (13, 1000), (2999, 3001)):
        assert torch.equal(first_rows(form, ids[begin:end]), values[begin:end])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(6))
    assert torch.equal(first_rows(form, ids[order]), values[order])
    table = RowTable(form, create("sgd", lr=0.5))
    table.push(ids[::2], torch.zeros(len(ids[::2]), 33))
    assert torch.equal(table.pull(ids), values)
    # Numbers that every machine must find again: a snapshot holds only the rows that were pushed.
    pinned = first_rows(RowSparse(HUGE, 3, std=1.0, seed=4), torch.tensor([0, HUGE - 1]))
    assert pinned.flatten().tolist() == pytest.approx(PINNED, rel=1e-6)
    assert not torch.equal(first_rows(RowSparse(HUGE, 33, std=0.1, seed=5), ids), values)
    assert not first_rows(RowSparse(HUGE, 33), ids).any()


PINNED = [0.0283232, 0.7879885, 0.9711397, -0.4061389, -1.0369785, 0.3924317]


def test_first_values_are_normal() -> None:
    values = first_rows(RowSparse(HUGE, 65, std=2.0), torch.arange(4000)).double() / 2
    count = values.numel()
    assert abs(values.mean()) < 4 / count**0.5
    assert abs(values.square().mean() - 1) < 4 * (2 / count) ** 0.5
    assert abs(values.pow(4).mean() - 3) < 4 * (96 / count) ** 0.5
    assert abs((values.abs() < 1).double().mean() - 0.682689) < 4 * (0.2166 / count) ** 0.5
    correlations = torch.corrcoef(values.T) - torch.eye(65)
    assert correlations.abs().max() < 5.5 / 4000**0.5
    neighbours = torch.corrcoef(torch.stack((values[:-1].flatten(), values[1:].flatten())))[0, 1]
    assert abs(neighbours) < 4 / count**0.5


def test_memory_grows_with_the_rows_that_are_pushed() -> None:
    table = RowTable(RowSparse(HUGE, 8, std=0.1), create("adam"))

    def held() -> int:
        tensors = [
            table._ids,
            table._rows,
            *table._states.values(),
            table._index._ids,
            table._index._slots,
        ]
        return sum(tensor.nbytes for tensor in tensors)

    generator = torch.Generator().manual_seed(7)
    empty = held()
    table.pull(torch.randint(HUGE, (10_000,), generator=generator))
    assert (held(), len(table)) == (empty, 0)
    assert empty < 20_000
    seen = torch.empty(0, dtype=torch.int64)
    for _ in range(20):
        ids = torch.randint(HUGE, (1000,), generator=generator).unique()
        table.push(ids, torch.ones(len(ids), 8))
        table.push(ids, torch.ones(len(ids), 8))
        seen = torch.cat([seen, ids])
    assert len(table) == len(seen.unique())
    assert held() <= len(table) * (3 * 8 * 4 * 1.5 + 72)
    assert torch.equal(table.state()["ids"], seen.unique())
    assert set(table.state()["step"].tolist()) == {2}


def test_sums_are_in_the_order_of_the_list_and_of_repetitions() -> None:
    big, one = (
        2.0**24,
        1.0,
    )  # big + 1 + 1 rounds to big when added from the left, and not from the right

    def push(*pairs: tuple[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([pair[0] for pair in pairs], dtype=torch.int64), torch.tensor(
            [[pair[1]] for pair in pairs]
        ).view(-1, 1)

    ids, rows = sum_rows(
        [
            push((HUGE, big), (3, one)),
            push((3, one), (HUGE, one), (HUGE, one)),
            push((3, big), (5, -0.0)),
        ]
    )
    assert ids.tolist() == [3, 5, HUGE]
    assert rows.view(-1).tolist() == [2 + big, 0.0, big]
    assert rows[1, 0].signbit()
    generator = torch.Generator().manual_seed(8)
    pushes = [
        (torch.randint(9, (50,), generator=generator), torch.randn(50, 3, generator=generator))
        for _ in range(4)
    ]
    expected: dict[int, torch.Tensor] = {}
    for some_ids, some_rows in pushes:
        for one_id, row in zip(some_ids.tolist(), some_rows, strict=True):
            expected[one_id] = expected[one_id] + row if one_id in expected else row
    ids, rows = sum_rows(pushes)
    assert ids.tolist() == sorted(expected)
    assert torch.equal(rows, torch.stack([expected[one_id] for one_id in sorted(expected)]))
    ids, rows = sum_rows([(torch.empty(0, dtype=torch.int64), torch.empty(0, 3))] * 2)
    assert (ids.shape, rows.shape) == ((0,), (0, 3))
    alone = torch.ones(2, 3)
    sum_rows([(torch.tensor([1, 2]), alone)])[1].zero_()
    assert alone.all()


def test_rows_of_16_bits_follow_rows_of_32() -> None:
    spec = create("adamw", lr=1e-3, multi_precision=True)
    ids, generator = torch.arange(6), torch.Generator().manual_seed(9)
    table, narrow = (
        RowTable(RowSparse(9, 4, 1.0, dtype=torch.bfloat16), one)
        for one in (spec, create("adamw", lr=1e-3))
    )
    weight = table.pull(ids).float().requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=1e-3, foreach=False)
    for _ in range(10):
        grad = torch.randn(6, 4, generator=generator).bfloat16()
        weight.grad = grad.float()
        optimizer.step()
        table.push(ids, grad)
        narrow.push(ids, grad)
    assert torch.equal(table.state()["rows"], weight.detach())
    assert torch.equal(table.pull(ids), weight.detach().bfloat16())
    assert table.pull(ids).dtype == narrow.pull(ids).dtype == torch.bfloat16
    assert not torch.equal(table.pull(ids), narrow.pull(ids))


def test_another_optimizer_keeps_the_rows() -> None:
    table = RowTable(RowSparse(9, 2))
    table.push(torch.tensor([4]), torch.ones(1, 2))
    table.set_optimizer(create("sgd", lr=0.5, momentum=0.9))
    table.push(torch.tensor([4, 5]), torch.ones(2, 2))
    assert table.pull(torch.tensor([4, 5])).tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    assert set(table.state()) == {"ids", "rows", "step", "momentum_buffer"}
    other = RowTable(table.table, create("adam"))
    other.load({part: table.state()[part] for part in ("ids", "rows")})
    assert other.pull(torch.tensor([4])).tolist() == [[0.5, 0.5]]
    assert other.state()["step"].tolist() == [0, 0]


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    table = RowTable(RowSparse(9, 2), create("sgd", lr=0.5))
    table.push(torch.tensor([1, 4]), torch.ones(2, 2))
    state = table.state()
    ones = torch.ones(2, 2)
    for ids, rows, options, message in (
        (torch.tensor([4, 1]), ones, None, "must ascend"),
        (torch.tensor([4, 4]), ones, None, "each of them once"),
        (torch.tensor([4, 9]), ones, None, "go from 4 to 9; the table has rows 0 to 8"),
        (torch.tensor([-1, 4]), ones, None, "go from -1 to 4"),
        (torch.tensor([1.0, 4.0]), ones, None, "int64 in one dimension, not torch.float32"),
        (
            torch.tensor([1, 4]),
            torch.ones(2, 3),
            None,
            r"rows of shape \[2, 3\] for 2 ids; it must be \[2, 2\]",
        ),
        (torch.tensor([1, 4]), ones, {"lrr": 1}, "no option 'lrr'"),
        (torch.tensor([1, 4]), ones, {"lr": -1.0}, "Invalid learning rate"),
        (torch.tensor([1, 4]), ones, {"momentum": 0.9}, "began with momentum 0"),
    ):
        with pytest.raises(UserError, match=message):
            table.push(ids, rows, options)
    with pytest.raises(UserError, match="go from 9 to 9"):
        table.pull(torch.tensor([9]))
    ids, rows, steps = state["ids"], state["rows"], state["step"]
    for wrong, message in (
        ({"ids": ids}, "has the parts"),
        ({**state, "sum": rows}, "has the parts"),
        ({**state, "rows": rows[:1]}, "'rows' in a table's state has shape"),
        ({"ids": torch.tensor([1, 1]), "rows": rows, "step": steps}, "an id twice"),
    ):
        with pytest.raises(UserError, match=message):
            table.load(wrong)
    assert all(torch.equal(table.state()[part], value) for part, value in state.items())
    table.push(torch.tensor([1]), torch.ones(1, 2))
    assert table.pull(torch.tensor([1])).tolist() == [[-1.0, -1.0]]
    with pytest.raises(
        UserError,
        match="cannot be updated by 'radam'; write one of sgd, adagrad, adam, adamw, rmsprop",
    ):
        RowTable(RowSparse(9, 2), create("radam"))
