"""What a style does to a module: its parameters become DTensors, and its forward pass runs on this
worker's part of them.

Between the modules of a block activations are plain tensors: whole ones, or this worker's part of
the features. Only what is split along the sequence or the vocabulary is a DTensor, so that one that
meets a whole tensor is an error, not another result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from allhands.compat import DropoutBase
from allhands.errors import UserError
from allhands.strategies.tensor_moves import (
    PARTIAL,
    SPLIT,
    WHOLE,
    WithDenseGradient,
    as_split,
    check_sequence,
    move,
    part_of,
    split_sequence,
    strides,
    whole_sequence,
)
from allhands.strategies.tensor_plan import Style
from allhands.strategies.tensor_region import Region


def split(
    model: nn.Module,
    styles: Mapping[str, Style],
    mesh: DeviceMesh,
    sequence: bool,
    split_loss: bool,
) -> dict[str, torch.Tensor]:
    """Cut `model` in place; see `Tensor.parallelize`, of which these are the arguments and the
    result."""
    place(model, styles, mesh)
    region = Region(mesh, next((p.device for p in model.parameters()), torch.device("cpu")))
    modules = dict(model.named_modules())
    inside = {
        id(part)
        for m in modules.values()
        if isinstance(m, nn.MultiheadAttention)
        for part in m.modules()
        if part is not m
    }
    if any(
        isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
        for module in modules.values()
    ):
        # In evaluation these would read the parameters of modules in them without calling those.
        torch.backends.mha.set_fastpath_enabled(False)
    orders = {}
    for name, module in modules.items():
        style = styles.get(name)
        if style is None and sequence and isinstance(module, DropoutBase):
            Sequence(name, module, mesh, region, sequence).follows = True
        elif style is None or style.kind == "replicate":
            if id(module) not in inside and any(True for _ in module.parameters(recurse=False)):
                Whole(name, module, mesh, region, sequence)
        elif style.kind == "vocab" and isinstance(module, nn.Linear):
            VocabColumns(name, module, mesh, region, sequence).split_loss = split_loss
        else:
            _KINDS[style.kind](name, module, mesh, region, sequence)
        if style is not None and style.kind == "colwise":
            # Where the forward pass is left half way: by an error, or by checkpointing, which has
            # what it wanted.
            modules[name.rpartition(".")[0]].register_forward_hook(
                lambda *seen: region.close_after_error(seen[-1]), always_call=True
            )
            for key, parameter in module.named_parameters(recurse=False) if style.parts > 1 else ():
                orders[f"{name}.{key}"] = by_rank(
                    torch.arange(parameter.shape[0]), style.parts, mesh.size()
                )
    model.register_forward_pre_hook(lambda *_: region.close())
    model.register_forward_hook(lambda *_: region.check_closed())
    model.register_forward_hook(lambda *_: region.close(), always_call=True)
    if sequence:
        first = next(name for name, style in styles.items() if style.kind == "sequence")
        # A stage that begins where activations are split along the sequence.
        if first not in modules:
            model.register_forward_pre_hook(
                lambda _, inputs: tuple(split_sequence(x, mesh) for x in inputs)
            )
        model.register_forward_hook(lambda _1, _2, output: whole_sequence(output))
    return orders


def place(module: nn.Module, styles: Mapping[str, Style], mesh: DeviceMesh) -> None:
    """Make every parameter of `module` a DTensor on `mesh`, of which this worker keeps its own part
    alone.

    Args:
        module: the model, or a part of it under the model's own names; equal on all workers of the
            mesh.
        styles: by module name; modules that are not named are replicated.
        mesh: one axis.
    """
    made: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        style = styles.get(name, Style("replicate"))
        for key, parameter in list(owner.named_parameters(recurse=False)):
            if id(parameter) not in made:
                dim = style.dim_of(key)
                part = _part(parameter.detach(), style, dim, mesh)
                placement: Placement = Replicate() if dim is None else Shard(dim)
                whole = DTensor.from_local(
                    part,
                    mesh,
                    [placement],
                    run_check=False,
                    shape=parameter.shape,
                    stride=strides(parameter.shape),
                )
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            owner.register_parameter(key, made[id(parameter)])


def _part(whole: torch.Tensor, style: Style, dim: int | None, mesh: DeviceMesh) -> torch.Tensor:
    if dim is None:
        return whole.clone()
    whole = by_rank(whole, style.parts, mesh.size())
    length = -(-whole.shape[dim] // mesh.size())
    start = min(mesh.get_local_rank() * length, whole.shape[dim])
    return whole.narrow(dim, start, min(length, whole.shape[dim] - start)).clone(
        memory_format=torch.contiguous_format
    )


def by_rank(plain: torch.Tensor, parts: int, workers: int) -> torch.Tensor:
    """Rows that lie part after part (q, k, v), laid worker after worker, each its share of every
    part."""
    if parts == 1:
        return plain
    return plain.unflatten(0, (parts, workers, -1)).transpose(0, 1).flatten(0, 2)


class Split(ABC):
    """One module that runs on this worker's part: what comes in, the parameters that its forward
    pass sees, and what goes out.

    Args:
        name: the module's, for messages.
        module: with DTensors for parameters (`place`).
        mesh: the tensor-parallel axis.
        region: the group's.
        sequence: whether activations between blocks are split along the sequence.
    """

    #: Whether the parameters that the forward pass sees are there for the module's own hooks before
    #: it.
    first = False

    def __init__(
        self, name: str, module: nn.Module, mesh: DeviceMesh, region: Region, sequence: bool
    ) -> None:
        self.name, self.mesh, self.region, self.sequence = name, mesh, region, sequence
        # It reads its projection's parameters without calling that.
        self._owners = (
            list(module.modules()) if isinstance(module, nn.MultiheadAttention) else [module]
        )
        self._before: list[tuple[nn.Module, str, Any]] = []
        module.register_forward_pre_hook(self._enter, prepend=self.first)
        module.register_forward_hook(self._unshadow, always_call=True)
        module.register_forward_hook(lambda module, inputs, output: self.leave(module, output))

    @abstractmethod
    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of the module's own forward pass; `shadow` sets what it must see otherwise."""

    def leave(self, module: nn.Module, output: Any) -> Any:
        """What the module gives, from what its own forward pass gave."""
        return output

    def only(self, inputs: tuple[Any, ...]) -> torch.Tensor:
        if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
            raise UserError(
                f"'{self.name}' is split over workers, and must be called with one tensor, by "
                "position"
            )
        return inputs[0]

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for owner in self._owners:
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    self.shadow(owner, key, self.local(parameter))
        return self.enter(module, inputs)

    def local(self, parameter: Any) -> torch.Tensor:
        """This worker's part of a parameter, whose gradient is that of the part."""
        return part_of(parameter)

    def shadow(self, module: nn.Module, key: str, value: Any) -> None:
        """Let ``module.key`` be `value` during this forward pass: an object's own attribute comes
        before its parameters."""
        self._before.append((module, key, module.__dict__.get(key, _NOTHING)))
        module.__dict__[key] = value

    def _unshadow(self, _1: nn.Module, _2: Any, output: Any) -> None:
        self.region.close_after_error(output)
        while self._before:
            owner, key, value = self._before.pop()
            if value is _NOTHING:
                owner.__dict__.pop(key, None)
            else:
                owner.__dict__[key] = value

    # What goes from one form to another; each is differentiable, with the collective that belongs
    # to it on the way back.

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The same whole activation on all workers, of which each will use a part; gradients of the
        parts are summed."""
        if isinstance(x, DTensor):
            return move(x.to_local(), self.mesh, x.shape, SPLIT, WHOLE, PARTIAL, SPLIT)
        return move(x, self.mesh, x.shape, WHOLE, WHOLE, PARTIAL, WHOLE)

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of what each worker has, whole on each, or split along the sequence."""
        if not self.sequence:
            return move(part, self.mesh, part.shape, PARTIAL, WHOLE, WHOLE, WHOLE)
        return as_split(
            move(part, self.mesh, part.shape, PARTIAL, SPLIT, SPLIT, WHOLE), self.mesh, part.shape
        )


