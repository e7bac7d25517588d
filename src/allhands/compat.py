"""Private names of PyTorch that the package relies on, each with the reason. They were tried with
PyTorch 2.11 and 2.13. Importing this module imports no torch."""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

# Name here: module, and name there.
_PRIVATE = {
    # The base of every BatchNorm, SyncBatchNorm among them; none of the public classes is.
    "BatchNormBase": ("torch.nn.modules.batchnorm", "_BatchNorm"),
    # The base of what has running statistics: BatchNorm and InstanceNorm.
    "NormBase": ("torch.nn.modules.batchnorm", "_NormBase"),
    # The base of every dropout but that in attention.
    "DropoutBase": ("torch.nn.modules.dropout", "_DropoutNd"),
    # Tensors in nested containers, those of the user's own classes among them.
    "pytree": ("torch.utils", "_pytree"),
    # Sees every operation; what PyTorch's own documentation tells to subclass.
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "dispatch_modes": ("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"),
    # The store of a process group whose messages go nowhere.
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    # The group of a functional collective, which has only its name.
    "group_named": ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    # Leaves the mode of tensors without data for a while.
    "real_tensors": ("torch._subclasses.fake_tensor", "unset_fake_temporarily"),
    # Within, tensors without data are those on the meta device that they stand on.
    "in_fake_kernel": ("torch._subclasses.fake_tensor", "in_kernel_invocation_manager"),
    # What fully_shard walks through a module's outputs with.
    "apply_to_tensors": ("torch.distributed.utils", "_apply_to_tensors"),
    # Where a tensor lies in the files of a checkpoint, which a reader of one's own must say.
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    # Whether torch.compile can make kernels for a GPU.
    "has_triton": ("torch.utils._triton", "has_triton"),
    # A backward pass, of which everything was looked at before.
    "run_backward": ("torch.autograd.graph", "_engine_run_backward"),
    # Whether a profiler records, which wants to see `Optimizer.step`.
    "profiler_enabled": ("torch.autograd", "_profiler_enabled"),
}


def __getattr__(name: str) -> Any:
    if name not in _PRIVATE:
        raise AttributeError(f"module 'allhands.compat' has no attribute {name!r}")
    module, private = _PRIVATE[name]
    return getattr(importlib.import_module(module), private)


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as where a layer is computed again; PyTorch has no
    public way to ask."""
    import torch

    return torch._C._current_graph_task_id() != -1


def default_store() -> Any:
    """The store of the default process group, or None where its backend has none.

    PyTorch has no public way to a store that `init_process_group` has made.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def mark_stepped(optimizer: Any) -> None:
    """Tell schedulers that the optimizer's step was taken, where something else took it.

    PyTorch's schedulers warn when they step before the optimizer, and read this attribute.
    """
    optimizer._opt_called = True


def step_hooks(optimizer: Any) -> list[Any]:
    """The hooks that are called before and after the optimizer's step; PyTorch can only add and
    remove them."""
    return [
        hook
        for when in ("pre", "post")
        for hook in getattr(optimizer, f"_optimizer_step_{when}_hooks", {}).values()
    ]


def gradient_hooks(parameter: Any) -> list[Any]:
    """The hooks on the gradient of a parameter: those of `register_hook` and of
    `register_post_accumulate_grad_hook`."""
    kinds = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [hook for hooks in kinds for hook in (hooks or {}).values()]


def abort_groups() -> None:
    """End what waits in the process groups of nccl; PyTorch has no public way for this.

    All are aborted at once: taking one down may wait for what another has on the GPU. Groups of
    gloo have nothing that could be aborted (tried with 2.13).
    """
    threads = [Thread(target=group.abort, daemon=True) for group in _groups_of_nccl()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forget_groups() -> None:
    """Let go of the default process group and of all others, which were aborted.

    PyTorch's own ways, destroying them and aborting them once more, wait for ever with nccl where a
    rank is gone (tried with 2.11). What is left of the groups is kept, as taking it down waits too.
    """
    from torch.distributed import distributed_c10d

    _aborted.extend(_groups_of_nccl())
    distributed_c10d._update_default_pg(None)
    world = distributed_c10d._world
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        table.clear()
    distributed_c10d._unregister_all_process_groups()
    world.group_count = 0


def connect_group(group: Any, device: Any) -> None:
    """Make the connections of a process group of nccl, which its first operation would make."""
    group._get_backend(device).eager_connect_single_device(device)


def _groups_of_nccl() -> list[Any]:
    from torch.distributed import distributed_c10d

    groups = list(distributed_c10d._world.pg_map.items())
    return [group for group, (backend, _) in groups if "nccl" in str(backend)]


_aborted: list[Any] = []


def forget_meshes() -> None:
    """Let go of what DTensor remembers of meshes: one of other groups may be equal to a new one."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def set_group_timeout(seconds: float, group: Any = None) -> None:
    """Set how long an operation of a process group waits, None is the default one; PyTorch takes
    one number for that and for connecting."""
    from datetime import timedelta

    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def keep_libraries() -> None:
    """Libraries of operators are not taken apart when this process ends.

    PyTorch does that one operator after another, which takes as long as all else in the life of a
    short worker. A process that leaves its interpreter up needs none of it.
    """
    take_apart = getattr(sys.modules.get("torch.library"), "_del_library", None)
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = one.peek()
        if found is not None and found[1] is take_apart:
            one.atexit = False


class _Chunks:
    """The parts that fully_shard cuts a parameter into, each made when it is asked for.

    Args:
        tensor: the parameter's data.
        num_chunks, dim: as for torch.chunk; what is left over comes as empty parts.
    """

    def __init__(self, tensor: Any, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._rows = tensor.size(dim)
        self._size = -(-self._rows // num_chunks)

    def __getitem__(self, number: int) -> Any:
        begin = min(number * self._size, self._rows)
        return self._tensor.narrow(self._dim, begin, min(self._size, self._rows - begin))


@contextmanager
def chunks_on_demand() -> Iterator[None]:
    """Within, fully_shard makes only the parts of a parameter that it uses, two of thousands."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    plain = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _Chunks  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = plain
