"""What the validator lets into the average, and in which words it refuses the rest."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.row_layout import RowLayout
from allhands.federated.sites.settings import Sites
from allhands.federated.sites.update_validator import FIRST, UpdateValidator, check_measured


def layout(dtype: torch.dtype = torch.float32) -> RowLayout:
    return RowLayout(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype))


PLACES = layout()
FIGURES = {"samples": 40, "steps": 4, "loss": 0.5, "seconds": 0.1}


def row(norm: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An update of this norm, with zeros in the gaps."""
    made = torch.zeros(PLACES.length, dtype=dtype)
    made[PLACES.places[0].start : PLACES.places[0].stop] = 1.0
    return made * (norm / float(torch.linalg.vector_norm(made)))


def judge(validator: UpdateValidator, update: object = None, **figures: object) -> str | None:
    sent = {"update": row() if update is None else update, "integers": torch.tensor([4])}
    return validator.check("north", sent, {**FIGURES, **figures}, 40, 4)


def validator(**options: object) -> UpdateValidator:
    made = UpdateValidator(PLACES, Sites(**options), integers=1)
    made.begin(torch.zeros(PLACES.length))
    return made


def test_an_honest_update_passes():
    assert judge(validator()) is None
    assert judge(validator(), start_loss=0.7) is None


@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "Inf")]
)
def test_numbers_that_are_none_are_refused_with_the_name_of_their_weight(value, word):
    bad = row()
    place = next(place for place in PLACES.parameters if place.name == "1.weight")
    bad[place.start + 1] = value
    assert f"{word} in '1.weight'" in judge(validator(), bad)
    both = row()
    both[0], both[1] = math.inf, -math.inf  # whose sum hides what they are
    assert "Inf in '0.weight'" in judge(validator(), both)


def test_large_numbers_whose_sum_overflows_are_no_infinity_but_an_absurd_norm():
    made = UpdateValidator(layout(torch.float64), Sites())
    made.begin(torch.zeros(PLACES.length, dtype=torch.float64))
    huge = torch.zeros(PLACES.length, dtype=torch.float64)
    huge[:2] = 1.7e308
    assert "norm inf" in made.check("north", {"update": huge}, FIGURES, 40, 4)
    without_limit = UpdateValidator(layout(torch.float64), Sites(max_norm=math.inf))
    assert "norm inf" in without_limit.check("north", {"update": huge}, FIGURES, 40, 4)


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (row()[:-1], f"[{PLACES.length - 1}], and the model's is [{PLACES.length}]"),
        (row()[None], f"[1, {PLACES.length}]"),
        (torch.zeros(0), "shape [0]"),
        (row(dtype=torch.float64), "torch.float64, and the model's is torch.float32"),
        (row().bool(), "torch.bool"),
        ("weights", "str"),
    ],
)
def test_another_shape_or_dtype_is_refused(update, words):
    assert words in judge(validator(), update)


def test_arrays_that_are_missing_or_that_nobody_asked_for_are_refused():
    made = validator()
    assert made.check("north", {"update": row()}, FIGURES, 40, 4) == "it sent no array 'integers'"
    assert made.check("north", {}, FIGURES, 40, 4) == "it sent no array 'update'"
    more = {"update": row(), "integers": torch.tensor([1]), "gift": row()}
    assert "it sent an array 'gift'" in made.check("north", more, FIGURES, 40, 4)
    counted = {"update": row(), "integers": torch.tensor([2**62])}
    assert str(2**62) in made.check("north", counted, FIGURES, 40, 4)
    without = UpdateValidator(PLACES, Sites())
    assert "'integers'" in without.check(
        "north", {"update": row(), "integers": torch.tensor([1])}, FIGURES, 40, 4
    )


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"samples": 41}, "trained on 41 samples and said before that it has 40"),
        ({"samples": 0}, "at least one"),
        ({"samples": -40}, "at least one"),
        ({"samples": math.nan}, "samples=nan"),
        ({"samples": [40]}, "samples=[40]"),
        ({"samples": True}, "samples=True"),
        ({"steps": 5}, "took 5 steps, and 4 follow"),
        ({"steps": 4.5}, "took 4.5 steps"),
        ({"loss": math.nan}, "loss=nan"),
        ({"loss": math.inf}, "loss=inf"),
        ({"loss": "low"}, "loss=low"),
        ({"start_loss": math.nan}, "start_loss=nan"),
        ({"seconds": -1.0}, "seconds=-1.0"),
    ],
)
def test_figures_that_cannot_be_are_refused(figures, words):
    made = validator()
    assert words in judge(made, **figures)
    assert made.state_dict()["now"] == []  # what was refused sets no measure


def test_figures_that_are_missing_are_refused():
    made = validator()
    for name in ("samples", "steps", "loss"):
        left = {key: value for key, value in FIGURES.items() if key != name}
        assert judge_only(made, left) == f"it sent no figure '{name}'"


