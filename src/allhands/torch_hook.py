"""What `import allhands` changes in torch: ``torch.distributed.init_process_group(backend="mpi")``
works on stock wheels.

torch is not imported for it. When `torch.distributed` is there already it is changed at once,
otherwise as soon as somebody imports it; mpi4py is imported when a group with this backend is made.
A torch that was built with MPI is left alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "torch.distributed.distributed_c10d"


def install() -> None:
    """Provide the backend now, or when `torch.distributed` is imported. Cheap, and safe to call
    again."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _provide(module)
    elif not any(isinstance(finder, _TorchFinder) for finder in sys.meta_path):
        # Neither class is one of importlib.abc's, whose import takes longer than all of `import
        # allhands`.
        finder: Any = _TorchFinder()
        sys.meta_path.insert(0, finder)


class _TorchFinder:
    """Watches for the one module, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = _TorchLoader(spec.loader)
            spec.loader = loader
        return spec


class _TorchLoader:
    """Loads a module as its own loader does, which it gives back to it, and then provides the
    backend."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _provide(module)


class _MPI:
    """Stands in for torch's ProcessGroupMPI, which its wheels lack."""

    @staticmethod
    def create(ranks: Sequence[int]) -> Any:
        return importlib.import_module("allhands.comm.mpi").create(ranks)


def _provide(module: ModuleType) -> None:
    torch: Any = module
    made = getattr(torch, "_new_process_group_helper", None)
    if made is None or getattr(torch, "ProcessGroupMPI", None) is not None:
        return  # torch's own MPI, or done before

    # torch makes an mpi group by ProcessGroupMPI.create(ranks), which is told neither the timeout
    # nor a store: both are known around it. Any other backend passes through.
    @functools.wraps(made)
    def helper(
        size: int, rank: int, ranks: Sequence[int], backend: str, *rest: Any, **options: Any
    ) -> Any:
        if "mpi" not in str(backend).lower().replace(":", ",").split(","):
            return made(size, rank, ranks, backend, *rest, **options)
        return importlib.import_module("allhands.comm.mpi").new_group(
            made, size, rank, ranks, backend, *rest, **options
        )

    torch._new_process_group_helper = helper
    torch.ProcessGroupMPI = _MPI
    torch._MPI_AVAILABLE = importlib.util.find_spec("mpi4py") is not None
