"""Tensor parallelism: layers cut into slices, over workers that see the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.checks import check_flag
from allhands.data.trees import map_tensors
from allhands.step.loss import Criterion
from allhands.strategies.degrees import Degrees
from allhands.strategies.meshed import Meshed
from allhands.strategies.tensor_plan import Style, check_plan, resolve

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Tensor(Meshed):
    """Slices of layers on each worker: matrices are cut, and activations summed between workers, in
    every layer.

    All workers of a group see the same samples. A layer's first matrix is cut along its outputs and
    its second along its inputs, so that a block exchanges once forwards and once backwards (Shoeybi
    et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism,
    2019); attention is cut by heads. Parameters are torch.distributed.tensor's DTensors. Dropout
    draws the same on all workers of a group where they hold the same activations, and apart where
    each has a part. Alone, it slices over all workers; in a `Mesh`, over tp. With one worker
    nothing is cut, and no setting has an effect.

    Args:
        plan: which module is cut how, by patterns of module names: ``{"layers.*.mlp.up": "colwise",
            "layers.*.mlp.down": "rowwise"}``, where ``*`` stands for one part of a name between two
            dots. "colwise" cuts a Linear's outputs, "rowwise" the inputs of the one that takes
            them; "vocab" cuts the rows of an Embedding, or the outputs of a Linear, which are
            gathered; "sequence" runs a module on a part of each sequence; "replicate", as all that
            is not named, runs it whole. ``{"style": "colwise", "parts": 3, "heads": 12}`` is for a
            Linear that yields q, k and v one after another. A name ("gpt", "mlp") takes the plan of
            `allhands.models.GPT` or `MLP`; None the one of the model's class.
        sequence_parallel: keep activations between blocks in parts of the sequence, N x T/tp x
            width, which takes less memory (Korthikanti et al., Reducing Activation Recomputation in
            Large Transformer Models, 2022).
        loss_parallel: compute the cross entropy from logits that are cut along the vocabulary and
            never gathered; the output of the model is a DTensor then.

    Raises:
        UserError: a plan or style that there is not. Before the first step: a pattern that matches
            no module, a dimension or a number of heads that the workers do not divide, a style that
            the module cannot have.
    """

    name = "tensor"

    def __init__(
        self,
        plan: str | Mapping[str, Any] | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
    ) -> None:
        for option, flag in (
            ("sequence_parallel", sequence_parallel),
            ("loss_parallel", loss_parallel),
        ):
            check_flag(option, flag, of="Tensor")
        check_plan(plan)
        self.plan = dict(plan) if isinstance(plan, Mapping) else plan
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        self.tensor = self

    def degrees_for(self, workers: int) -> Degrees:
        return Degrees(tp=workers)

    def check_model(self, model: nn.Module, tp: int) -> dict[str, Style]:
        """How the whole model is cut over `tp` workers, by names of modules.

        Raises:
            UserError: the plan does not fit it.
        """
        return resolve(model, self.plan, tp, self.sequence_parallel, self.loss_parallel)

    def parallelize(
        self, model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]
    ) -> dict[str, torch.Tensor]:
        """Cut a model, or a stage of one under the model's own names, in place.

        Args:
            model: on its device, with the same values on all workers of the mesh. Its parameters
                are copied, not changed.
            mesh: the axis tp alone.
            styles: what `check_model` gave for the whole model.

        Returns:
            For each parameter whose rows lie in another order than the model's, that order (int64):
            its row i is row order[i].
        """
        from allhands.strategies.tensor_styles import split

        return split(model, styles, mesh, self.sequence_parallel, self.loss_parallel)

    def loss_function(self, call: Criterion) -> Criterion:
        """The criterion, as it is called with what a sliced model gives."""
        if not self.loss_parallel:
            return call
        from allhands.strategies.tensor_loss import SplitLoss

        return SplitLoss(call)

    def full_output(self, output: Any) -> Any:
        """What the model would give alone; all workers of a group call it together."""
        return map_tensors(
            output, lambda leaf: leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        )
