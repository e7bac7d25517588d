"""What a training has measured, row by row."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.errors import UserError
from allhands.report.curves import Curve, curves_figure, over
from allhands.report.figures import save_figure
from allhands.report.history_table import Columns, html_table, text_table

Values = dict[str, dict[str, float]]

_ROWS = 50  # of a table
_WIDTH = 115  # of a table of text, in characters


class History(dict[str, Any]):
    """What a training has measured: a dict that shows itself as a table and as curves.

    ``{"epoch": [1, 2], "step": [40, 80], "lr": […], "seconds": […], "train": {"loss": […]},
    "valid": {…}}``; that of a federated training has "round" in the place of "epoch".

    Args:
        columns: such a dict.
        rows: of the columns ``"loader metric"`` that have a value in some rows only, the numbers of
            these rows.
    """

    def __init__(
        self, columns: Mapping[str, Any] | None = None, rows: Mapping[str, list[int]] | None = None
    ) -> None:
        super().__init__(columns or {})
        self._rows = dict(rows or {})

    def __reduce__(self) -> Any:
        return History, (dict(self), self._rows)

    # ------------------------------------------------------------------ rows

    def add(self, row: Mapping[str, float], values: Values) -> None:
        """Add a row: `row` has its epoch, step, lr and seconds, `values` what was measured, by
        loader and name."""
        number = self._length()
        for key, value in row.items():
            self[key].append(value)
        for loader, metrics in values.items():
            for name, value in metrics.items():
                column = self.setdefault(loader, {}).setdefault(name, [])
                rows = self._rows.setdefault(f"{loader} {name}", list(range(len(column))))
                column.append(value)
                rows.append(number)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it, plain values alone."""
        return copy.deepcopy({"history": dict(self), "history_rows": self._rows})

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> History:
        """The history that a checkpoint holds."""
        return cls(state["history"], state.get("history_rows"))

    def _length(self) -> int:
        return len(self.get(self._unit, []))

    @property
    def _unit(self) -> str:
        return "round" if "round" in self else "epoch"

    # ------------------------------------------------------------------ what is shown

    def measured(self) -> dict[str, Curve]:
        """Every measured column by its name, such as ``"valid accuracy"``: the numbers of its rows,
        and its values there."""
        everywhere = list(range(self._length()))
        found = {}
        for loader, metrics in self.items():
            if not isinstance(metrics, Mapping):
                continue
            # A federated history says in which rounds a loader was evaluated.
            places = {value: n for n, value in enumerate(self.get("round", []))}
            own = [places[value] for value in metrics.get("round", [])]
            for name, column in metrics.items():
                rows = own or self._rows.get(f"{loader} {name}", everywhere)
                is_column = isinstance(column, list) and name != "round"
                if is_column and len(rows) == len(column):
                    found[f"{loader} {name}"] = rows, list(column)
        return found

    def columns(self) -> Columns:
        """The table: numbers by the name of a column, one a row; None where there is none."""
        count = self._length()
        found: dict[str, list[float | None]] = {
            name: list(column)
            for name, column in self.items()
            if isinstance(column, list)
            and len(column) == count
            and all(isinstance(value, (int, float)) for value in column)
        }
        for name, (rows, values) in self.measured().items():
            known = dict(zip(rows, values, strict=True))
            found[name] = [known.get(number) for number in range(count)]
        return found

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the curves: one axis a metric, one curve a loader.

        As the last line of a notebook's cell it is shown there.

        Args:
            path: of a file to write as well; its ending says the format.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            UserError: nothing was measured, matplotlib is not installed, or the file cannot be
                written.
        """
        curves: dict[str, dict[str, Curve]] = {}
        for column, curve in self.measured().items():
            loader, _, name = column.partition(" ")
            curves.setdefault(name, {})[loader] = curve
        if not self._length() or not curves:
            raise UserError("plot() of a history without a row: train at least one epoch")
        if self._unit == "round":
            label, at = "round", [number + 1 for number in self["round"]]
        else:
            label, at = over("epoch", self["epoch"], self["step"])
        figure = curves_figure({label: at}, curves)
        if path is not None:
            save_figure(figure, path)
        return figure

    def __repr__(self) -> str:
        if not self._length():
            return "History without a row"
        return "\n".join(text_table(self.columns(), _WIDTH, _ROWS).lines)

    def _repr_html_(self) -> str:
        if not self._length():
            return "<p>History without a row</p>"
        return html_table(self.columns(), _ROWS)


def new_history() -> History:
    """A history without an epoch."""
    return History({"epoch": [], "step": [], "lr": [], "seconds": []})
