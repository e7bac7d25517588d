"""`allhands export`: a checkpoint's weights as one safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from allhands.atomic_write import atomic_write
from allhands.errors import UserError


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint's folder, such as logs/run/checkpoints/best; or a logdir, for its "
            "newest.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="The file to write, such as weights.safetensors.",
            show_default=False,
        ),
    ],
    averaged: Annotated[
        bool,
        typer.Option("--averaged", help="The average that AveragedWeights kept of the weights."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if there is one.")
    ] = False,
) -> int:
    """Write a checkpoint's weights into one safetensors file.

    Every file of the checkpoint is checked against its checksum first. The weights load with
    model.load_state_dict(safetensors.torch.load_file(FILE)), without allhands.
    """
    if output.is_dir():
        raise UserError(f"-o {output} is a folder; write -o {output / 'weights.safetensors'}")
    if output.exists() and not force:
        raise UserError(
            f"{output} exists already; choose another name, or add --force to replace it"
        )
    if not output.absolute().parent.is_dir():
        raise UserError(f"-o {output}: there is no folder {output.absolute().parent}")
    from safetensors.torch import save_file

    from allhands.loop.checkpoint import load, resolve

    folder = resolve(checkpoint)
    state = load(folder)
    import torch

    weights = state["model"] | (_average(state) if averaged else {})
    tensors = {
        name: value.contiguous()
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
    }
    with atomic_write(output) as aside:
        # Copies: two names of one tensor (tied weights) are two entries in the file.
        save_file(
            {name: value.clone() for name, value in tensors.items()},
            aside,
            metadata={"format": "pt", "epoch": str(state["epoch"]), "step": str(state["step"])},
        )
    left_out = [name for name in state["model"] if name not in tensors]
    if left_out:
        print(f"left out, since they are no tensors: {', '.join(left_out)}")
    numbers = sum(value.numel() for value in tensors.values())
    where = (
        f"epoch {state['epoch'] + (state['position'] is not None)}, optimizer step {state['step']}"
    )
    print(
        f"{output}: {len(tensors)} tensors with {numbers:,} numbers, from {folder.name} ({where})"
    )
    return 0


def _average(state: dict[str, Any]) -> dict[str, Any]:
    """The average in a checkpoint, by the parameters' names."""
    for one in state.get("callbacks", []):
        if isinstance(one, dict) and one.get("average"):
            average: dict[str, Any] = one["average"]
            return average
    raise UserError(
        "--averaged: the checkpoint has no average of the weights; train with "
        "callbacks=[allhands.AveragedWeights()], or leave --averaged out"
    )
