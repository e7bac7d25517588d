"""What the caller has set in its process, and the workers need to be in its place.

`sent` captures it where workers are asked for. It travels before the function and its arguments,
and sets the worker's process as it is unpickled, so that all which follows meets it. The random
generators are no part of it: their state is derived from the seed. Threads, devices and the
variables of a rank are the worker's own.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from allhands.launch import user_modules
from allhands.launch.records import Levels

# Flags of torch that are read and written as attributes.
_FLAGS = (
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.benchmark_limit",
    "torch.backends.cudnn.allow_tf32",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "torch.backends.mkldnn.enabled",
    "torch.backends.mkldnn.deterministic",
    "torch.backends.mkldnn.allow_tf32",
    "torch.backends.opt_einsum.enabled",
    "torch.backends.nnpack.enabled",
    "torch.utils.deterministic.fill_uninitialized_memory",
)
# Pairs of functions that read and write a setting of torch.
_FUNCTIONS: tuple[tuple[str, str], ...] = (
    ("torch.get_default_dtype", "torch.set_default_dtype"),
    ("torch.get_float32_matmul_precision", "torch.set_float32_matmul_precision"),
    ("torch.is_grad_enabled", "torch.set_grad_enabled"),
    ("torch.is_warn_always_enabled", "torch.set_warn_always"),
    ("torch.backends.cuda.flash_sdp_enabled", "torch.backends.cuda.enable_flash_sdp"),
    (
        "torch.backends.cuda.mem_efficient_sdp_enabled",
        "torch.backends.cuda.enable_mem_efficient_sdp",
    ),
    ("torch.backends.cuda.math_sdp_enabled", "torch.backends.cuda.enable_math_sdp"),
    ("torch.backends.cuda.cudnn_sdp_enabled", "torch.backends.cuda.enable_cudnn_sdp"),
    ("torch.multiprocessing.get_sharing_strategy", "torch.multiprocessing.set_sharing_strategy"),
    ("sys.getrecursionlimit", "sys.setrecursionlimit"),
)
_DENORMAL = 5e-324


class _Call:
    """Calls a function where it is unpickled."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return self.function, self.args


def sent() -> tuple[Any, ...]:
    """What sets a worker as this process is, when it is unpickled there, part by part."""
    plain, objects = user_modules.changed()
    return (
        _Call(apply, _captured()),
        _Call(user_modules.put, plain),
        _Call(user_modules.put, objects),
    )


def _captured() -> dict[str, Any]:
    found: dict[str, Any] = {
        "logging": Levels.capture(),
        "flush_denormal": _DENORMAL * float("1") == 0,
        "torch": {},
        "warnings": _filters(),
    }
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy_errors"] = numpy.geterr()
    if torch is None:
        return found
    for name in (*_FLAGS, *(getter for getter, _ in _FUNCTIONS)):
        # A setting that this torch does not have, or has two ways to say.
        with contextlib.suppress(Exception):
            value = _named(name)
            found["torch"][name] = value() if callable(value) else value
    found["deterministic"] = _determinism(torch)
    found["anomaly"] = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
    found["print"] = dict(vars(torch._tensor_str.PRINT_OPTS))
    around = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if around is not None:
        # Each worker has a GPU of its own.
        found["device"] = str(around.device) if around.device.type == "cpu" else around.device.type
    found["autocast"] = {
        device: torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    }
    return found


def _determinism(torch: Any) -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _filters() -> list[tuple[Any, ...]]:
    kept = []
    for action, message, category, module, line in warnings.filters:
        # A category that only the caller's process can name is never met in another.
        kinds = category if isinstance(category, tuple) else (category,)
        if all(
            getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
            for kind in kinds
        ):
            kept.append((action, _text(message), category, _text(module), line))
    return kept


def _text(pattern: Any) -> Any:
    return (pattern.pattern, pattern.flags) if isinstance(pattern, re.Pattern) else pattern


def _named(path: str) -> Any:
    value: Any = sys.modules[path.partition(".")[0]]
    for name in path.split(".")[1:]:
        value = getattr(value, name)
    return value


def apply(found: dict[str, Any]) -> None:
    """Set this process as the caller's is."""
    Levels.apply(found["logging"])
    filters: Any = [
        (
            action,
            *(re.compile(*part) if isinstance(part, tuple) else part for part in (message,)),
            category,
            *(re.compile(*part) if isinstance(part, tuple) else part for part in (module,)),
            line,
        )
        for action, message, category, module, line in found["warnings"]
    ]
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    if "numpy_errors" in found:
        import numpy

        numpy.seterr(**found["numpy_errors"])
    if "deterministic" not in found:
        return
    import torch

    if found["flush_denormal"]:
        torch.set_flush_denormal(True)
    for name in _FLAGS:
        if name in found["torch"] and _named(name) != found["torch"][name]:
            owner, _, last = name.rpartition(".")
            setattr(_named(owner), last, found["torch"][name])
    for getter, setter in _FUNCTIONS:
        if getter in found["torch"] and _named(getter)() != found["torch"][getter]:
            _named(setter)(found["torch"][getter])
    # To set it imports PyTorch's compiler, which takes more than a second.
    if _determinism(torch) != found["deterministic"]:
        is_on, warn_only = found["deterministic"]
        torch.use_deterministic_algorithms(is_on, warn_only=warn_only)
    if found["anomaly"][0]:
        torch.autograd.set_detect_anomaly(*found["anomaly"])
    vars(torch._tensor_str.PRINT_OPTS).update(found["print"])
    if "device" in found:
        torch.set_default_device(found["device"])
    for device, dtype in found["autocast"].items():
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)
