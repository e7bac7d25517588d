"""What a worker must have in common with those whose training it joins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allhands.loop.admission import Terms

OTHERS = Terms(1, "of 4 parameters (0a)", "/srv/train.py", "12ab", "1.0")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (OTHERS, ""),
        (replace(OTHERS, script="/home/me/train.py"), ""),
        (replace(OTHERS, version="1.1"), "it has allhands 1.1, and the others have 1.0"),
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
    ],
    ids=["same", "elsewhere", "version", "script", "training", "model"],
)
def test_what_differs_is_named(own: Terms, said: str) -> None:
    assert own.difference(OTHERS) == said
