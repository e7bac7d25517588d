"""Which device and backend a worker gets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from allhands.checks import check_choice
from allhands.errors import UserError
from allhands.world import mpilib

if TYPE_CHECKING:
    import torch

BACKENDS = ("auto", "gloo", "nccl", "mpi")


def choose_backend(backend: str, device: str) -> tuple[str, str]:
    """`(backend, device)` with "auto" resolved: nccl and "cuda" where this process sees a GPU, else
    gloo and "cpu".

    `device` is "auto", "cpu", "cuda" (one by local rank) or "cuda:N". gloo and mpi take GPUs only
    when `device` asks for them. Raises `UserError` for what this machine or this build of torch
    cannot do.
    """
    import torch
    import torch.distributed as dist

    check_choice("backend", backend, BACKENDS)
    if device not in {"auto", "cpu", "cuda"} and not re.fullmatch(r"cuda:\d+", device):
        raise UserError(
            f"device={device!r} must be 'auto', 'cpu', 'cuda' (one GPU a local rank) or 'cuda:N'."
        )
    gpus = visible_gpus()
    if backend == "nccl" and device == "cpu":
        raise UserError(
            "backend='nccl' needs GPUs but device='cpu': write backend='gloo', or leave device out."
        )
    wants_gpu = backend == "nccl" or device.startswith("cuda")
    if wants_gpu and gpus == 0:
        asked = "backend='nccl'" if backend == "nccl" else f"device={device!r}"
        if torch.version.cuda is None:
            built = "this torch is built without CUDA"
        else:
            built = "torch sees no GPU (CUDA_VISIBLE_DEVICES?)"
        raise UserError(
            f"{asked} needs a GPU, but {built}: write backend='auto' and leave device out to train "
            "on the CPU."
        )
    if device.startswith("cuda:") and int(device[5:]) >= gpus:
        raise UserError(
            f"device={device!r}, but this process sees {gpus} GPUs: the last one is "
            f"'cuda:{gpus - 1}'."
        )
    if backend == "auto":
        backend = "nccl" if gpus and device != "cpu" and dist.is_nccl_available() else "gloo"
    if device == "auto":
        device = "cuda" if backend == "nccl" else "cpu"
    if backend == "mpi" and not dist.is_mpi_available():
        raise UserError(
            "backend='mpi', but this torch has no MPI built in and mpi4py is not installed: "
            f"{mpilib.INSTALL} (mpich only where there is no MPI yet), or write backend='gloo'."
        )
    return backend, device


def visible_gpus() -> int:
    """How many CUDA devices this process can use. Does not initialise CUDA: a fork after it is
    safe."""
    import torch

    return torch.cuda.device_count() if torch.version.cuda is not None else 0


def only_gpu_name(gpus: int) -> str:
    """What identifies this process's GPU when it sees exactly one; "" otherwise. Opens no context
    on it."""
    import torch

    if gpus != 1:
        return ""
    properties = torch.cuda.get_device_properties(0)
    return str(getattr(properties, "uuid", ""))


def pick_device(device: str, local_rank: int, gpus: int) -> torch.device:
    """The device of this process, made the current one when it is a GPU. `device` as
    `choose_backend` returns it.
    """
    import torch

    if device == "cpu":
        return torch.device("cpu")
    if device == "cuda":
        # A process that sees a single GPU was given that one, whatever its local rank.
        device = f"cuda:{0 if gpus == 1 else local_rank}"
    chosen = torch.device(device)
    torch.cuda.set_device(chosen)
    return chosen
