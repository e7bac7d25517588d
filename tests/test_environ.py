"""Variables of the environment are set for a while."""

from __future__ import annotations

import os

import pytest

from allhands.environ import variables


def test_variables_are_afterwards_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_ONE", "1")
    monkeypatch.setenv("ALLHANDS_TWO", "2")
    monkeypatch.delenv("ALLHANDS_THREE", raising=False)

    def inside() -> None:
        with variables({"ALLHANDS_ONE": None, "ALLHANDS_TWO": "4", "ALLHANDS_THREE": "3"}):
            assert "ALLHANDS_ONE" not in os.environ
            assert os.environ["ALLHANDS_TWO"] == "4"
            assert os.environ["ALLHANDS_THREE"] == "3"
            raise LookupError

    with pytest.raises(LookupError):
        inside()
    assert os.environ["ALLHANDS_ONE"] == "1"
    assert os.environ["ALLHANDS_TWO"] == "2"
    assert "ALLHANDS_THREE" not in os.environ
