"""Every collective operation over three ranks, and what a rank is told when the others do something
else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.horovod.torch.ops_worlds import DTYPES, SIZE, adasum, everything, gone, lonely_call
from tests.patience import patience
from tests.worlds import in_world

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return in_world(SIZE, everything)


def test_queries(world: list[dict[str, Any]]) -> None:
    assert [found["queries"] for found in world] == [
        (rank, SIZE, rank, SIZE, 0, 1, True) for rank in range(SIZE)
    ]
    assert [found["again"] for found in world] == [3.0] * SIZE


def test_reductions(world: list[dict[str, Any]]) -> None:
    all_x = torch.stack([found["reductions"]["x"] for found in world])
    for found in (rank["reductions"] for rank in world):
        assert torch.equal(found["Sum"], all_x.sum(0))
        assert torch.equal(found["old average"], all_x.sum(0))
        torch.testing.assert_close(found["Average"], all_x.mean(0))
        assert torch.equal(found["Min"], all_x.amin(0))
        assert torch.equal(found["Max"], all_x.amax(0))
        assert torch.equal(found["Product"], all_x.prod(0))
        assert torch.equal(found["scaled"], 1.5 * all_x.sum(0))
        assert found["whole"].tolist() == [1, -3]  # 3 / 3; -9 / 3
        assert found["bool"].tolist() == [True, False]
        for dtype in DTYPES:
            assert torch.equal(found[str(dtype)], torch.tensor([[6]], dtype=dtype))
        assert torch.equal(found["fp16 on the way"], all_x.sum(0))
        assert torch.equal(found["bf16 on the way"], (all_x / 3).bfloat16().sum(0).float())
        assert [value.tolist() for value in found["group"]] == [
            all_x.sum(0).tolist(),
            3,
            all_x.sum(0).tolist(),
        ]
        assert torch.equal(found["in place"][0], all_x.sum(0))
        assert torch.equal(found["in place"][2].flatten(), found["in place"][1])


def test_names_not_the_order_of_calls_are_matched(world: list[dict[str, Any]]) -> None:
    for found in world:
        *results, done = found["other_order"]
        assert [result.tolist() for result in results] == [[3.0 * ord(name)] * 2 for name in "abcd"]
        assert done is True


def test_rows(world: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(found["rows"] for found in world):
        assert found["gathered"].tolist() == [[1, 1], [2, 2], [2, 2]]
        assert found["group"][0].tolist() == [True] * 3
        assert found["group"][1].tolist() == [0, 1j, 2j]
        assert found["broadcast"].tolist() == [2, 14]
        assert found["in place"].item() == 1
        assert found["dealt"].flatten().tolist() == [
            10 * source + 2 * rank + place for source in range(3) for place in range(2)
        ]
        wanted = {0: [0, 10, 20], 1: [1, 2, 3, 11, 12, 13, 21, 22, 23], 2: []}[rank]
        assert found["split"][0].tolist() == wanted
        assert found["split"][1].tolist() == [len(wanted) // 3] * 3
        assert found["scattered"].tolist() == {0: [3.0, 6.0], 1: [9.0], 2: [12.0]}[rank]
        torch.testing.assert_close(found["sparse"], torch.tensor([1 / 3, 1 / 3, 1 / 3, 3.0]))
        assert found["none"].tolist() == [1.0, 1.0]
        assert found["objects"] == [(0, [], 0), (1, [0], 1), (2, [0, 1], 2)]
        assert found["object"] == [1, ("a", None), {2.5: True}]


def test_gradients(world: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(found["gradients"] for found in world):
        assert found["allreduce"].tolist() == [2.0] * 3  # the mean of 1, 2, 3
        assert found["allgather"].tolist() == [2.0] * 3
        assert found["broadcast"].tolist() == [2.0 if rank == 0 else 0.0] * 3
        assert found["alltoall"].tolist() == [1.0, 2.0, 3.0]
        assert found["reducescatter"].tolist() == [3.0, 6.0, 9.0]
        assert found["mean scattered"].tolist() == [1.0, 2.0, 3.0]
        assert found["group"].tolist() == [18.0] * 3


def test_process_sets(world: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(found["sets"] for found in world):
        assert found["ids"] == {0: [0, 1, 2], 1: [0, 2]}
        assert "a process set of the ranks [0, 2] is in use already, number 1" in found["twice"]
        assert (
            "add_process_set: rank 0 gave the ranks (1, 2), ranks 1, 2 gave the ranks (0, 1)"
            in found["differs"]
        )
        assert found["removed"] == (True, False, None)
        if rank == 1:
            assert "rank 1 is not in the process set [0, 2]" in found["not in it"]
            continue
        assert (found["sum"].item(), found["gathered"].tolist(), found["root"].item()) == (
            2,
            [0, 2],
            2,
        )
        assert found["place"] == (rank // 2, 2)
        assert "root_rank=1 is none of the ranks [0, 2]" in found["outsider"]


def test_what_ranks_do_not_agree_on_is_an_error_on_all_of_them(world: list[dict[str, Any]]) -> None:
    wanted = {
        "shape": "allreduce 'shape': ranks 0, 2 gave shape [3], rank 1 gave shape [4]; all ranks "
        "must give the same",
        "dtype": "allreduce 'dtype': ranks 0, 2 gave dtype float32, rank 1 gave dtype float64; all "
        "ranks must give the same",
        "op": "allreduce 'op': ranks 0, 2 gave op Sum, rank 1 gave op Max; all ranks must give the "
        "same",
        "root": "broadcast 'root': ranks 0, 2 gave root_rank 0, rank 1 gave root_rank 1; all ranks "
        "must give the same",
        "rows": "ranks 0, 2 gave shape without its first dimension [3], rank 1 gave shape without "
        "its first dimension [4]",
        "parameters": "broadcast 'w' in the group",
        "twice": "has begun an operation of this name that is not over",
        "object": "it holds the class",
    }
    for found in (found["disagreements"] for found in world):
        for name, text in wanted.items():
            assert text in found[name], name


def test_a_rank_that_joins_early_gives_zeros(world: list[dict[str, Any]]) -> None:
    for rank, (averages, of_those_left, last, after) in enumerate(
        found["uneven_calls"] for found in world
    ):
        assert averages == pytest.approx([1.0, 2 / 3, 1 / 3][: rank + 1])
        assert of_those_left == [1.0] * (rank + 1)
        assert (last, after) == (2, 3.0)


def test_a_missing_call_is_an_error_with_its_name_and_rank_and_no_hang(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for text, took in in_world(SIZE, lonely_call):
        assert "allreduce 'loss': ranks 0, 2 called it" in text
        assert "rank 1 did not" in text
        assert took < patience(20)


def test_a_rank_that_has_left_is_named() -> None:
    _, *texts = in_world(2, gone)
    assert all("rank 0 has called shutdown(), or its program is over" in text for text in texts), (
        texts
    )


def by_hand(vectors: list[torch.Tensor]) -> torch.Tensor:
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [(1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b for a, b in pairs]
    return vectors[0]


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)).double()
    for result in in_world(4, adasum):
        torch.testing.assert_close(result[0], by_hand(list(x)).float())
        torch.testing.assert_close(result[1], torch.ones(4))
        torch.testing.assert_close(result[2], torch.full((2,), 3.0))
        assert math.isfinite(float(result[0].sum()))
