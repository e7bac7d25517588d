"""Pictures of trainings, drawn with matplotlib."""

from allhands.report.curves import draw_curves
from allhands.report.figures import has_matplotlib, new_figure, require_matplotlib, save_figure
from allhands.report.history import History
from allhands.report.membership_plot import Change, draw_membership

__all__ = [
    "Change",
    "History",
    "draw_curves",
    "draw_membership",
    "has_matplotlib",
    "new_figure",
    "require_matplotlib",
    "save_figure",
]
