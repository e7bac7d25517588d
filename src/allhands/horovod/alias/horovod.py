"""`import horovod.torch` gives `allhands.horovod.torch`, and so on, where this file's folder is on
Python's path.

`allhands launch --horovod` puts it there for the processes that it starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

from allhands.errors import UserError
from allhands.horovod.absent import ABSENT

# The release whose names these are; scripts compare it.
__version__ = "0.28.1"
__path__: list[str] = []

_NAMES = {
    "horovod.common": "allhands.horovod",
    "horovod.common.elastic": "allhands.horovod.elastic",
    "horovod.common.exceptions": "allhands.horovod.exceptions",
    "horovod.common.process_sets": "allhands.horovod.process_sets",
    "horovod.common.util": "allhands.horovod.util",
    "horovod.torch": "allhands.horovod.torch",
    "horovod.torch.compression": "allhands.horovod.torch.compression",
    "horovod.torch.elastic": "allhands.horovod.torch.elastic",
    "horovod.torch.elastic.sampler": "allhands.horovod.torch.elastic",
    "horovod.torch.elastic.state": "allhands.horovod.torch.elastic",
    "horovod.torch.functions": "allhands.horovod.torch.functions",
    "horovod.torch.mpi_ops": "allhands.horovod.torch",
    "horovod.torch.optimizer": "allhands.horovod.torch.optimizer",
    "horovod.torch.sync_batch_norm": "allhands.horovod.torch.sync_batch_norm",
    "horovod.tensorflow": "allhands.horovod.tensorflow",
    "horovod.tensorflow.compression": "allhands.horovod.tensorflow.compression",
    "horovod.tensorflow.elastic": "allhands.horovod.tensorflow.elastic",
    "horovod.tensorflow.functions": "allhands.horovod.tensorflow.variables",
    "horovod.tensorflow.keras": "allhands.horovod.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "allhands.horovod.tensorflow.keras.callbacks",
    "horovod.tensorflow.mpi_ops": "allhands.horovod.tensorflow",
    "horovod.tensorflow.sync_batch_norm": "allhands.horovod.tensorflow.sync_batch_norm",
    "horovod.tensorflow.keras.elastic": "allhands.horovod.tensorflow.keras.elastic",
    "horovod.keras": "allhands.horovod.keras",
    "horovod.keras.callbacks": "allhands.horovod.keras.callbacks",
    "horovod.keras.elastic": "allhands.horovod.keras.elastic",
}


class _AliasFinder:
    """Finds the modules of the table, and refuses the others by name."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        if fullname not in _NAMES:
            instead = ABSENT.get(fullname)
            raise ModuleNotFoundError(
                f"there is no {fullname!r} here: allhands has Horovod's names for torch, "
                "tensorflow and keras"
                + (f"; use {instead}" if instead else " (docs/horovod_api.md lists them)"),
                name=fullname,
            )
        loader: Any = _AliasLoader(_NAMES[fullname])
        return ModuleSpec(fullname, loader, is_package=True)


class _AliasLoader:
    """Gives the module that there is, and leaves it as it was."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> Any:
        module = importlib.import_module(self._name)
        if "allhands.horovod.tensorflow" in sys.modules:
            keras2 = importlib.import_module("allhands.horovod.tensorflow.keras.keras2")
            keras2.provide()
        self._spec = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self._spec


def run(*args: Any, **kwargs: Any) -> Any:
    """Horovod's way to start processes from Python.

    Raises:
        UserError: always; it says what to write.
    """
    raise UserError(f"horovod.run is not here: write {ABSENT['horovod.run']}")


if not any(
    type(finder).__name__ == "_AliasFinder" and type(finder).__module__ == __name__
    for finder in sys.meta_path
):
    _finder: Any = _AliasFinder()
    sys.meta_path.insert(0, _finder)
