"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from allhands.atomic_write import atomic_write, atomic_write_text


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "found.csv"
    atomic_write_text(path, "before")
    with atomic_write(path) as aside:
        assert aside.suffix == ".csv"
        aside.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "found.csv"
    atomic_write_text(path, "before")
    with pytest.raises(ValueError, match="full"), atomic_write(path) as aside:
        aside.write_text("aft")
        raise ValueError("full")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_processes_of_the_same_number_do_not_write_into_one_file(tmp_path: Path) -> None:
    """Of two hosts or containers that share a folder."""
    path = tmp_path / "found.csv"
    with atomic_write(path) as one, atomic_write(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"
