"""What a step does on the host, which a replay of what it asked the device for would not do
again."""

from __future__ import annotations

import random
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from allhands.compat import gradient_hooks

_PLAIN = (bool, int, float, str, bytes, type(None))
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def capturing() -> bool:
    """Whether what is asked for now is captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class HostState:
    """Plain attributes of all modules, and the random generators of the processor, as they are
    now."""

    def __init__(self, *given: Any) -> None:
        self._modules = [
            (type(root).__name__ + (f".{name}" if name else ""), module)
            for root in given
            if isinstance(root, nn.Module)
            for name, module in root.named_modules()
        ]
        self._attributes = [_plain(module) for _, module in self._modules]
        self._generators = _generators()

    def changed(self) -> str | None:
        """What has changed since, as the end of a sentence; None where nothing has."""
        for (name, module), before in zip(self._modules, self._attributes, strict=True):
            now = _plain(module)
            for attribute in [*now, *before]:
                if now.get(attribute) != before.get(attribute):
                    return (
                        f"the forward pass of {name} changes its attribute '{attribute}', which "
                        "a replay would not"
                    )
        for name, state in _generators().items():
            if state != self._generators[name]:
                return f"it draws from {name} on the processor, which a replay would not"
        return None

    def restore_attributes(self) -> None:
        """Give the modules the plain attributes again that they had."""
        for (_, module), before in zip(self._modules, self._attributes, strict=True):
            for attribute in _plain(module).keys() - before.keys():
                delattr(module, attribute)
            for attribute, value in before.items():
                setattr(module, attribute, value)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def _generators() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "random": random.getstate(),
        "numpy.random": (kind, tuple(np.asarray(keys).tolist()), *rest),
        "torch's generator": bytes(torch.get_rng_state().numpy()),
    }


def hooked(model: nn.Module) -> str | None:
    """Which hook of a model a replay would not call, as the end of a sentence; None where there is
    none but PyTorch's own, which compute (weight and spectral normalisation), and those of the
    strategies, which compute and exchange."""
    for name, module in model.named_modules():
        for kind in (
            "_forward_pre_hooks",
            "_forward_hooks",
            "_backward_pre_hooks",
            "_backward_hooks",
        ):
            if any(not _computes(hook) for hook in getattr(module, kind).values()):
                return (
                    f"{type(model).__name__}{f'.{name}' if name else ''} has hooks, which a "
                    "replay would not call"
                )
    for name, parameter in model.named_parameters():
        if any(not _computes(hook) for hook in gradient_hooks(parameter)):
            return f"the parameter '{name}' has hooks, which a replay would not call"
    return None


def _computes(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.startswith(("torch.", "allhands.strategies."))


@contextmanager
def waits_noted(device: torch.device) -> Iterator[list[str]]:
    """Within, the lines at which this process waits for the device are noted; the waiting goes on
    as ever."""
    places: list[str] = []
    if device.type != "cuda":
        yield places
        return
    before = warnings.showwarning
    thread, depth = (
        threading.get_ident(),
        len(traceback.extract_stack()) - 2,
    )  # of who calls; the two are contextlib's and this
    # Those that Python started; autograd's are not among them, whatever Python has run in them.
    threads = {other for other in threading.enumerate() if not other.name.startswith("Dummy-")}

    def note(
        message: Any,
        category: Any,
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if "Synchronization debug mode is a prototype" in str(message):
            return
        if "synchronizing CUDA operation" in str(message):
            frames = [
                frame
                for frame in traceback.extract_stack()[:-1]
                if frame.filename != warnings.__file__
            ]
            if threading.get_ident() == thread:
                places.append(_where(frames[depth:]))
            elif (
                threading.current_thread() not in threads
            ):  # those that write or read ahead may wait
                places.append(_where(frames))
        else:
            before(message, category, filename, lineno, file, line)

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def where_raised(error: BaseException) -> str:
    """The line of the user's that led to an error, or the innermost where there is none:
    ``file:line (source)``."""
    return _where(traceback.extract_tb(error.__traceback__))


def _where(frames: Sequence[traceback.FrameSummary]) -> str:
    own = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
