"""Which rounds are agreed, which are declined, and what becomes of promises that are not kept."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.horovod.matcher import Matcher
from allhands.horovod.operation_request import Key, OperationRequest
from allhands.horovod.promise_rounds import LATE_S, Parts
from tests.horovod.test_matcher import errors, key, names, reduce

from .conftest import Clock


def parts(*called: str, shape: int = 4) -> Parts:
    return tuple((key(name), reduce((shape,))) for name in called)


USUAL = parts("a", "b")


def told(out: list[Any], what: str) -> list[int]:
    """The ranks that are told this, in order."""
    return sorted(rank for ranks, message in out if what in message for rank in ranks)


def promise(matcher: Matcher, ranks: tuple[int, ...] = (0, 1, 2), of: Parts = USUAL) -> list[Any]:
    for rank in ranks:
        matcher.promise(rank, 0, of)
    return matcher.take()


def test_all_promise_the_same_and_go(matcher: Matcher) -> None:
    assert promise(matcher, (0, 1)) == []
    out = promise(matcher, (2,))
    assert [next(iter(message)) for _, message in out] == ["lane", "go"]
    assert told(out, "lane") == told(out, "go") == [0, 1, 2]
    assert [next(iter(message)) for _, message in promise(matcher)] == ["go"]  # the lane is there


@pytest.mark.parametrize(
    "other", [parts("b", "a"), parts("a"), parts("a", "b", "c"), parts("a", "b", shape=5)]
)
def test_other_parts_are_declined_and_asked_for_by_name(other: Parts, matcher: Matcher) -> None:
    promise(matcher, (0,))
    assert told(promise(matcher, (1,), other), "decline") == [0, 1]
    for rank, of in enumerate((parts("a", "b"), other, parts("a", "b"))):
        for called, ask in of:
            matcher.ask(rank, called, ask)
    if other[0][1] != reduce():
        assert "rank 1 gave shape [5]" in errors(matcher.take())[0]
    else:
        assert "a" in [name for batch in names(matcher.take()) for name in batch]


def test_a_part_that_is_asked_for_by_name_declines_what_is_promised(matcher: Matcher) -> None:
    promise(matcher, (0,))
    matcher.ask(1, key("b"), reduce())
    assert told(matcher.take(), "decline") == [0]
    assert told(promise(matcher, (2,)), "decline") == [2], "it is being asked for"
    for rank in (0, 2):
        matcher.ask(rank, key("b"), reduce())
    assert names(matcher.take()) == [["b"]]
    assert told(promise(matcher), "go") == [0, 1, 2]


def test_other_names_do_not_matter(matcher: Matcher) -> None:
    promise(matcher, (0, 1))
    for rank in range(3):
        matcher.ask(rank, key("loss"), reduce())
    out = matcher.take()
    assert names(out) == [["loss"]]
    assert told(out, "decline") == []
    assert told(promise(matcher, (2,)), "go") == [0, 1, 2]


def test_after_a_rank_has_joined_names_are_asked_for(matcher: Matcher) -> None:
    promise(matcher, (0,))
    matcher.join(1)
    assert told(matcher.take(), "decline") == [0]
    assert told(promise(matcher, (2,)), "decline") == [2]
    matcher.join(0)
    matcher.join(2)
    matcher.take()
    assert told(promise(matcher), "go") == [0, 1, 2]


def test_a_rank_that_does_not_promise_is_waited_for_by_name(matcher: Matcher, clock: Clock) -> None:
    promise(matcher, (0, 2))
    clock.now = LATE_S
    matcher.look()
    assert told(matcher.take(), "decline") == [0, 2]


def test_a_promise_that_is_not_kept_is_reported_and_ends(matcher: Matcher, clock: Clock) -> None:
    promise(matcher)
    lines = ""
    while clock.now < 599:
        clock.now += 1
        lines += matcher.look()
        for rank in told(matcher.take(), "kept?"):
            if rank != 1:
                matcher.kept(rank, 0)
    assert lines.startswith("allreduce 'a' and 1 more of its round: all ranks began it 6")
    assert lines.endswith("s ago, rank 1 did not end it")
    clock.now = 606
    matcher.look()
    matcher.look()
    broken = [message["broken"] for _, message in matcher.take() if "broken" in message]
    assert len(broken) == 1
    assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is over" in broken[0]


def test_ranks_that_kept_their_promise_may_be_silent_or_leave(
    matcher: Matcher, clock: Clock
) -> None:
    promise(matcher)
    clock.now = LATE_S
    assert matcher.look() == ""
    assert told(matcher.take(), "kept?") == [0, 1, 2]
    for rank in range(3):
        matcher.kept(rank, 0)
    clock.now = 10_000
    assert matcher.look() == ""
    matcher.leave(1, "has called shutdown()")
    assert matcher.take() == []
    assert told(promise(matcher, (0,)), "decline") == [0]


def test_a_rank_that_is_gone_before_it_kept_its_promise_ends_all(matcher: Matcher) -> None:
    promise(matcher)
    matcher.leave(1, "is gone without a word")
    ((ranks, message),) = matcher.take()
    assert list(ranks) == [0, 1, 2]
    assert (
        message["broken"]
        == "allreduce 'a' and 1 more of its round: rank 1, which has begun it, is gone without a "
        "word"
    )


def test_process_sets_have_rounds_of_their_own(matcher: Matcher) -> None:
    for rank in range(3):
        matcher.ask(rank, key("0,2", "add_set"), OperationRequest("add_set", splits=(0, 2)))
    matcher.take()
    called: Key = (1, "allreduce", "a")
    for rank in (0, 2):
        matcher.promise(rank, 1, ((called, reduce()),))
    out = matcher.take()
    assert told(out, "go") == [0, 2]
    assert told(out, "lane") == [0, 1, 2], "all ranks of the world make its group"
    matcher.promise(1, 1, ((called, reduce()),))
    matcher.promise(1, 5, ((called, reduce()),))
    assert told(matcher.take(), "decline") == [1, 1]
