"""`allhands init`: a first project for a kind of task."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from allhands.errors import UserError

_TEMPLATES = Path(__file__).parent / "templates"
_ENDING = ".template"


class ProjectKind(StrEnum):
    """The kinds of tasks."""

    images = "images"
    rows = "rows"
    regression = "regression"
    text = "text"
    steps = "steps"
    federated = "federated"


_ABOUT = {
    ProjectKind.images: "classes of images",
    ProjectKind.rows: "classes of rows of a table (CSV)",
    ProjectKind.regression: "numbers from rows of a table (CSV)",
    ProjectKind.text: "the next token of a text, by a small GPT",
    ProjectKind.steps: "steps of your own, by allhands.Runner",
    ProjectKind.federated: "classes of rows that clients keep",
}


def init(
    kind: Annotated[
        ProjectKind,
        typer.Argument(
            help="; ".join(f"{kind.value}: {about}" for kind, about in _ABOUT.items()),
            show_default=False,
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(),
) -> int:
    """Write a first project: run.yml, net.py (the model), samples.py (the data), test_project.py.

    The data are made by samples.py, so that it trains at once: allhands run -C run.yml. Put your
    own in their place.
    """
    sources = sorted([*_TEMPLATES.glob(f"common/*{_ENDING}"), *_TEMPLATES.glob(f"{kind.value}/*")])
    files = {folder / path.name.removesuffix(_ENDING): path for path in sources}
    there = [str(path) for path in files if path.exists()]
    if there:
        raise UserError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} there already; name another "
            f"folder: allhands init {kind.value} FOLDER"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, source in files.items():
        path.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    print(f"written to {folder}: {', '.join(path.name for path in files)}")
    inside = "" if folder == Path() else f"cd {folder} && "
    print(f"train it:    {inside}allhands run -C run.yml")
    print(f"measure it:  {inside}allhands evaluate logs/first")
    print(f"test it:     {inside}python -m pytest")
    return 0
