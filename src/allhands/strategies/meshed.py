"""What the strategies on a mesh share: a model of which each rank holds a part, and an optimizer
that works on that part."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm import all_gather_text, broadcast_tensors, calls
from allhands.comm.clipping import clip_parts
from allhands.comm.flat_layout import fused
from allhands.errors import UserError, WorldError
from allhands.step.precision import Scaler
from allhands.step.update import update_function
from allhands.strategies.alike import bit_sum, statistics_and_others
from allhands.strategies.base import Strategy
from allhands.strategies.degrees import Degrees
from allhands.strategies.held import Held, held, nowhere
from allhands.strategies.repoint import Read, Repointed, check_optimizer
from allhands.strategies.values import Values, aliases
from allhands.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from allhands.strategies.fsdp import FSDP
    from allhands.strategies.fsdp_units import Units
    from allhands.strategies.pipeline import Pipeline
    from allhands.strategies.pipeline_passes import PipelinePasses
    from allhands.strategies.tensor import Tensor

# How far the first losses of workers with the same samples may differ, relative to the largest.
_LOSSES_APART = 1e-4
# How far copies may differ, relative to the sum of their elements, where rounding may make them
# differ.
_APART = 1e-3


class Meshed(Strategy):
    """The base of the strategies on a mesh.

    The user's model is not touched: a copy of its structure is cut into stages, its layers into
    slices, and those into shards, and the optimizer is pointed at what is left on this rank.
    Samples are dealt out over dp alone: ranks that differ only in tp or pp see the same ones. When
    the training has ended, `give_back` writes into the user's own objects.

    Attributes:
        fsdp, tensor, pipeline: how parts are made along dp.shard, tp and pp; an axis of degree 1
            leaves its own unused.
        module: after `prepare`, what this rank has of the model, under the plain model's names.
        held: after `prepare`, what this rank has of each parameter and buffer of the plain model,
            by name.
    """

    takes_step = True
    parted = True
    level = True
    resumes_anywhere = True
    takes_meta = True
    check_weights_every = 1000

    fsdp: FSDP | None = None
    tensor: Tensor | None = None
    pipeline: Pipeline | None = None

    def degrees_for(self, workers: int) -> Degrees:
        """How many workers lie along each axis."""
        raise TypeError(f"{type(self).__name__} does not say its degrees")

    # ------------------------------------------------------------------ before anything is started

    def check_size(self, workers: int) -> None:
        self.degrees_for(workers).check(workers)

    def check(self, world: World) -> None:
        self.check_size(world.world_size)

    def check_settings(self, settings: Any) -> None:
        check_optimizer(settings.optimizer, self.name)

    def check_training(self, settings: Any, workers: int) -> None:
        degrees, model = self.degrees_for(workers), settings.model
        if workers > 1:
            _check_leaves(model, self.name)
        if degrees.pp > 1 and self.pipeline is not None:
            self.pipeline.check_model(model, degrees.pp)
        if degrees.tp > 1 and self.tensor is not None:
            self.tensor.check_model(model, degrees.tp)
            if any(parameter.is_meta for parameter in model.parameters()):
                raise UserError(
                    f"the model is on the meta device and tp is {degrees.tp}; slices of layers are "
                    "cut from weights that are there. Set tp to 1, or build the model on the CPU"
                )
        if degrees.shard > 1 and self.fsdp is not None:
            self.fsdp.check_wrapping(model)

    def compiled(self, workers: int) -> str | None:
        degrees = self.degrees_for(workers)
        if degrees.tp > 1 or degrees.pp > 1:
            return None
        return "layers" if workers > 1 else "model"

    def over_batch_refused(self, workers: int) -> str | None:
        degrees = self.degrees_for(workers)
        if degrees.pp > 1:
            return (
                "micro-batches go back through a pipeline before all have left it; write "
                "distributed='fsdp' or pp=1"
            )
        if degrees.tp > 1 and self.tensor is not None and self.tensor.loss_parallel:
            return "loss_parallel=True leaves the outputs in slices; set loss_parallel to False"
        return None

    def recomputing_refused(self) -> str | None:
        if self.fsdp is not None and self.fsdp.activation_checkpointing:
            return (
                "FSDP(activation_checkpointing=True) says so already; write FSDP(), or leave "
                "activation_checkpointing out"
            )
        if self.pipeline is not None and self.pipeline.schedule == "zero_bubble":
            return (
                "schedule='zero_bubble' takes the backward pass of a layer in two; write "
                "Pipeline(schedule='1f1b')"
            )
        return None

    # ------------------------------------------------------------------ who sees what

    def shares(self, workers: int) -> int:
        return self.degrees_for(workers).dp

    def place(self, world: World) -> tuple[int, int]:
        degrees = self.degrees_for(world.world_size)
        return world.rank // degrees.tp % degrees.dp, degrees.dp

    def counts(self, world: World) -> bool:
        degrees = self.degrees_for(world.world_size)
        at = degrees.coordinates(world.rank)
        return at["tp"][0] == 0 and at["pp"][0] == degrees.pp - 1

    def stream(self, world: World) -> int:
        return world.rank // self.degrees_for(world.world_size).tp

    def layout(self, world: World) -> str:
        return str(self.degrees_for(world.world_size))

    def slices(self, world: World) -> Tensor | None:
        return self.tensor if self.degrees_for(world.world_size).tp > 1 else None

    # ------------------------------------------------------------------ the model in parts

    def prepare(self, model: nn.Module, world: World) -> nn.Module:
        self.world, self.degrees = world, self.degrees_for(world.world_size)
        self._stepped = False
        self.at = self.degrees.coordinates(world.rank)
        self.mesh: DeviceMesh | None = self.degrees.layout(world) if world.world_size > 1 else None
        self.plain = model
        skeleton = _skeleton(model)
        values = Values(model, skeleton, world, self.seed)
        self.passes: PipelinePasses | None = None
        chunks: list[nn.Module] = [skeleton]
        orders: dict[str, torch.Tensor] = {}
        self.sharded: list[Units] = []
        if self.degrees.tp > 1 and self.tensor is not None:
            self.tensor.check_model(skeleton, self.degrees.tp)
        if self.degrees.pp > 1:
            assert self.pipeline is not None
            assert self.mesh is not None
            assert self.try_on is not None
            self.passes = self.pipeline.cut(skeleton, self.mesh, world, self.try_on)
            chunks = self.passes.chunks
            values.settle_stages(chunks)
        for chunk in chunks:
            if self.degrees.tp > 1:
                assert self.tensor is not None
                assert self.mesh is not None
                values.settle(chunk)
                orders |= self.tensor.parallelize(chunk, self.mesh["tp"])
            if self.degrees.shard > 1:
                assert self.fsdp is not None
                assert self.mesh is not None
                axes = ("dp_replicate", "dp_shard") if self.degrees.replicate > 1 else "dp_shard"
                self.sharded.append(self.fsdp.shard(chunk, self.mesh[axes], values, world))
            values.settle(chunk)
        self.module = skeleton if self.passes is None else self.passes.model()
        self.chunks = chunks
        self._describe(orders)
        return self.module

    def _describe(self, orders: Mapping[str, torch.Tensor]) -> None:
        own: dict[str, torch.Tensor] = dict(self.module.named_parameters()) | dict(
            self.module.named_buffers()
        )
        shared = {} if self.passes is None else self.passes.shared
        self.names = [name for name, _ in self.plain.named_parameters()]
        self.aliases = aliases(self.plain)
        self.parameters = {name: own[name] for name in self.names if name in own}
        self.held: dict[str, Held] = {}
        for name, value in [*self.plain.named_parameters(), *self.plain.named_buffers()]:
            if name not in own:
                self.held[name] = nowhere(value.shape, value.dtype)
                continue
            found = held(own[name], self.at, orders.get(name))
            if name in shared:
                stages = shared[name]
                found = found.on_stages(self.at["pp"][0] == min(stages), len(stages))
            self.held[name] = found
        self.local = {name: self._local(name) for name in self.parameters}
        self._list_trained()
        self.shared = {name: stages for name, stages in shared.items() if name in self.parameters}
        self._shared_groups = {
            stages: _group_of_stages(self.mesh, stages)
            for stages in sorted(set(map(tuple, shared.values())))
        }

    def _list_trained(self) -> None:
        self.trained = [
            name for name, parameter in self.parameters.items() if parameter.requires_grad
        ]
        # What no shard group exchanges: parameters that are whole on every rank of dp, or in slices
        # of tp alone.
        self.loose = [name for name in self.trained if not _over_dp(self.parameters[name])]
        self._in_units = set(self.trained) - set(self.loose)

    def _local(self, name: str) -> nn.Parameter:
        """What the optimizer works on: a plain tensor over the same memory."""
        parameter, part = self.parameters[name], self.held[name].local
        if part is parameter:
            return parameter  # type: ignore[return-value]
        assert part is not None
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    def own_module(self, model: nn.Module) -> nn.Module:
        return self.module

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        self.repointed = Repointed(
            optimizer, dict(self.plain.named_parameters()), self.held, self.local, self.world
        )
        self._apply = update_function(optimizer)

    def go_on(self) -> None:
        """Layers that were frozen or unfrozen, parameters that were replaced, and groups that the
        optimizer has got, count from here on."""
        own = dict(self.module.named_parameters())
        replaced = [
            name for name, parameter in self.parameters.items() if own.get(name) is not parameter
        ]
        added = sorted(set(own) - set(self.parameters))
        trained = [name for name, parameter in own.items() if parameter.requires_grad]
        groups = self.repointed.added(
            {
                id(p): name
                for name, p in [*self.parameters.items(), *own.items(), *self.local.items()]
            }
        )
        changed = bool(replaced or added or groups or set(trained) != set(self.trained))
        seen = hashlib.sha256(json.dumps([replaced, added, trained, groups]).encode()).hexdigest()
        told = [
            json.loads(text)
            for text in all_gather_text(json.dumps([self.at["pp"][0], seen, changed]), self.world)
        ]
        if not any(flag for _, _, flag in told):
            return
        if len({(stage, digest) for stage, digest, _ in told}) > self.degrees.pp:
            raise UserError(
                "parameters were frozen, unfrozen or replaced, or groups added to the optimizer, "
                "on some ranks only; change them on all ranks"
            )
        if self.degrees.pp > 1:
            raise UserError(
                "parameters were frozen, unfrozen or replaced, or groups added to the optimizer, "
                f"between two epochs, and a rank of strategy '{self.name}' sees the layers of its "
                "own stage alone. Change them before train(), and train in several calls of it; or "
                "use distributed='fsdp'"
            )
        unlike = [
            name
            for name in replaced
            if name not in own or own[name].shape != self.parameters[name].shape
        ]
        if added or unlike or (replaced and self.degrees.tp > 1):
            raise UserError(
                f"the model's parameter '{(added or unlike or replaced)[0]}' was "
                f"{'added' if added else 'replaced or taken away'} between two epochs, and "
                f"strategy '{self.name}' holds parts of those that the model had in the beginning. "
                "Change its values in place (`with torch.no_grad(): parameter.copy_(…)`), or "
                "change the model between two calls of train()"
            )
        for name in replaced:
            self._replace(name, own[name])
        for name, local in self.local.items():
            local.requires_grad_(self.parameters[name].requires_grad)
        for units in self.sharded:
            units.follow()
        self._list_trained()
        self.repointed.take_up(groups, dict(self.plain.named_parameters()))

    def _replace(self, name: str, parameter: nn.Parameter) -> None:
        """Another tensor has taken a parameter's place, whole on each rank; the optimizer does not
        know it."""
        with torch.no_grad():
            parameter.data = parameter.data.to(self.world.device)
            broadcast_tensors([parameter.data], self.world)
        for units in self.sharded:
            units.drop(self.parameters[name])
        self.parameters[name] = self.local[name] = parameter
        self.held[name] = held(parameter, self.at, None)

    # ------------------------------------------------------------------ a step

    def gradient_scale(self, world: World) -> float:
        # The exchange divides by it. A scaled loss might overflow, so that the exchanged gradients
        # are multiplied then.
        return 1.0 if self.scaler is not None else float(self.degrees.dp)

    def explain(self, error: Exception) -> UserError | None:
        text = str(error)
        if "mixed torch.Tensor and DTensor" in text:
            return UserError(
                "handle_batch calls a part of the model, whose weights lie in parts that only the "
                "model itself puts together. Call model(…); what else must run goes into its "
                "forward(). Or write distributed='ddp'"
            )
        if "setStorage" in text and "out of bounds" in text:
            return UserError(
                "the loss needs weights that were freed after the forward pass: a gradient of a "
                "gradient (torch.autograd.grad with create_graph=True) cannot be computed by "
                f"strategy '{self.name}' with shards. Write distributed='ddp'"
            )
        cause = str(error.__cause__)
        if "failed to run forward" in text and "immutable_dict" in cause:
            return UserError(
                "a pipeline's model gives tensors, or a tuple or list of them, and this one gives "
                "a dict; return a tuple, or write distributed='ddp'"
            )
        if "failed to run forward" in text and "differentiated" in cause.lower():
            return UserError(
                "handle_batch asks for a gradient of the model's input (torch.autograd.grad), "
                "which ends in a pipeline at this rank's stage; write distributed='ddp'"
            )
        return None

    def check_first_loss(self, loss: float | None) -> None:
        calls.note("comparing the first loss")
        mine = [self.at["tp"][1] > 1, [self.at["dp_replicate"][0], self.at["dp_shard"][0]], loss]
        seen: dict[str, list[float]] = {}
        for text in all_gather_text(json.dumps(mine), self.world):
            sliced, place, value = json.loads(text)
            if sliced and value is not None:
                seen.setdefault(str(place), []).append(value)
        for values in seen.values():
            if max(values) - min(values) > _LOSSES_APART * max(map(abs, values)):
                raise UserError(
                    "workers that hold slices of the same layers compute different losses from the "
                    f"same samples: {', '.join(f'{value:.6g}' for value in values)}. An output of "
                    "the model is a slice: a layer whose style is 'colwise' gives each worker a "
                    "part, which must go through a 'rowwise' layer. Leave it out of the plan"
                )

    def exchange_all(
        self, own: float, total: float, clip_norm: float | None, missing: bool
    ) -> bool:
        calls.note("exchanging gradients")
        for units in self.sharded:
            units.check()
        gradients = {name: self._gradient(name) for name in self.parameters}
        self._exchange_rest(gradients)
        for name, local in self.local.items():
            gradient = gradients[name]
            if not self._stepped:
                self._follow(name, local)
            local.grad = gradient
        if self.scaler is not None:
            self._unscale(self.scaler)
        if clip_norm is not None:
            self._clip(clip_norm)
        if self.before_step is not None:
            self.before_step()
        if self.scaler is not None:
            self.scaler.apply(self.repointed.optimizer)
        else:
            self._apply()
        if not self._stepped:
            self._stepped = True
            for units in self.sharded:
                units.agree(self.world)
        for parameter in (*self.local.values(), *self.parameters.values()):
            parameter.grad = None
        return True

    def _unscale(self, scaler: Scaler) -> None:
        if self.degrees.dp > 1:
            for local in self.local.values():
                if local.grad is not None:
                    local.grad.mul_(self.degrees.dp)
        scaler.unscale_(self.repointed.optimizer)

    def _follow(self, name: str, local: nn.Parameter) -> None:
        """fully_shard may give a shard other memory in the first forward pass (where it pins it),
        and stays with that."""
        part = getattr(self.parameters[name], "_local_tensor", None)
        if part is not None and part.data_ptr() != local.data_ptr():
            local.data = part.detach()
            self.held[name] = self.held[name].with_local(local)

    def _gradient(self, name: str) -> torch.Tensor | None:
        """This rank's part of the gradient."""
        parameter = self.parameters[name]
        gradient: Any = parameter.grad
        if gradient is None or not hasattr(parameter, "placements"):
            return gradient
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        part: torch.Tensor = gradient.to_local()
        return part.wait() if hasattr(part, "wait") else part

    def _exchange_rest(self, gradients: dict[str, torch.Tensor | None]) -> None:
        """Exchange what fully_shard does not: over dp, and between the stages that share a
        parameter."""
        if self.degrees.dp > 1 and self.trained:
            # A parameter that no rank has used keeps no gradient, and one that some have not used
            # counts as 0 on those.
            mine = [self._used(name, gradients) for name in self.trained]
            used = torch.ones(len(mine), device=self.world.device)
            if not all(mine):
                used.copy_(torch.tensor(mine, dtype=torch.float32))  # waits for the device
            dense = []
            for name in self.loose:
                gradient = gradients[name]
                if gradient is None:
                    gradient = torch.zeros_like(self.local[name], requires_grad=False)
                dense.append(gradient.to_dense() if gradient.is_sparse else gradient)
                gradients[name] = dense[-1]
            for axis in ("dp_shard", "dp_replicate"):
                self._sum_over(axis, [*dense, used])
            for gradient in dense:
                gradient.div_(self.degrees.dp)
            if not all(mine):
                for name, number in zip(self.trained, used.tolist(), strict=True):
                    if not number:
                        gradients[name] = None
            for units in self.sharded:
                units.clear()
        for name, stages in self.shared.items():
            part = self.held[name].local
            assert part is not None
            if gradients[name] is None:
                gradients[name] = torch.zeros_like(part)
            dist.all_reduce(gradients[name], group=self._shared_groups[tuple(stages)])

    def _used(self, name: str, gradients: dict[str, torch.Tensor | None]) -> bool:
        """Whether the samples of this rank have given a parameter a gradient in this step."""
        if name in self._in_units:
            return any(id(self.parameters[name]) in units.used for units in self.sharded)
        return gradients[name] is not None

    def _sum_over(self, axis: str, values: list[torch.Tensor]) -> None:
        """Sum tensors over an axis in place, a message for each dtype."""
        if self.at[axis][1] == 1 or not values:
            return
        assert self.mesh is not None
        group = self.mesh.get_group(axis)
        for flat in fused(values):
            dist.all_reduce(flat, group=group)

    def _clip(self, clip_norm: float) -> None:
        """Scale gradients so that the norm of the whole model's is at most `clip_norm`, as
        clip_grad_norm_ does."""
        found = [
            (local.grad, self.held[name].copies)
            for name, local in self.local.items()
            if local.grad is not None
        ]
        clip_parts(
            [gradient for gradient, _ in found],
            [copies for _, copies in found],
            clip_norm,
            self.world,
        )

    def evaluated(self) -> None:
        """Without a backward pass, fully_shard keeps whole weights, which hide this rank's parts
        from whom asks the module."""
        if self.degrees.shard == 1:
            return
        from torch.distributed.fsdp import FSDPModule

        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    # ------------------------------------------------------------------ equal on all ranks

    def sync_buffers(self) -> None:
        if self.degrees.dp == 1:
            return
        averaged, others = statistics_and_others(self.module)
        for axis in ("dp_shard", "dp_replicate"):
            self._sum_over(axis, averaged)
        for value in averaged:
            value.div_(self.degrees.dp)
        first = self.at["dp_shard"][0] == self.at["dp_replicate"][0] == 0
        for value in others:
            whole = value.detach().clone(memory_format=torch.contiguous_format)
            if not first:
                whole.zero_()
            # The bytes of all but the first are 0, so that they add up to the first's, whatever the
            # dtype.
            for axis in ("dp_shard", "dp_replicate"):
                self._sum_over(axis, [whole.reshape(-1).view(torch.uint8)])
            value.copy_(whole)

    def check_equal(self, where: str) -> None:
        copies = list(self.local)
        sliced = {
            name
            for name in copies
            if any(p.is_shard() for p in getattr(self.parameters[name], "placements", ()))
        }
        whole = [name for name in copies if name not in sliced]
        self._check_copies("dp_replicate", copies, where)
        # Each computes its own gradients of these. On GPUs, kernels that add in no fixed order let
        # the last bits differ.
        self._check_copies("tp", whole, where, bits=self.world.device.type == "cpu")

    def _check_copies(self, axis: str, names: list[str], where: str, bits: bool = True) -> None:
        if self.at[axis][1] == 1 or not names:
            return
        assert self.mesh is not None
        group = self.mesh.get_group(axis)
        parts = [self.local[name].detach() for name in names]
        sums = torch.stack(
            [bit_sum(part) if bits else part.double().abs().sum() for part in parts]
        ).to(self.world.device)
        smallest, largest = sums.clone(), sums.clone()
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        apart = smallest != largest if bits else largest - smallest > _APART * largest
        differ = [name for name, bad in zip(names, apart.tolist(), strict=True) if bad]
        if differ:
            raise WorldError(
                f"{where}: the weights of copies along {axis.replace('_', '.')} differ in "
                f"{len(differ)} parameter(s), first '{differ[0]}'. Call the model itself in the "
                "forward pass, and change weights only in ways that are the same on every rank"
            )

    # ------------------------------------------------------------------ the whole again

    def held_parts(self) -> Mapping[str, Held] | None:
        if self.world.world_size == 1:
            return None
        return self.held | {
            name: self.held[first] for name, first in self.aliases.items() if first in self.held
        }

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        return {name: self.held[self.aliases[name]] for name in self.aliases} | _extra_state(
            self.plain
        )

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self.repointed.state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], read: Read) -> None:
        missing = sorted(set(self.aliases) - set(state))
        unknown = sorted(set(state) - set(self.aliases) - set(_extra_state(self.plain)))
        if missing or unknown:
            raise ValueError(
                f"it has no {missing[0]}"
                if missing
                else f"it has {unknown[0]}, which this model has not"
            )
        for name, kept in self.held.items():
            if kept.local is not None and name in self.aliases:  # other buffers are in no state
                read(state[name], kept.with_local(kept.local.detach()))

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], read: Read
    ) -> None:
        self.repointed.load_state_dict(state, read)

    def copy_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: kept.local.detach().cpu().clone()
            for name, kept in self.held.items()
            if kept.local is not None
        }

    def restore_weights(self, model: nn.Module, copy: dict[str, torch.Tensor]) -> None:
        for name, value in copy.items():
            self.held[name].local.detach().copy_(value)  # type: ignore[union-attr]

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        return {name: self.held[name].whole(self.world.device) for name in self.names}

    def whole_buffers(self) -> dict[str, torch.Tensor]:
        return {
            name: self.held[name].whole(self.world.device) for name, _ in self.plain.named_buffers()
        }

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name in self.names:
            kept = self.held[name]
            if name in self.local:
                assert kept.local is not None
                gradient = self.local[name].grad
                kept = kept.with_local(
                    gradient if gradient is not None else torch.zeros_like(kept.local)
                )
            found[name] = kept.whole(self.world.device)
        return found

    def give_back(self, keep: bool) -> None:
        meta = any(parameter.is_meta for parameter in self.plain.parameters())
        targets: dict[str, torch.Tensor] = dict(self.plain.named_parameters()) | dict(
            self.plain.named_buffers()
        )
        with torch.no_grad():
            for name, kept in self.held.items() if not meta else ():
                whole = kept.whole(self.world.device) if self.mesh is not None else kept.local
                if keep:
                    assert whole is not None
                    targets[name].copy_(whole)
        self.repointed.give_back(keep and not meta, self.world.device)