class Colwise(Split):
    """A Linear whose outputs are split; the input is whole, the output this worker's part."""

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = self.only(inputs)
        if x.shape[-1] != module.in_features:
            raise UserError(
                f"'{self.name}' (colwise) takes {module.in_features} features and got "
                f"{x.shape[-1]}: a module before it is colwise too; make that one 'vocab', which "
                "gathers its outputs, or this one 'rowwise'"
            )
        return (self.whole(x),)

    def leave(self, module: nn.Module, output: Any) -> Any:
        self.region.open(self.name, draws=module.training and torch.is_grad_enabled())
        return output


class Rowwise(Split):
    """A Linear whose inputs are split; the input is this worker's part, the output the sum over the
    workers."""

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = self.only(inputs)
        part = module.in_features // self.mesh.size()  # type: ignore[operator]
        if x.shape[-1] != part:
            raise UserError(
                f"'{self.name}' (rowwise) takes this worker's part of the features, {part} of "
                f"{module.in_features}, and got "
                f"{x.shape[-1]}; make the module before it 'colwise', or this one 'replicate'"
            )
        if self.sequence:
            check_sequence(self.name, x, self.mesh.size())
        self.region.close()
        self._bias = module.__dict__.get("bias")
        self.shadow(module, "bias", None)  # added once, after the sum
        return inputs

    def leave(self, module: nn.Module, output: Any) -> Any:
        total, bias = self.summed(output), self._bias
        self._bias = None
        if bias is None:
            return total
        bias = bias.to(total.dtype)  # narrower under autocast, where a Linear would do the same
        if not isinstance(total, DTensor):
            return total + bias
        return as_split(total.to_local() + bias, self.mesh, total.shape)

    def local(self, parameter: Any) -> torch.Tensor:
        # With the sequence split, each worker's gradient of the bias is over its own positions.
        partial = self.sequence and parameter.placements[0].is_replicate()
        return part_of(parameter, [Partial()] if partial else None)


