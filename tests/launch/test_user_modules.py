"""Which attributes of the user's modules differ from a fresh import."""

from __future__ import annotations

import gc
import importlib
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from allhands.launch import user_modules

SOURCE = """
import os
from other_settings import LIMIT
import other_settings
SCALE, PAIR = 1.0, (1, 2)
SIZE = 1 << 4
NAMES = ["a"]
RATE = 0.5
class Config:
    def __init__(self, **values): self.__dict__.update(values)
CONFIG = Config(depth=2)
RANK = int(os.environ.get("RANK", 0))
def function(): return SIZE
TABLE = dict(a=1)
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    names = ("own_settings", "other_settings")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_settings.py").write_text(SOURCE)
    (tmp_path / "other_settings.py").write_text("LIMIT = 3\n")
    yield importlib.import_module("own_settings")
    user_modules._finder.pending.clear()
    if user_modules._finder in sys.meta_path:
        sys.meta_path.remove(user_modules._finder)
    for name in names:
        sys.modules.pop(name, None)


def found() -> tuple[dict[str, Any], dict[str, Any]]:
    plain, objects = user_modules.changed()
    return plain.get("own_settings", {}), objects.get("own_settings", {})


def test_what_is_as_written_is_not_sent(settings: ModuleType) -> None:
    plain, objects = found()
    assert not {"SCALE", "PAIR", "SIZE", "NAMES", "RATE", "RANK", "LIMIT"} & (
        plain.keys() | objects.keys()
    )


def test_what_was_set_later_is_sent(settings: ModuleType) -> None:
    settings.SIZE, settings.RATE, settings.LIMIT, settings.NEW = 5, math.nan, 7, torch.ones(2)  # type: ignore[attr-defined]
    settings.NAMES.append("b")
    settings.CONFIG.depth = 9
    settings.TABLE["a"] = 2
    settings.RANK = 4  # type: ignore[attr-defined]
    plain, objects = found()
    assert {name: plain[name] for name in ("SIZE", "LIMIT", "NAMES", "TABLE")} == {
        "SIZE": 5,
        "LIMIT": 7,
        "NAMES": ["a", "b"],
        "TABLE": {"a": 2},
    }
    assert math.isnan(plain["RATE"])
    assert objects["CONFIG"].depth == 9
    assert objects["NEW"].tolist() == [1, 1]
    assert "RANK" not in plain, "each worker computes it"
    assert "os" not in plain | objects


def test_a_fresh_import_gets_them_at_once(settings: ModuleType) -> None:
    del sys.modules["own_settings"], sys.modules["other_settings"]
    user_modules.put({"other_settings": {"LIMIT": 11}, "own_settings": {"SIZE": 12}})
    fresh = importlib.import_module("own_settings")
    assert (fresh.LIMIT, fresh.SIZE, fresh.function(), fresh.RATE) == (11, 12, 12, 0.5)
    assert type(fresh.__spec__.loader).__name__ == "SourceFileLoader"  # type: ignore[union-attr]


def test_several_threads_may_look_at_once() -> None:
    def look(number: int) -> int:
        return look(number - 1) if number else len(user_modules._parsed.__wrapped__(__file__, 0))

    def yields(*_: Any) -> None:
        time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(yields)
    gc.set_threshold(200)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(look, [0, 3, 6, 9] * 10)) == {look(0)}
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(yields)


def test_modules_of_libraries_are_not_looked_at() -> None:
    names = {module.__name__ for module in user_modules._own_modules()}
    assert not {
        name
        for name in names
        if name.partition(".")[0] in ("torch", "json", "allhands", "numpy", "pytest")
    }


def test_what_a_library_has_written_and_imported_is_not_the_users(
    settings: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ModuleType("json.made")
    made.__file__ = str(tmp_path / "made.py")
    Path(made.__file__).write_text("A = 1\n")
    made.A = 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "json.made", made)
    plain, objects = user_modules.changed()
    assert "json.made" not in plain | objects
    made.__name__ = "own_settings.made"
    monkeypatch.setitem(sys.modules, "own_settings.made", made)
    assert user_modules.changed()[0]["own_settings.made"] == {"A": 2}
