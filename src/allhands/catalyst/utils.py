"""What scripts import from ``catalyst.utils``."""

from __future__ import annotations

from typing import Any

import torch

from allhands.data import seed_everything
from allhands.errors import UserError
from allhands.runner.utils import distributed_cmd_run

_INSTEAD = {
    "trace_model": "torch.export.export(model, (batch,))",
    "onnx_export": "torch.onnx.export(model, (batch,), 'model.onnx')",
    "quantize_model": "torch.ao.quantization.quantize_dynamic(model)",
    "prune_model": "torch.nn.utils.prune",
    "load_checkpoint": "allhands.load_checkpoint('logs')",
    "get_available_engine": "SupervisedRunner(device=…) and train(distributed=True)",
}


def set_global_seed(seed: int) -> None:
    """Seed the global generators of torch, numpy and random."""
    seed_everything(seed)


def get_device() -> torch.device:
    """A GPU where there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:  # an AttributeError would not be told by `from … import`
        raise UserError(f"utils.{name} is not here; write {_INSTEAD[name]}")
    raise AttributeError(f"module 'allhands.catalyst.utils' has no attribute {name!r}")


__all__ = ["distributed_cmd_run", "get_device", "set_global_seed"]
