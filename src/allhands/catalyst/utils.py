"""What scripts import from ``catalyst.utils``."""

from __future__ import annotations

from typing import Any

import torch

from allhands.catalyst.translation import refuse_name
from allhands.data import seed_everything as set_global_seed
from allhands.runner.utils import distributed_cmd_run

_INSTEAD = {
    "trace_model": "torch.export.export(model, (batch,))",
    "onnx_export": "torch.onnx.export(model, (batch,), 'model.onnx')",
    "quantize_model": "torch.ao.quantization.quantize_dynamic(model)",
    "prune_model": "torch.nn.utils.prune",
    "load_checkpoint": "allhands.load_checkpoint('logs')",
    "get_available_engine": "SupervisedRunner(device=…) and train(distributed=True)",
}


def get_device() -> torch.device:
    """A GPU where there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def __getattr__(name: str) -> Any:
    refuse_name("utils", name, _INSTEAD)


__all__ = ["distributed_cmd_run", "get_device", "set_global_seed"]
