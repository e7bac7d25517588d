"""Catalyst's engines: where is computed, as arguments of `train`."""

from __future__ import annotations

from typing import Any

from allhands.catalyst.translation import only_default
from allhands.errors import UserError

_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


class EngineSettings:
    """What an engine of Catalyst's is here; by itself, a GPU where there is one, else the CPU.

    Args:
        fp16: half precision.
        mixed_precision: "no", "fp16" or "bf16".
        given: refused by name.

    Attributes:
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        settings: arguments of `train`, by name.

    Raises:
        UserError: an argument cannot be honoured.
    """

    device: str | None = None
    distributed: Any = None

    def __init__(
        self, *, fp16: bool = False, mixed_precision: str | None = None, **given: Any
    ) -> None:
        kind = type(self).__name__
        only_default(kind, **{name: (value, None) for name, value in given.items()})
        if mixed_precision is not None and mixed_precision not in _PRECISIONS:
            raise UserError(
                f"{kind}(mixed_precision={mixed_precision!r}): it is {', '.join(_PRECISIONS)}"
            )
        if fp16 and mixed_precision not in (None, "fp16"):
            raise UserError(f"{kind}(fp16=True, mixed_precision=…): leave out one of them")
        self.settings: dict[str, Any] = {}
        if fp16 or mixed_precision is not None:
            self.settings["precision"] = _PRECISIONS[mixed_precision or "fp16"]
        if self.distributed is not None:
            self.settings["distributed"] = self.distributed


class CPUEngine(EngineSettings):
    """``SupervisedRunner(device="cpu")``."""

    device = "cpu"


class GPUEngine(EngineSettings):
    """``SupervisedRunner(device="cuda")``."""

    device = "cuda"


class DataParallelEngine(EngineSettings):
    """``train(distributed="dp")``."""

    distributed = "dp"


class DistributedDataParallelEngine(EngineSettings):
    """``train(distributed=True)``: a worker for each GPU, or each core."""

    distributed = True


def device_with(engine: Any, device: str | None) -> str | None:
    """The device of a runner that was given an engine."""
    if engine is None:
        return device
    if not isinstance(engine, EngineSettings):
        raise UserError(
            "engine=…: write dl.CPUEngine(), dl.GPUEngine(), dl.DataParallelEngine() or "
            "dl.DistributedDataParallelEngine(); or SupervisedRunner(device=…) and "
            "train(distributed=…)"
        )
    if engine.device is not None and device not in (None, engine.device):
        raise UserError(f"device={device!r} and {type(engine).__name__}; leave out one of them")
    return engine.device or device


def apply_engine(runner: Any, engine: Any, given: dict[str, Any]) -> None:
    """Give a runner an engine's device, and the arguments of `train` its settings."""
    runner.device = device_with(engine, runner.device)
    for name, value in engine.settings.items():
        if given.setdefault(name, value) != value:
            raise UserError(
                f"{name}={given[name]!r} and {type(engine).__name__}, which says {value!r}; leave "
                "out one of them"
            )
