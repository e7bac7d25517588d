"""Private names of PyTorch that several modules rely on, each with the reason. They were tried with
PyTorch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any


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
