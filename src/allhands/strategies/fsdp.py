"""Sharded data parallelism: each worker holds 1/N of every parameter, gradient and optimizer state
(PyTorch's fully_shard)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.checks import check_choice, check_flag, is_whole
from allhands.errors import UserError, warn_renamed
from allhands.step.blocks import CONTAINERS, layers, named
from allhands.step.recompute import recompute
from allhands.strategies.degrees import Degrees
from allhands.strategies.fsdp_units import Units
from allhands.strategies.meshed import Meshed
from allhands.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from allhands.strategies.values import Values

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What training keeps of a parameter on the processor under cpu_offload, in its sizes: itself, its
# gradient, two moments.
_KEPT = 4


class FSDP(Meshed):
    """1/N of every parameter, gradient and optimizer state on each worker; layers are gathered when
    they are computed.

    Stands on torch.distributed.fsdp.fully_shard (FSDP2); the idea is ZeRO's third stage
    (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC
    2020). Gradients are reduced in each micro-batch, so that no worker ever holds all of them.
    Alone, it shards over all workers; in a `Mesh`, over dp.shard. With one worker there is nothing
    to shard, and no setting has an effect.

    Args:
        wrap: what is gathered together. "auto": each child of the outermost lists and sequences of
            layers; the name of a class, or a list of names of classes or of modules (``["Layer"]``,
            ``["encoder", "decoder"]``); or ``{"min_params": n}``: the innermost modules of at least
            n parameters. What is left is gathered with the whole model.
        reshard_after_forward: free a gathered layer after its forward pass and gather it again for
            the backward pass; False keeps it, which takes more memory and less time.
        param_dtype: "bf16", "fp16" or "fp32": the format in which parameters are gathered and
            layers computed; None leaves it. Weights that the optimizer changes, and checkpoints,
            keep their own.
        reduce_dtype: the format in which gradients are added up; None takes `param_dtype`.
        output_dtype: the format of the model's output; None takes fp32 where `param_dtype` is
            narrower, since losses would be rounded to it.
        buffer_dtype: the format of floating-point buffers; None leaves it.
        cpu_offload: keep shards, gradients and the optimizer's state in the processor's memory, and
            update there. Needs GPUs.
        activation_checkpointing: compute each wrapped layer again in the backward pass instead of
            keeping what it computed (Chen et al., Training Deep Nets with Sublinear Memory Cost,
            2016).
        checkpoint_activations: the old name of `activation_checkpointing`.

    Raises:
        UserError: a setting that there is not.
    """

    name = "fsdp"

    def __init__(
        self,
        wrap: str | Sequence[str] | Mapping[str, int] = "auto",
        reshard_after_forward: bool = True,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        output_dtype: str | None = None,
        buffer_dtype: str | None = None,
        cpu_offload: bool = False,
        checkpoint_activations: bool | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        if checkpoint_activations is not None:
            warn_renamed("FSDP(checkpoint_activations=…)", "FSDP(activation_checkpointing=…)")
            activation_checkpointing = checkpoint_activations
        for option, value in (
            ("param_dtype", param_dtype),
            ("reduce_dtype", reduce_dtype),
            ("output_dtype", output_dtype),
            ("buffer_dtype", buffer_dtype),
        ):
            check_choice(option, value, DTYPES, of="FSDP", otherwise="None")
        for option, flag in (
            ("reshard_after_forward", reshard_after_forward),
            ("cpu_offload", cpu_offload),
            ("activation_checkpointing", activation_checkpointing),
        ):
            check_flag(option, flag, of="FSDP")
        self.wrap = _wrapping(wrap)
        self.reshard_after_forward = reshard_after_forward
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.output_dtype, self.buffer_dtype = output_dtype, buffer_dtype
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.fsdp = self

    def degrees_for(self, workers: int) -> Degrees:
        return Degrees(shard=workers)

    def capture_refused(self, model: nn.Module, world: World) -> str | None:
        if self.cpu_offload:
            return "FSDP(cpu_offload=True) updates on the processor; write FSDP()"
        return super().capture_refused(model, world)

    def check(self, world: World) -> None:
        super().check(world)
        self.check_device(world)

    def check_device(self, world: World) -> None:
        """Raise `UserError` when there is nothing to offload from."""
        if self.cpu_offload and world.device.type != "cuda":
            raise UserError(
                "FSDP(cpu_offload=True) keeps shards out of a GPU's memory, and the device is "
                f"'{world.device.type}'; set cpu_offload to False"
            )

    def check_wrapping(self, model: nn.Module) -> None:
        """Raise `UserError` when `wrap` names what the model has not, or would tear tied parameters
        apart; or for models in a container, of which none is called first."""
        if isinstance(model, (nn.ModuleDict, nn.ModuleList)):
            raise UserError(
                f"one optimizer trains {len(model)} models, and fsdp gathers the layers of one "
                "that is called as a whole; give each an optimizer of its own, or make one "
                "nn.Module of them whose forward() calls them"
            )
        self.units(model)
        for name, parameter in model.named_parameters():
            if not parameter.is_contiguous():
                raise UserError(
                    f"the parameter '{name}' is not contiguous (memory_format=torch.channels_last "
                    "does so), which fully_shard does not take; write "
                    "model.to(memory_format=torch.contiguous_format), or distributed='ddp'"
                )

    def units(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules that are gathered as one, inner ones first; without the model itself."""
        outside = _shared_outside(model)
        if isinstance(self.wrap, int):
            return _by_size(model, self.wrap, outside)
        if isinstance(self.wrap, str):
            return [(name, module) for name, module in layers(model) if not outside(module)]
        return _by_name(model, self.wrap, outside)

    def shard(self, model: nn.Module, mesh: DeviceMesh, values: Values, world: World) -> Units:
        """Shard a model, or a stage of one, in place. Values come in one wrapped module at a time.

        Returns:
            What is gathered together, and which of it the samples of a step have used.
        """
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        if self.cpu_offload:
            _check_memory(model, mesh.size(mesh.ndim - 1), world.local_world_size, _free_memory())
        output = self.output_dtype or ("fp32" if self.param_dtype in ("bf16", "fp16") else None)
        dtypes = [
            None if name is None else DTYPES[name]
            for name in (self.param_dtype, self.reduce_dtype, output)
        ]
        inner = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
        outer = MixedPrecisionPolicy(
            param_dtype=dtypes[0], reduce_dtype=dtypes[1], output_dtype=dtypes[2]
        )
        offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        if self.buffer_dtype is not None:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        module._buffers[name] = buffer.to(DTYPES[self.buffer_dtype])
        units = Units(self.name)
        # Whole layers are drawn or received, sharded, and let go of, before the next one.
        for name, module in [*self.units(model), ("", model)]:
            values.settle(model, list(module.parameters()))
            if self.activation_checkpointing and module is not model:
                recompute(name, module)
            units.before(module)
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=outer if module is model else inner,
                offload_policy=offload,
                reshard_after_forward=self.reshard_after_forward and module is not model,
                ignored_params={p for p in module.parameters() if p.dim() == 0 or not p.numel()}
                or None,
            )
            units.after(name, module)
        return units