class VocabRows(Split):
    """An Embedding whose rows are split; a token that another worker has is 0 here, and the sum is
    exact."""

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens = self.only(inputs)
        rows = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
        weight, first = (
            module.__dict__["weight"],
            self.mesh.get_local_rank() * -(-rows // self.mesh.size()),
        )
        if (
            not tokens.is_cuda
            and tokens.numel()
            and not 0 <= int(tokens.min()) <= int(tokens.max()) < rows
        ):
            raise IndexError(
                f"'{self.name}' has {rows} rows, and got tokens from {int(tokens.min())} to "
                f"{int(tokens.max())}"
            )
        here = tokens - first
        elsewhere = (here < 0) | (here >= len(weight))
        # A GPU does not look at each token; one that no worker has must not pass for a 0.
        self._kept = (
            (~elsewhere)
            .to(weight.dtype)
            .masked_fill((tokens < 0) | (tokens >= rows), float("nan"))
            .unsqueeze(-1)
        )
        if module.padding_idx is not None:
            padding = module.padding_idx - first  # type: ignore[operator]
            self.shadow(module, "padding_idx", padding if 0 <= padding < len(weight) else None)
        return (here.masked_fill(elsewhere, 0),)

    def leave(self, module: nn.Module, output: Any) -> Any:
        own = output * self._kept
        del self._kept
        return move(own, self.mesh, own.shape, PARTIAL, WHOLE, WHOLE, WHOLE)


class VocabColumns(Split):
    """A Linear whose outputs are split in parts of any size, and gathered, or left so for a loss
    that is split."""

    split_loss = False

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self.region.refuse_inside(self.name, "vocab")
        return (self.whole(self.only(inputs)),)

    def leave(self, module: nn.Module, output: Any) -> Any:
        shape = torch.Size((*output.shape[:-1], module._parameters["weight"].shape[0]))  # type: ignore[union-attr]
        classes = Shard(output.dim() - 1)
        if self.split_loss:
            return as_split(output, self.mesh, shape, classes)
        return move(output, self.mesh, shape, classes, WHOLE, WHOLE, classes)


class Sequence(Split):
    """A module that works on each position alone, run on this worker's part of the sequence.

    With `follows`, only where its input is split along the sequence already.
    """

    follows = False
    _form: DTensor | None = None

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, self._form = self.only(inputs), None
        if self.follows and not isinstance(x, DTensor):
            return inputs
        self.region.refuse_inside(self.name, "sequence")
        check_sequence(self.name, x, self.mesh.size())
        self._form = x = split_sequence(x, self.mesh)
        if (
            module.training
            and torch.is_grad_enabled()
            and not isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        ):
            self.region.open(self.name, draws=True)
        return (x.to_local(),)

    def leave(self, module: nn.Module, output: Any) -> Any:
        form, self._form = self._form, None
        if form is None:
            return output
        self.region.close()
        return as_split(output, self.mesh, form.shape)

    def local(self, parameter: Any) -> torch.Tensor:
        return parameter.to_local(grad_placements=[Partial()])


class Whole(Split):
    """A module with parameters that every worker runs alike, on whole inputs."""

    first = True  # torch.nn.utils.spectral_norm computes the weight in such a hook

    def __init__(
        self, name: str, module: nn.Module, mesh: DeviceMesh, region: Region, sequence: bool
    ) -> None:
        super().__init__(name, module, mesh, region, sequence)
        self._sparse = bool(getattr(module, "sparse", False))

    def local(self, parameter: Any) -> torch.Tensor:
        part = super().local(parameter)
        return WithDenseGradient.apply(part) if self._sparse else part

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self.region.refuse_inside(self.name, "replicate")
        return tuple(whole_sequence(x) for x in inputs)


_NOTHING = object()
_KINDS: dict[str, type[Split]] = {
    "colwise": Colwise,
    "rowwise": Rowwise,
    "vocab": VocabRows,
    "sequence": Sequence,
}
