"""Which operations are agreed, which fail, and what is said about those that some rank does not
come to."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.horovod.matcher import CROSSED_S, Matcher
from allhands.horovod.operation_request import OperationRequest

from .conftest import Clock


def reduce(shape: tuple[int, ...] = (4,), dtype: str = "float32", **more: Any) -> OperationRequest:
    return OperationRequest("allreduce", (shape,), (dtype,), **{"op": "Average", **more})


def key(name: str, kind: str = "allreduce", set_id: int = 0) -> tuple[int, str, str]:
    return (set_id, kind, name)


def names(out: list[Any]) -> list[list[str]]:
    return [[entry["key"][2] for entry in message["run"]] for _, message in out if "run" in message]


def errors(out: list[Any]) -> dict[int, str]:
    return {
        rank: message["error"] for ranks, message in out if "error" in message for rank in ranks
    }


def test_names_are_matched_in_whatever_order_they_are_called(matcher: Matcher) -> None:
    order = {0: "abc", 1: "cab", 2: "bca"}
    for turn in range(3):
        for rank in range(3):
            matcher.ask(
                rank,
                key(order[rank][turn]),
                reduce(op="Max" if order[rank][turn] == "b" else "Sum"),
            )
    out = matcher.take()
    assert sorted(name for batch in names(out) for name in batch) == ["a", "b", "c"]
    assert all(list(ranks) == [0, 1, 2] for ranks, _ in out)
    assert matcher.take() == []


def test_allreduces_of_one_sort_travel_together_up_to_the_threshold(matcher: Matcher) -> None:
    for name, ask in {
        "a": reduce((100,)),
        "b": reduce((100,)),
        "c": reduce((100,)),
        "d": reduce((1,), "int64"),
    }.items():
        for rank in range(3):
            matcher.ask(rank, key(name), ask)
    assert names(matcher.take()) == [["a", "b"], ["c"], ["d"]]  # 400 bytes each, 1000 together


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (reduce((4,)), reduce((3,)), "rank 0 gave shape [4], ranks 1, 2 gave shape [3]"),
        (
            reduce(dtype="float32"),
            reduce(dtype="int64"),
            "rank 0 gave dtype float32, ranks 1, 2 gave dtype int64",
        ),
        (reduce(op="Sum"), reduce(op="Average"), "rank 0 gave op Sum, ranks 1, 2 gave op Average"),
        (
            reduce(pre=0.5),
            reduce(),
            "rank 0 gave prescale_factor 0.5, ranks 1, 2 gave prescale_factor 1.0",
        ),
        (reduce(post=2.0), reduce(), "rank 0 gave postscale_factor 2.0"),
        (
            reduce(device="cuda"),
            reduce(),
            "rank 0 gave a tensor on cuda, ranks 1, 2 gave a tensor on cpu",
        ),
    ],
)
def test_what_does_not_agree_fails_on_all_ranks(
    matcher: Matcher, first: OperationRequest, second: OperationRequest, text: str
) -> None:
    for rank in range(3):
        matcher.ask(rank, key("loss"), second if rank else first)
    found = errors(matcher.take())
    assert sorted(found) == [0, 1, 2]
    assert all(
        message.startswith("allreduce 'loss': ") and text in message for message in found.values()
    )
    for rank in range(3):  # the name can be used again
        matcher.ask(rank, key("loss"), first)
    assert names(matcher.take()) == [["loss"]]


def test_a_tensor_of_a_group_is_named(matcher: Matcher) -> None:
    for rank in range(3):
        shapes = ((2,), (5 + (rank == 2),))
        ask = OperationRequest(
            "allreduce", shapes, ("float32", "float32"), ("layer.weight", "layer.bias"), op="Sum"
        )
        matcher.ask(rank, key("gradients.0"), ask)
    text = errors(matcher.take())[0]
    assert text.startswith(
        "allreduce 'layer.bias' in the group 'gradients.0': ranks 0, 1 gave shape [5], rank 2 gave "
        "shape [6]"
    )


def test_only_the_first_dimension_of_rows_may_differ(matcher: Matcher) -> None:
    for rank in range(3):
        matcher.ask(
            rank, key("x", "allgather"), OperationRequest("allgather", ((rank, 2),), ("int8",))
        )
        matcher.ask(
            rank, key("y", "allgather"), OperationRequest("allgather", ((1, 2 + rank),), ("int8",))
        )
    out = matcher.take()
    assert next(message for _, message in out if "run" in message)["run"][0]["rows"] == [[0, 1, 2]]
    assert "rank 0 gave shape without its first dimension [2]" in errors(out)[0]


def test_a_joined_rank_gives_zeros_and_is_told_what(matcher: Matcher) -> None:
    matcher.join(1)
    for rank in (0, 2):
        matcher.ask(rank, key("x"), reduce())
    ((ranks, message),) = matcher.take()
    assert (list(ranks), message["active"]) == ([0, 1, 2], 2)
    assert OperationRequest.read(message["run"][0]["ask"]) == reduce()
    for rank in (0, 2):
        matcher.ask(rank, key("y", "allgather"), OperationRequest("allgather", ((1,),), ("int8",)))
        matcher.ask(rank, key("z"), reduce(op="Min"))
    found = matcher.take()
    assert (
        sum("not possible after rank 1 called join()" in message["error"] for _, message in found)
        == 2
    )
    matcher.join(2)
    matcher.join(0)
    assert matcher.take() == [(range(3), {"joined": 0})]
    for rank in range(3):
        matcher.ask(rank, key("z"), reduce(op="Min"))
    assert names(matcher.take()) == [["z"]]  # the refusal from before is forgotten


def test_a_rank_that_joins_last_may_complete_an_operation(matcher: Matcher) -> None:
    matcher.ask(0, key("x"), reduce())
    matcher.ask(1, key("x"), reduce())
    assert matcher.take() == []
    matcher.join(2)
    assert names(matcher.take()) == [["x"]]


def test_a_missing_call_is_reported_by_name_and_rank_and_ends_in_an_error(
    matcher: Matcher, clock: Clock
) -> None:
    matcher.ask(0, key("loss"), reduce())
    matcher.ask(2, key("loss"), reduce())
    matcher.ask(1, key("other"), reduce())
    clock.now = 59
    assert matcher.look() == ""
    clock.now = 61
    first = matcher.look().splitlines()[0]
    assert (
        first == "allreduce 'loss': ranks 0, 2 called it 61 s ago, rank 1 did not (rank 1 waits in "
        "allreduce 'other')"
    )
    assert matcher.look() == ""  # once
    assert matcher.take() == []
    clock.now = 601
    matcher.look()
    ((ranks, message),) = matcher.take()
    assert list(ranks) == [0, 1, 2]
    assert "allreduce 'loss': ranks 0, 2 called it" in message["broken"]
    matcher.ask(1, key("loss"), reduce())
    assert "broken" in matcher.take()[0][1]


@pytest.mark.parametrize("numbers", [(0.0, 0.0), (60.0, 0.0)])
def test_no_time_is_too_long_when_the_limit_is_0(
    numbers: tuple[float, float], clock: Clock
) -> None:
    matcher = Matcher(2, 1000, *numbers, clock)
    matcher.ask(0, key("x"), reduce())
    clock.now = 1e6
    assert bool(matcher.look()) is bool(numbers[0])
    assert matcher.take() == []


def test_two_ranks_in_two_operations_of_one_name_do_not_wait_for_each_other(
    matcher: Matcher, clock: Clock
) -> None:
    matcher.ask(0, key("x"), reduce())
    matcher.ask(1, key("x", "allgather"), OperationRequest("allgather", ((1,),), ("int8",)))
    matcher.look()
    assert matcher.take() == []
    clock.now = CROSSED_S
    matcher.look()
    found = errors(matcher.take())
    assert (
        found[0]
        == found[1]
        == "'x': rank 0 called allreduce, rank 1 called allgather; all ranks must call the same"
    )
    matcher.ask(2, key("x"), reduce())  # it comes late, and hears of it
    assert errors(matcher.take()) == {2: found[0]}


def test_another_process_set_is_named(clock: Clock) -> None:
    matcher = Matcher(2, 1000, 60, 600, clock)
    for rank in range(2):
        matcher.ask(rank, key("0,1", "add_set"), OperationRequest("add_set", splits=(0, 1)))
    assert matcher.take()[0][1]["run"][0]["set"] == 1
    matcher.ask(0, key("x"), reduce())
    matcher.ask(1, key("x", set_id=1), reduce())
    clock.now = CROSSED_S
    matcher.look()
    text = (
        "'x': rank 1 called allreduce in the process set of ranks 0, 1, rank 0 called "
        "allreduce; all ranks must call the same"
    )
    other = (
        "'x': rank 0 called allreduce, rank 1 called allreduce in the process set of ranks 0, "
        "1; all ranks must call the same"
    )
    assert errors(matcher.take())[0] in (text, other)


def test_a_rank_that_is_gone_ends_what_waits_for_it(matcher: Matcher) -> None:
    matcher.ask(0, key("x"), reduce())
    matcher.leave(1, "has called shutdown()")
    assert errors(matcher.take()) == {0: "allreduce 'x': rank 1 has called shutdown()"}
    matcher.ask(2, key("y"), reduce())
    assert errors(matcher.take()) == {2: "allreduce 'y': rank 1 has called shutdown()"}
    matcher.join(0)
    assert matcher.take()[0][1] == {"broken": "join: rank 1 has called shutdown()"}


def test_an_operation_that_fails_names_the_rank_that_is_gone(matcher: Matcher) -> None:
    matcher.leave(2, "is gone without a word")
    matcher.fail("allreduce 'x' failed on rank 0: RuntimeError: Connection closed")
    matcher.fail("allreduce 'x' failed on rank 1: RuntimeError: Connection closed")
    text = "allreduce 'x' failed on rank 0: RuntimeError: Connection closed"
    broken = [message["broken"] for _, message in matcher.take()]
    assert set(broken) == {f"{text} (rank 2 is gone without a word)"}


def test_gradients_that_no_rank_has_are_told(matcher: Matcher) -> None:
    for rank in range(3):
        ask = OperationRequest(
            "allreduce", ((1,),) * 3, ("float32",) * 3, op="Sum", absent=(0, 2) if rank else (0, 1)
        )
        matcher.ask(rank, key("g"), ask)
    assert matcher.take()[0][1]["run"][0]["absent"] == [0]


def test_an_ask_survives_json() -> None:
    import json

    ask = OperationRequest(
        "alltoall",
        ((3, 2), ()),
        ("float32", "int8"),
        ("a", "b"),
        (1,),
        "Sum",
        0.5,
        2.0,
        "cuda",
        1,
        (1, 2),
    )
    assert OperationRequest.read(json.loads(json.dumps(ask.message()))) == ask
