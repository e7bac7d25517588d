"""What scripts import from ``catalyst.utils``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from allhands.data import seed_everything as set_global_seed
from allhands.errors import refuse_name
from allhands.runner.utils import distributed_cmd_run

_INSTEAD = {
    **dict.fromkeys(
        ("get_rank", "get_world_size", "get_backend"),
        "allhands.init(), which has rank, world_size and backend",
    ),
    **dict.fromkeys(
        ("all_gather", "sum_reduce", "mean_reduce", "ddp_reduce"),
        "batch_metrics[…] = a mean over the batch, or training.gather(value)",
    ),
    **dict.fromkeys(
        ("pack_checkpoint", "save_checkpoint", "unpack_checkpoint"),
        "train(logdir=…) and allhands.load_checkpoint('logs')",
    ),
    **dict.fromkeys(
        ("boolean_flag", "flatten_dict", "get_attr", "get_by_keys", "get_hash", "get_short_hash"),
        "a function of your own",
    ),
    **dict.fromkeys(
        ("get_utcnow_time", "make_tuple", "maybe_recursive_call", "merge_dicts", "pairwise"),
        "a function of your own",
    ),
    **dict.fromkeys(("load_config", "save_config"), "a run file: allhands run -C run.yml"),
    **dict.fromkeys(
        ("get_optimizer_momentum", "get_optimizer_momentum_list", "set_optimizer_momentum"),
        "optimizer.param_groups",
    ),
    "any2device": "allhands.data.to_device(batch, device)",
    "get_available_gpus": "torch.cuda.device_count()",
    "get_nn_from_ddp_module": "the model itself, which is not wrapped",
    "mixup_batch": "handle_batch(self, batch), which mixes the batch",
    "prepare_cudnn": "torch.backends.cudnn.benchmark = True",
    "quantize_onnx_model": "onnxruntime.quantization",
    "remove_reparametrization": "torch.nn.utils.prune.remove",
    "soft_update": "torch.optim.swa_utils.AveragedModel",
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


def get_requires_grad(model: nn.Module) -> dict[str, bool]:
    """Which parameters of a model need gradients, by name."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def set_requires_grad(model: nn.Module, requires_grad: bool | Mapping[str, bool]) -> None:
    """Say which parameters of a model need gradients: all, none, or as a dict tells by name."""
    for name, parameter in model.named_parameters():
        given = requires_grad
        parameter.requires_grad_(given if isinstance(given, bool) else given[name])


def __getattr__(name: str) -> Any:
    refuse_name(__name__, name, _INSTEAD)


__all__ = [
    "distributed_cmd_run",
    "get_device",
    "get_requires_grad",
    "set_global_seed",
    "set_requires_grad",
]
