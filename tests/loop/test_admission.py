"""What a worker must have in common with those whose training it joins."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from allhands.errors import WorldError
from allhands.loop import admission
from allhands.loop.admission import Terms

OTHERS = Terms(1, "of 4 parameters (0a)", "ddp", "/srv/train.py", "12ab", "1.0")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (OTHERS, ""),
        (replace(OTHERS, script="/home/me/train.py"), ""),
        (
            replace(OTHERS, script="/home/me/train.py", digest="34cd"),
            "its /home/me/train.py is another version than the script that the others run (34cd, "
            "and theirs is 12ab); give it the same file",
        ),
        (
            replace(OTHERS, training=2),
            "the others are in training number 1 of the script, which a worker that comes later "
            "cannot enter",
        ),
        (
            replace(OTHERS, model="of 2 parameters (0b)"),
            "it has a model of 2 parameters (0b), and the others have one of 4 parameters (0a)",
        ),
        (
            replace(OTHERS, strategy="single"),
            "its strategy is single, and that of the others is ddp",
        ),
    ],
    ids=["same", "elsewhere", "script", "training", "model", "strategy"],
)
def test_what_differs_is_named(own: Terms, said: str) -> None:
    assert own.difference(OTHERS) == said


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (asdict(OTHERS), ""),
        ({"version": "0.9", "other": 1}, "it has allhands 1.0, and the others have 0.9"),
        (asdict(OTHERS) | {"training": 2}, "the others are in training number 2"),
    ],
    ids=["same", "version", "training"],
)
def test_a_worker_that_does_not_fit_is_refused(told: dict[str, Any], said: str) -> None:
    regrouping: Any = SimpleNamespace(terms=lambda: json.dumps(told))
    if not said:
        admission.check(regrouping, OTHERS)
        return
    with pytest.raises(WorldError, match=f"this worker cannot take part: {said}"):
        admission.check(regrouping, OTHERS)
