"""Figures that need no screen, and leave a notebook's own figures as they are."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from allhands.errors import UserError

TEXT, FAINT = "#303236", "#d8dade"
DPI = 140  # of PNG files
# Inches around axes that have a title and a label below: left, right, below, above.
_ROOM = (0.72, 0.25, 0.55, 0.48)
# Of these, too. zlib's 9, which is matplotlib's default, takes four times as long for 3 % less.
COMPRESSION = 3
_TICKS = 6  # below, at most
_LABEL = 0.4  # inches from the axes to the middle of the label below


def has_matplotlib() -> bool:
    """Whether there is something to draw with."""
    return find_spec("matplotlib") is not None


def require_matplotlib(what: str = "a plot") -> Any:
    """The module ``matplotlib.figure``, to draw `what`."""
    try:
        import matplotlib.figure  # not pyplot, which would choose a backend
    except ImportError:
        raise UserError(
            f"{what} needs matplotlib, which is not installed; write pip install "
            "'allhands[report]', or leave it out"
        ) from None
    return matplotlib.figure


def new_figure(width: float, height: float, what: str = "a plot") -> Any:
    """A ``matplotlib.figure.Figure`` of so many inches, to draw `what`.

    Raises:
        UserError: matplotlib is not installed.
    """
    require_matplotlib(what)
    return _figure_class()(figsize=(width, height), layout="constrained")


def fixed_axes(figure: Any, rows: int = 1, columns: int = 1) -> list[Any]:
    """A grid of axes with fixed margins in an empty figure, row by row.

    This spares the default layout's measurement of every text, which takes as long as the drawing.
    """
    left, right, below, above = _ROOM
    width, height = figure.get_size_inches()
    across, down = columns * (left + right), rows * (below + above)
    figure.set_layout_engine(None)
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=below / height,
        top=1 - above / height,
        wspace=across / (width - across),
        hspace=down / (height - down),
    )
    return list(figure.subplots(rows, columns, squeeze=False).flat)


@cache
def _figure_class() -> Any:
    class ShownFigure(require_matplotlib().Figure):  # type: ignore[misc]
        """Shows itself in a notebook where pyplot is not set up for it."""

        def _repr_png_(self) -> bytes:
            room = io.BytesIO()
            self.savefig(room, format="png")
            return room.getvalue()

    return ShownFigure


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure into a file, whose ending says the format (png, svg, pdf)."""
    with writing(path) as file:
        given: dict[str, Any] = {}
        if file.suffix.lower() == ".png":
            given["pil_kwargs"] = {"compress_level": COMPRESSION}
        figure.savefig(file, dpi=DPI, **given)


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """Give the path of a picture that is to be written, and refuse one that cannot be.

    Raises:
        UserError: an OSError or a ValueError was raised meanwhile.
    """
    path = Path(path).expanduser()
    try:
        yield path
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"the plot '{path}' cannot be written: {reason}; choose another file"
        ) from None


def font_file(bold: bool = False) -> str:
    """The path of matplotlib's default font, found without an import of matplotlib where that is
    installed as its makers pack it.

    Raises:
        UserError: matplotlib is not installed.
    """
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    package = find_spec("matplotlib")
    for folder in (package and package.submodule_search_locations) or ():
        found = Path(folder, "mpl-data", "fonts", "ttf", name)
        if found.is_file():
            return str(found)
    require_matplotlib()
    from matplotlib.font_manager import FontProperties, findfont

    return str(findfont(FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")))


def label_below(axes: Any, label: str) -> None:
    """Name the lower axis at a fixed place, of `fixed_axes`; the default one is found by
    measuring all numbers on it."""
    height = axes.get_position().height * axes.figure.get_size_inches()[1]
    axes.set_xlabel(label, verticalalignment="center")
    axes.xaxis.set_label_coords(0.5, -_LABEL / height)


def plain(axes: Any, whole: bool = True) -> None:
    """Leave of an axis what is read: the ground line, and faint lines behind the curves; `whole`:
    whole numbers below."""
    if axes.get_xscale() == "linear":
        axes.xaxis.get_major_locator().set_params(integer=whole, nbins=_TICKS)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(left=False, bottom=False, colors=TEXT)
    axes.xaxis.label.set_color(TEXT)