def _wrapping(wrap: Any) -> str | list[str] | int:
    if isinstance(wrap, Mapping):
        number = wrap.get("min_params")
        if set(wrap) != {"min_params"} or not is_whole(number):
            raise UserError(
                f"FSDP(wrap={dict(wrap)!r}); a dict must be {{'min_params': n}} with a whole "
                "number n of at least 1"
            )
        return number
    if wrap == "auto":
        return "auto"
    names = (
        [wrap] if isinstance(wrap, str) else list(wrap) if isinstance(wrap, (list, tuple)) else []
    )
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(
            f"FSDP(wrap={wrap!r}); write 'auto', the name of a class such as 'Layer', a list of "
            "names of classes or modules, or {'min_params': 1_000_000}"
        )
    return names


def _by_size(model: nn.Module, least: int, outside: Any) -> list[tuple[str, nn.Module]]:
    chosen: list[tuple[str, nn.Module]] = []
    taken: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)
        left = [p for p in module.parameters() if id(p) not in taken]
        if (
            module is model
            or isinstance(module, CONTAINERS)
            or outside(module)
            or sum(p.numel() for p in left) < least
        ):
            return
        taken.update(map(id, left))
        chosen.append((path, module))

    visit(model, "")
    return chosen


def _by_name(model: nn.Module, wanted: list[str], outside: Any) -> list[tuple[str, nn.Module]]:
    found = list(named(model, wanted, "FSDP(wrap=…)"))
    for name, module in found:
        if torn := outside(module):
            raise UserError(
                f"FSDP(wrap=…) names '{name}', whose parameter '{torn}' is also used outside of it "
                "(tied weights); leave it out of wrap, so that it is gathered with the whole model"
            )
    return sorted(found, key=lambda pair: -pair[0].count("."))  # inner ones first


def _shared_outside(model: nn.Module) -> Any:
    """A function: the name of a parameter of a module that is also used outside of it, or None."""

    def uses_in(module: nn.Module) -> Counter[int]:
        return Counter(
            id(parameter)
            for child in module.modules()
            for parameter in child._parameters.values()
            if parameter is not None
        )

    uses = uses_in(model)

    def outside(module: nn.Module) -> str | None:
        inside = uses_in(module)
        return next(
            (name for name, p in module.named_parameters() if inside[id(p)] < uses[id(p)]), None
        )

    return outside


def _check_memory(model: nn.Module, shards: int, here: int, free: int) -> None:
    """Raise `UserError` when offloaded shards do not fit into the processor's memory.

    Args:
        model: what is sharded.
        shards: into how many parts.
        here: workers on this machine.
        free: bytes that they may take together.
    """
    needed = _KEPT * sum(p.numel() * p.element_size() for p in model.parameters()) // shards * here
    if needed > free:
        raise UserError(
            f"FSDP(cpu_offload=True) keeps weights, gradients and the optimizer's state of {here} "
            f"worker{'s' if here > 1 else ''} in this machine's memory, about {needed / 2**30:.1f} "
            f"GiB, and {free / 2**30:.1f} GiB are free; set cpu_offload to False, or use more "
            "machines"
        )


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
