"""Calls of a function in forked processes."""

from __future__ import annotations

import os

import pytest

from allhands import UserError
from allhands.planning.forked import in_forked


def test_results_come_in_the_order_of_the_arguments_from_several_processes() -> None:
    taken = {"a": 1, "b": 2}  # what is around a function is there, too

    def look(name: str) -> tuple[str, int, int]:
        return name, taken.get(name, 0), os.getpid()

    found = in_forked(look, ["a", "b", "c", "d"], 2)
    assert [one[:2] for one in found] == [("a", 1), ("b", 2), ("c", 0), ("d", 0)]
    assert found[0][2] == os.getpid()
    assert os.getpid() not in {pid for *_, pid in found[1:]}
    assert {pid for *_, pid in in_forked(look, ["a", "b", "c"], 1)} == {os.getpid()}


def test_an_error_of_another_process_is_raised_here() -> None:
    def look(number: int) -> int:
        if number == 2:
            raise UserError("two")
        return number

    with pytest.raises(UserError, match="two"):
        in_forked(look, [0, 1, 2], 2)
