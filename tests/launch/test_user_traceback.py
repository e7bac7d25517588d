"""An error of the user's code shows the user's frames, and not ours unless asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allhands.launch import user_traceback
from allhands.runner.callbacks import Callback, run_hooks


class Breaks(Callback):
    def on_epoch_end(self, training: Any) -> None:
        try:
            int("x")
        except ValueError as error:
            raise KeyError("gone") from error


def broken() -> KeyError:
    with pytest.raises(KeyError) as caught:
        run_hooks([Breaks()], "on_epoch_end", None)
    return caught.value


def test_our_frames_are_left_out_and_the_chain_is_kept() -> None:
    text = user_traceback.text_of(broken())
    assert "callbacks.py" not in text.replace("test_frames.py", "")
    assert "in on_epoch_end" in text
    assert (
        text.index("ValueError: invalid literal")
        < text.index("direct cause")
        < text.index("KeyError: 'gone'")
    )
    assert text.endswith(" of allhands are left out; ALLHANDS_FULL_TRACEBACK=1 shows them)\n")


class Asks(Callback):
    def on_epoch_end(self, training: Any) -> None:
        json.loads("{")


def test_the_users_line_comes_first_where_a_library_raised() -> None:
    with pytest.raises(ValueError, match="property name") as caught:
        run_hooks([Asks()], "on_epoch_end", None)
    first, second, *_ = user_traceback.text_of(caught.value).splitlines()
    assert first.startswith(f"in your code, {__file__}:")
    assert first.endswith(' in on_epoch_end: json.loads("{")')
    assert second.startswith("Traceback")
    assert user_traceback.text_of(broken()).startswith("Traceback")


def test_all_frames_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_traceback.FULL, "1")
    assert "runner/callbacks.py" in user_traceback.text_of(broken())


def test_an_error_of_our_own_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    error = broken()
    while (
        error.__traceback__ is not None
        and "callbacks.py" not in error.__traceback__.tb_frame.f_code.co_filename
    ):
        error.__traceback__ = error.__traceback__.tb_next
    assert error.__traceback__ is not None
    error.__traceback__.tb_next = None
    assert "runner/callbacks.py" in user_traceback.text_of(error)
