"""`import allhands` provides the mpi backend, whichever of torch and allhands is imported first,
and nothing else."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from allhands import torch_hook

ORDER = """
import sys
import allhands
assert "torch" not in sys.modules and "mpi4py" not in sys.modules
assert sum(type(finder).__module__ == "allhands.torch_hook" for finder in sys.meta_path) == 1
import torch, inspect
from torch.distributed import distributed_c10d
assert not any(type(finder).__module__ == "allhands.torch_hook" for finder in sys.meta_path)
for loader in (distributed_c10d.__spec__.loader, distributed_c10d.__loader__):
    assert type(loader).__name__ == "SourceFileLoader"
assert "def init_process_group" in inspect.getsource(distributed_c10d)
assert distributed_c10d._new_process_group_helper.__wrapped__
assert "mpi4py.MPI" not in sys.modules
import importlib.util
assert torch.distributed.is_mpi_available() == (importlib.util.find_spec("mpi4py") is not None)
"""


def test_torch_after_allhands() -> None:
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def fake(**names: object) -> types.ModuleType:
    module = types.ModuleType(torch_hook._MODULE)
    module.__dict__.update(names)
    return module


def test_a_torch_that_is_there_is_changed_at_once_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    module = fake(_new_process_group_helper=lambda *given, **options: made.append((given, options)))
    monkeypatch.setitem(sys.modules, torch_hook._MODULE, module)
    torch_hook.install()
    helper = module._new_process_group_helper
    torch_hook.install()
    assert module._new_process_group_helper is helper
    helper(2, 0, [], "cpu:gloo,cuda:nccl", "store", "name", timeout=3)
    assert made == [((2, 0, [], "cpu:gloo,cuda:nccl", "store", "name"), {"timeout": 3})]


def test_torchs_own_mpi_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own, helper = object(), object()
    module = fake(_new_process_group_helper=helper, ProcessGroupMPI=own)
    monkeypatch.setitem(sys.modules, torch_hook._MODULE, module)
    torch_hook.install()
    assert (module._new_process_group_helper, module.ProcessGroupMPI) == (helper, own)


def test_a_torch_without_the_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake()
    monkeypatch.setitem(sys.modules, torch_hook._MODULE, module)
    torch_hook.install()
    assert not hasattr(module, "ProcessGroupMPI")
