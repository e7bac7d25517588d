"""What the TensorFlow half says where TensorFlow is missing, too old, or told to use Keras 2."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from allhands.errors import UserError

NAMES = (
    "allhands.horovod.tensorflow",
    "allhands.horovod.tensorflow.keras",
    "allhands.horovod.keras",
)


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(NAMES):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", ["1.15.5", "2.9.0", "2.15.1"])
def test_an_old_tensorflow_is_refused_by_its_version(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    old = types.ModuleType("tensorflow")
    old.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", old)
    with pytest.raises(
        UserError,
        match=rf"2\.16 or newer, and {version} is installed: pip install 'tensorflow>=2.16'",
    ):
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TF_USE_LEGACY_KERAS", "1", "unset TF_USE_LEGACY_KERAS"),
        ("KERAS_BACKEND", "jax", "set KERAS_BACKEND=tensorflow"),
    ],
)
def test_another_keras_is_refused_by_the_variable_that_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    new = types.ModuleType("tensorflow")
    new.__version__ = "2.21.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", new)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=message):
        importlib.import_module(NAMES[0])


def test_without_tensorflow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_NoTensorFlow(), *sys.meta_path])
    with pytest.raises(UserError, match=r"pip install 'allhands\[tensorflow\]'"):
        importlib.import_module(NAMES[0])


class _NoTensorFlow:
    def find_spec(self, name: str, *_: object) -> None:
        if name == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
