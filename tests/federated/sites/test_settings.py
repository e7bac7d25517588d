"""`Sites`: every value is checked by name."""

from __future__ import annotations

import pytest

from allhands.errors import UserError
from allhands.federated import Federated
from allhands.federated.sites.settings import Sites


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "north"}, r"sites\.names='north'; it must be a list of names"),
        ({"names": []}, r"sites\.names=\[\]"),
        ({"names": ["a", "b", "a"]}, r"sites\.names has 'a' twice"),
        ({"labels": [1, 2]}, r"sites\.labels=\[1, 2\]"),
        ({"min": 0}, r"sites\.min=0; it must be a whole number of at least 1, or null"),
        ({"min": True}, r"sites\.min=True"),
        ({"names": ["a"], "min": 2}, r"sites\.min=2 of 1 sites; write at most 1"),
        ({"wait": -1}, r"sites\.wait=-1; it must be a number of at least 0"),
        ({"round_timeout": 0}, r"sites\.round_timeout=0; it must be a number above 0"),
        ({"round_timeout": None}, r"sites\.round_timeout=None"),
        ({"max_norm": float("nan")}, r"sites\.max_norm=nan; it must be a number above 0, or null"),
        ({"below": "go"}, r"sites\.below='go'; it must be one of 'stop', 'wait'"),
        ({"on_bad": "retry"}, r"sites\.on_bad='retry'; it must be one of 'skip', 'stop'"),
    ],
    ids=str,
)
def test_a_value_out_of_bounds_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Sites(**options)


def test_all_sites_are_needed_unless_it_is_said_how_many():
    assert Sites().of(["a", "b", "c"]) == 3
    assert Sites(min=2).of(["a", "b", "c"]) == 2
    with pytest.raises(UserError, match=r"sites\.min=4 of 3 sites"):
        Sites(min=4).of(["a", "b", "c"])


def test_a_run_file_gives_them_to_the_strategy():
    assert Federated(sites={"names": ["a", "b"], "wait": 5}).sites == Sites(
        names=["a", "b"], wait=5
    )
    with pytest.raises(UserError, match="there is no option 'names_'; it takes: names, min, wait"):
        Federated(sites={"names_": ["a"]})
    with pytest.raises(UserError, match="sites.names are 2 sites and the run has 3 clients"):
        Federated(clients=3, sites={"names": ["a", "b"]})