def _skeleton(model: nn.Module) -> nn.Module:
    """The same modules with parameters of their own over the same memory; buffers are copies."""
    parameters = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()
    }
    made: nn.Module = copy.deepcopy(model, dict(parameters))
    return made


def _check_leaves(model: nn.Module, strategy: str) -> None:
    """Raise `UserError` for a module with a tensor that is computed from parameters, of which there
    can be no copy."""
    for name, module in model.named_modules():
        computed = [
            key
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and not value.is_leaf
        ]
        if computed:
            raise UserError(
                f"'{name}' keeps '{computed[0]}', which is computed from its parameters "
                f"(torch.nn.utils.weight_norm does so), and strategy '{strategy}' copies the "
                "model's structure; use torch.nn.utils.parametrizations.weight_norm, or write "
                "distributed='ddp'"
            )


def _extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules add to their state beside parameters and buffers."""
    return {
        name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")
    }


def _over_dp(parameter: torch.Tensor) -> bool:
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and "dp_shard" in (mesh.mesh_dim_names or ())


def _group_of_stages(mesh: DeviceMesh | None, stages: tuple[int, ...]) -> Any:
    """The group of this rank's counterparts on some of the stages; every rank of the world makes
    all such groups."""
    assert mesh is not None
    mine = None
    for ranks in mesh.mesh.flatten(1).t().tolist():
        group = dist.new_group([ranks[stage] for stage in stages])
        if dist.get_rank() in ranks:
            mine = group
    return mine
