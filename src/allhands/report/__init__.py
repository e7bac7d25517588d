"""Pictures of trainings, drawn with matplotlib."""

from allhands.report.curves import draw_curves
from allhands.report.figures import has_matplotlib, new_figure, require_matplotlib, save_figure

__all__ = ["draw_curves", "has_matplotlib", "new_figure", "require_matplotlib", "save_figure"]
