"""Where steps that are taken again are read; with real losses in
tests/launch/test_elastic_local_sgd.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allhands.loop.replica_steps import _Reading


class Counted:
    """Three steps an epoch, of 4, 4 and 2 samples."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        self.opened.append((epoch, skip))
        return iter(
            [
                ([f"{epoch}:{begins}"], [size], size, False)
                for begins, size in ((0, 4), (4, 4), (8, 2))
                if begins >= skip
            ]
        )


def test_steps_that_follow_one_another_are_read_without_a_new_beginning():
    feed: Any = Counted()
    reading = _Reading(feed)
    read = [reading.step(0, skip)[0] for skip in (4, 8)]
    assert read == [["0:4"], ["0:8"]]
    assert feed.opened == [(0, 4)]


def test_after_the_end_of_a_pass_the_next_one_is_read():
    feed: Any = Counted()
    reading = _Reading(feed)
    assert reading.step(0, 10)[0] == ["1:0"]
    assert reading.step(1, 4)[0] == ["1:4"]
    assert feed.opened == [(0, 10), (1, 0)]


def test_a_step_further_on_is_looked_for():
    feed: Any = Counted()
    reading = _Reading(feed)
    assert reading.step(0, 0)[0] == ["0:0"]
    assert reading.step(0, 8)[0] == ["0:8"], "a batch with which no step was taken lies between"
