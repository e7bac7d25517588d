"""The picture of how many workers took part."""

from __future__ import annotations

from pathlib import Path

import pytest

from allhands.errors import UserError
from allhands.report import Change, draw_membership

pytest.importorskip("matplotlib")

CHANGES = [Change(1000.0, 4, begins=True), Change(1030.0, 2), Change(1200.0, 3, joined=1)]


def test_the_line_and_the_marks_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from allhands.report import membership_plot

    figures = []
    monkeypatch.setattr(
        membership_plot, "save_figure", lambda figure, _path: figures.append(figure)
    )
    # The second job goes on from a checkpoint of the first.
    more = [Change(1800.0, 3, begins=True), Change(1860.0, 3, joined=1)]
    draw_membership(tmp_path / "membership.png", [*CHANGES, *more], 2200.0)
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "minutes since the beginning"
    lines = [line for line in axes.lines if line.get_marker() == "None"]
    assert [list(line.get_ydata()) for line in lines] == [[4, 2, 3, 3], [3, 3, 3]]
    drawn = {}
    for line in [line for line in axes.lines if line not in lines]:
        label = str(line.get_label())
        places = [round(float(at), 2) for at in line.get_xdata()]
        drawn["" if label.startswith("_") else label, line.get_marker()] = [
            *zip(places, line.get_ydata(), strict=True)
        ]
    assert drawn["lost", "v"] == [(0.5, 2)]
    assert drawn["joined", "^"] == [(3.33, 3)]
    assert drawn["", "^"] == [(14.33, 3)], "the legend names it once"
    assert drawn["", "v"] == [(14.33, 3)], "one was lost as another joined"


def test_a_file_is_written_or_refused(tmp_path: Path) -> None:
    draw_membership(tmp_path / "membership.png", CHANGES, 1300.0)
    assert (tmp_path / "membership.png").stat().st_size > 1000
    with pytest.raises(UserError, match="cannot be written"):
        draw_membership(tmp_path / "absent" / "membership.png", CHANGES, 1300.0)
