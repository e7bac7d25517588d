"""The table and the plot, from rows made by hand."""

from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import pytest

from allhands.errors import UserError
from allhands.verify import Report, Row


def curves(values: list[float]) -> dict[str, dict[str, list[float]]]:
    return {
        kind: {"difference": values, "limit": [1e-5] * len(values)}
        for kind in ("gradients", "parameters")
    }


SAME = Row("ddp", 1, "same", None, "", 0.0, 0.0, curves=curves([0.0, 0.0]))
NEAR = Row("ddp", 2, "same", None, "gradient of w", 4e-7, 5e-7, curves=curves([1e-7, 4e-7]))
WRONG = Row(
    "ddp", 3, "DIFFERS", 4, "gradient of w", 0.25, 5e-7, ["not exchanged: w"], curves([1e-7, 0.2])
)
APART = Row("ddp", 4, "DIFFERS", 1, "samples", math.nan, 0.0, ["random data: …"])


def test_ok_is_that_no_row_differs() -> None:
    assert Report(
        [SAME, NEAR, Row("h", 2, "lossy as declared", None, "all parameters", 0.1, 1e-6)]
    ).ok
    assert not Report([SAME, WRONG]).ok


def test_the_table() -> None:
    text = Report([SAME, NEAR, WRONG, APART], about="20 steps", notes=["seen"]).table()
    assert text == (
        "20 steps\n"
        "strategy  workers  first differing step  quantity       difference    noise  times noise  "
        "verdict\n"
        "ddp             1                     -  -                       0        -            -  "
        "same\n"
        "ddp             2                     -  gradient of w     4.0e-07  5.0e-07          0.8  "
        "same\n"
        "ddp             3                     4  gradient of w        0.25  5.0e-07      5.0e+05  "
        "DIFFERS\n"
        "ddp             4                     1  samples                 -        -            -  "
        "DIFFERS\n"
        "\nddp with 3 workers:\n  * not exchanged: w\n\nddp with 4 workers:\n  * random data: "
        "…\n\nNoticed:\n  * seen"
    )


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Report([SAME, NEAR, WRONG, APART]).save_plot(tmp_path / "v.png")
    assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        Report([NEAR]).save_plot(tmp_path / "absent" / "v.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'allhands\[report\]'"):
        Report([NEAR]).save_plot("v.png")
