"""Checks of settings: a message says what was written and what is right."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from allhands import UserError
from allhands.checks import check_bare, check_choice, check_flag, check_whole, is_number, is_whole


def test_what_is_right_passes() -> None:
    check_whole("steps", 1)
    check_whole("steps", 0, 0)
    check_whole("steps", None, otherwise="None for all")
    check_flag("mirror", False)
    check_choice("mode", "sync", ("sync", "async"))
    check_choice("dtype", None, ("fp32",), otherwise="None")
    assert is_number(0.5)
    assert not is_number(True)
    assert not is_whole(True)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_whole("n", True), "n=True; it must be a whole number of at least 1"),
        (lambda: check_whole("n", None), "n=None; it must be a whole number of at least 1"),
        (
            lambda: check_whole("n", 1.0, 2, of="Mesh", unit="shards", otherwise="None for all"),
            "Mesh(n=1.0); it must be a whole number of shards, at least 2, or None for all",
        ),
        (lambda: check_flag("x", 1, of="FSDP"), "FSDP(x=1); it must be True or False"),
        (lambda: check_choice("x", "a", ("b", "c")), "x='a'; it must be one of 'b', 'c'"),
        (
            lambda: check_choice("x", [], ("b",), otherwise="None"),
            "x=[]; it must be one of 'b', or None",
        ),
    ],
)
def test_what_is_wrong_is_refused(check: Callable[[], None], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        check()


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        ("accelerate.optimizer", "Accelerate", "accelerator.prepare"),
        ("lightning.fabric.wrappers", "Lightning Fabric", "fabric.setup"),
        ("lightning_fabric.wrappers", "Lightning Fabric", "fabric.setup"),
    ],
)
def test_what_other_packages_have_wrapped_is_refused(module: str, name: str, call: str) -> None:
    check_bare("optimizer", object())
    wrapped = type("Wrapped", (), {"__module__": module})()
    message = f"optimizer is {name}'s Wrapped; pass what {call}() was given, and leave that call"
    with pytest.raises(UserError, match=re.escape(message)):
        check_bare("optimizer", wrapped)
