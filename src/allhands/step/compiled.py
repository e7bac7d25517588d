"""A model whose forward and backward passes are compiled by ``torch.compile`` while it trains, and
is as before afterwards."""

from __future__ import annotations

import functools
import re
import shutil
import sys
import sysconfig
import types
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allhands.compat import has_triton
from allhands.errors import UserError
from allhands.step.guards import where_raised

_FORMS = 16  # of each module: shapes of micro-batches, in training and in evaluation


def cannot_compile(reason: str) -> UserError:
    """The error where ``step="compile"`` was asked for; `reason` is the end of a sentence."""
    return UserError(
        f"step='compile': the model cannot be compiled, since {reason}; change that, or write "
        "step='auto'"
    )


def compiler_missing(device: torch.device) -> str | None:
    """What ``torch.compile`` needs for this device and does not find, as the end of a sentence;
    None where all is there."""
    if device.type == "cuda":
        return None if has_triton() else "Triton, which compiles for GPUs, is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        found = shutil.which(get_cpp_compiler())
    except InvalidCxxCompiler:
        found = None
    if not found:
        return (
            "there is no C++ compiler, which it needs on a CPU: install g++, or name one in the "
            "variable CXX"
        )
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return (
        None
        if headers.is_file()
        else f"there is no {headers}, which it needs on a CPU: install python3-dev"
    )


def is_compilers(error: BaseException) -> bool:
    """Whether the compiler has failed, and not the model."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


class Compiled:
    """A context in which calls of a model, or of its layers, are compiled; an error of the compiler
    leaves it as a `UserError`.

    Modules are compiled in place, as by `torch.nn.Module.compile`: parameters, hooks and names in
    ``state_dict`` stay what they are, and a copy or a pickle of the model is not compiled. Each
    shape of inputs is compiled for itself, so that a step does not depend on which shapes were seen
    before it, and dropout draws what it would draw eagerly.

    Args:
        modules: each is compiled for itself. What is compiled as one gives all gradients of its
            weights at the end of its backward pass, when no time is left to exchange them behind
            it.
        device: of the model.
        lenient: what the compiler fails at runs as it is.

    Raises:
        UserError: there is no compiler for the device.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, lenient: bool = False
    ) -> None:
        missing = compiler_missing(device)
        if missing is not None:
            raise cannot_compile(missing)
        self.modules = modules
        self._lenient = lenient
        self._stack = ExitStack()

    def __enter__(self) -> Compiled:
        limit = _FORMS * len(self.modules)
        changes: dict[str, Any] = {
            "recompile_limit": limit,
            "accumulated_recompile_limit": max(256, limit),
        }
        # It cuts what is called inside DistributedDataParallel by buckets, and cannot do so where
        # layers are computed again.
        changes["optimize_ddp"] = False
        changes["suppress_errors"] = self._lenient
        self._stack.enter_context(torch._dynamo.config.patch(**changes))
        for module in self.modules:
            _show_globals(module, self._stack)
        call = torch.compile(_own_copy(), dynamic=False, options={"fallback_random": True})
        for module in self.modules:
            self._stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
            module._compiled_call_impl = functools.partial(call, module)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.close()
        if error is not None and is_compilers(error):
            raise cannot_compile(f"{message_of(error)}, at {_line_of(error)}") from error


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _own_copy() -> types.FunctionType:
    """What is compiled is kept by code object, up to a limit, and goes with it: that of
    Module._call_impl is everybody's."""
    return types.FunctionType(_call.__code__.replace(), _call.__globals__, "_call")


def _show_globals(model: nn.Module, stack: ExitStack) -> None:
    """Until `stack` is closed, modules of Python have the names that functions of a model use as
    globals.

    A model from the user's script arrives in a worker with globals of its own, which are not those
    of any module; the compiler looks names up by module.
    """
    found: dict[int, dict[str, Any]] = {}
    for kind in {
        kind
        for module in model.modules()
        for kind in type(module).__mro__
        if not kind.__module__.startswith("torch.")
    }:
        found |= {
            id(f.__globals__): f.__globals__
            for f in vars(kind).values()
            if isinstance(f, types.FunctionType)
        }
    for module in model.modules():
        found |= {
            id(f.__globals__): f.__globals__
            for f in vars(module).values()
            if isinstance(f, types.FunctionType)
        }
    for names in found.values():
        home = sys.modules.get(names.get("__name__", ""))
        if home is None or vars(home) is names:
            continue
        for name, value in names.items():
            if name not in vars(home):
                setattr(home, name, value)
                stack.callback(vars(home).pop, name, None)


def message_of(error: BaseException) -> str:
    """What an error says, without the compiler's advice: the error of the operation that failed,
    or the first two lines."""
    cause = re.search(r": got (\w+\(.*\))$", str(error), re.MULTILINE)
    if cause is not None:
        return cause[1]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__


def _line_of(error: BaseException) -> str:
    """The line of the user's that was compiled, or the one that led to it."""
    stack = list(getattr(error, "real_stack", None) or ())
    own = [
        frame
        for frame in stack
        if frame.filename != __file__ and not frame.filename.startswith(_TORCH)
    ]
    if not own:
        return where_raised(error)
    frame = own[-1]
    return f"{frame.filename}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")


_TORCH = torch.__path__[0]