def judge_only(made: UpdateValidator, figures: dict[str, object]) -> str | None:
    return made.check("north", {"update": row(), "integers": torch.tensor([4])}, figures, 40, 4)


def test_the_gaps_of_a_row_and_the_layers_of_sites_stay_empty():
    bad = row()
    bad[PLACES.places[0].stop] = 1e-3
    assert "the gaps between weights" in judge(validator(), bad)
    place = next(place for place in PLACES.parameters if place.name == "1.bias")
    made = UpdateValidator(PLACES, Sites(), integers=1, own=torch.arange(place.start, place.stop))
    made.begin(torch.zeros(PLACES.length))
    assert judge(made) is None
    bad = row()
    bad[place.start] = 1e-3
    assert "keeps as its own" in judge(made, bad)


def test_a_set_bound_is_the_only_one():
    made = validator(max_norm=5.0)
    assert judge(made, row(4.99)) is None
    reason = judge(made, row(5.01))
    assert "sites.max_norm is 5" in reason
    assert "5.01" in reason
    for _ in range(5):
        assert judge(made, row(1e-6)) is None
    assert judge(made, row(4.99)) is None


def test_from_the_third_on_the_median_is_the_measure():
    made = validator()
    assert judge(made, row(1.0)) is None
    assert judge(made, row(9 * 10.0)) is None  # there is no median yet
    assert judge(made, row(1.1)) is None
    assert judge(made, row(10.9)) is None
    reason = judge(made, row(100.0))
    assert "norm 100" in reason
    assert "the median of the last 4" in reason
    assert "sites.max_norm" in reason
    assert len(made.state_dict()["now"]) == 4


def test_before_the_third_an_update_is_measured_by_the_model():
    made = validator()
    assert judge(made, row(FIRST * 0.99)) is None
    assert "1000 times that of the model" in judge(validator(), row(FIRST * 1.01))
    large = validator()
    large.begin(row(50.0))
    assert judge(large, row(FIRST * 49)) is None
    assert judge(large, row(FIRST * 51)) is not None


def test_a_site_with_more_steps_may_bring_a_longer_update():
    made = validator()
    for _ in range(3):
        assert judge(made, row(1.0)) is None
    sent = {"update": row(50.0), "integers": torch.tensor([4])}
    assert made.check("south", sent, {**FIGURES, "samples": 400, "steps": 40}, 400, 40) is None
    assert judge(made, row(50.0)) is not None


def test_updates_that_are_all_zero_do_not_shut_out_what_follows():
    made = validator()
    for _ in range(3):
        assert judge(made, row(0.0)) is None
    assert judge(made, row(1.0)) is None


def test_the_measure_is_of_this_round_and_the_last():
    made = validator()
    for norm in (1.0, 1.0, 1.0):
        assert judge(made, row(norm)) is None
    made.begin(torch.zeros(PLACES.length))
    assert judge(made, row(11.0)) is not None
    for norm in (9.0, 9.0, 9.0):
        assert judge(made, row(norm)) is None
    made.begin(torch.zeros(PLACES.length))
    assert judge(made, row(80.0)) is None
    for _ in range(3):  # rounds that nobody brought anything to forget nothing
        made.begin(torch.zeros(PLACES.length))
    assert judge(made, row(1e5)) is not None


def test_an_update_that_was_not_clipped_breaks_the_guarantee():
    made = UpdateValidator(PLACES, Sites(max_norm=100.0), integers=1, clip=1.0)
    assert judge(made, row(1.0)) is None
    assert "has not clipped it" in judge(made, row(1.01))


def test_the_norms_are_part_of_a_checkpoint():
    made, again = validator(), validator()
    for _ in range(3):
        judge(made, row(1.0))
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert again.state_dict() == made.state_dict()
    assert judge(again, row(20.0)) == judge(made, row(20.0)) is not None
    with pytest.raises(UserError, match="damaged"):
        again.load_state_dict({"before": [1.0], "now": "x"})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"classed": 0.0, "right": 0.0}, None),
        ({"count": 11.0}, "measured 11 test samples and said before that it has 10"),
        ({"loss": math.nan}, "loss=nan"),
        ({"right": 11.0}, "counted 11 right of 10"),
        ({"right": -1.0}, "counted -1 right"),
        ({"right": 0.5}, "counted 0.5 right"),
        ({"classed": 5.0}, "of 5 with a class"),
        ({"count": None}, "count=None"),
    ],
)
def test_what_sites_measure_is_checked_too(changed, words):
    reason = check_measured(
        {"count": 10.0, "loss": 3.0, "classed": 10.0, "right": 7.0, **changed}, 10
    )
    assert reason is None if words is None else words in reason
