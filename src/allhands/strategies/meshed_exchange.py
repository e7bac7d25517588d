"""The steps of a model in parts: gradients are exchanged and clipped, and the optimizer works on
this rank's part."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist

from allhands.comm import all_gather_text, calls
from allhands.comm.clipping import clip_parts
from allhands.errors import UserError, WorldError
from allhands.step.exchange import Count, Exchange
from allhands.step.precision import Scaler
from allhands.step.update import update_function
from allhands.strategies.alike import bit_sum
from allhands.strategies.meshed_placement import MeshedPlacement
from allhands.strategies.repoint import Repointed

# How far the first losses of workers with the same samples may differ, relative to the largest.
_LOSSES_APART = 1e-4
# How far copies may differ, relative to the sum of their elements, where rounding may make them
# differ.
_APART = 1e-3


class MeshedExchange(Exchange):
    """Exchanges what the passes have not, and takes the optimizer's step.

    Args:
        name: of the strategy, for messages.
        placement: of the model.
        repointed: the optimizer, over this rank's parts.
        scaler: of an fp16 training.
        joins: this rank comes to a training that runs.
    """

    after_backward = True

    def __init__(
        self,
        name: str,
        placement: MeshedPlacement,
        repointed: Repointed,
        scaler: Scaler | None,
        joins: bool = False,
    ) -> None:
        # One that joins comes to its first steps alone.
        self.goes_on_together = not joins
        self._name, self._placement, self._repointed = name, placement, repointed
        self._scaler = scaler
        self._apply = update_function(repointed.optimizer)
        self._stepped = False
        self.passes = placement.passes
        # The exchange divides by it. A scaled loss might overflow, so that the exchanged gradients
        # are multiplied then.
        self.gradient_scale = 1.0 if scaler is not None else float(placement.degrees.dp)
        self._list_in_units()
        self.take_step = self._take_step

    def _list_in_units(self) -> None:
        placement = self._placement
        self._in_units = set(placement.trained) - set(placement.loose)

    def go_on(self) -> None:
        """Layers that were frozen or unfrozen, parameters that were replaced, and groups that the
        optimizer has got, count from here on."""
        placement = self._placement
        own = dict(placement.module.named_parameters())
        replaced = [
            name
            for name, parameter in placement.parameters.items()
            if own.get(name) is not parameter
        ]
        added = sorted(set(own) - set(placement.parameters))
        trained = [name for name, parameter in own.items() if parameter.requires_grad]
        groups = self._repointed.added(
            {
                id(p): name
                for name, p in [
                    *placement.parameters.items(),
                    *own.items(),
                    *placement.local.items(),
                ]
            }
        )
        changed = bool(replaced or added or groups or set(trained) != set(placement.trained))
        seen = hashlib.sha256(json.dumps([replaced, added, trained, groups]).encode()).hexdigest()
        mine = json.dumps([placement.at["pp"][0], seen, changed])
        texts = all_gather_text(mine, placement.world) if self.goes_on_together else [mine]
        self.goes_on_together = True
        told = [json.loads(text) for text in texts]
        if not any(flag for _, _, flag in told):
            return
        if len({(stage, digest) for stage, digest, _ in told}) > placement.degrees.pp:
            raise UserError(
                "parameters were frozen, unfrozen or replaced, or groups added to the optimizer, "
                "on some ranks only; change them on all ranks"
            )
        if placement.degrees.pp > 1:
            raise UserError(
                "parameters were frozen, unfrozen or replaced, or groups added to the optimizer, "
                f"between two epochs, and a rank of strategy '{self._name}' sees the layers of its "
                "own stage alone. Change them before train(), and train in several calls of it; or "
                "use distributed='fsdp'"
            )
        unlike = [
            name
            for name in replaced
            if name not in own or own[name].shape != placement.parameters[name].shape
        ]
        if added or unlike or (replaced and placement.degrees.tp > 1):
            raise UserError(
                f"the model's parameter '{(added or unlike or replaced)[0]}' was "
                f"{'added' if added else 'replaced or taken away'} between two epochs, and "
                f"strategy '{self._name}' holds parts of those that the model had in the "
                "beginning. Change its values in place (`with torch.no_grad(): "
                "parameter.copy_(…)`), or change the model between two calls of train()"
            )
        for name in replaced:
            placement.replace(name, own[name])
        for name, local in placement.local.items():
            local.requires_grad_(placement.parameters[name].requires_grad)
        for units in placement.units:
            units.follow()
        placement.list_trained()
        self._list_in_units()
        self._repointed.take_up(groups, dict(placement.plain.named_parameters()))

    # ------------------------------------------------------------------ a step

    def exchange_all(
        self, own: Count, total: float, clip_norm: float | None, missing: bool
    ) -> bool:
        placement = self._placement
        calls.note("exchanging gradients")
        for units in placement.units:
            units.check()
        gradients = {name: self._gradient(name) for name in placement.parameters}
        self._exchange_rest(gradients)
        for name, local in placement.local.items():
            gradient = gradients[name]
            if not self._stepped:
                placement.follow_memory(name)
            local.grad = gradient
        if self._scaler is not None:
            self._unscale(self._scaler)
        if clip_norm is not None:
            self._clip(clip_norm)
        if self.before_step is not None:
            self.before_step()
        if self.before_update is not None:
            self.before_update()
        self._take_step()
        if not self._stepped:
            self._stepped = True
            for units in placement.units:
                units.agree(placement.world)
        return True

    def _take_step(self) -> None:
        placement = self._placement
        if self._scaler is not None:
            self._scaler.apply(self._repointed.optimizer)
        else:
            self._apply()
        for parameter in (*placement.local.values(), *placement.parameters.values()):
            parameter.grad = None

    def _unscale(self, scaler: Scaler) -> None:
        if self._placement.degrees.dp > 1:
            for local in self._placement.local.values():
                if local.grad is not None:
                    local.grad.mul_(self._placement.degrees.dp)
        scaler.unscale_(self._repointed.optimizer)

    def _gradient(self, name: str) -> torch.Tensor | None:
        """This rank's part of the gradient."""
        parameter = self._placement.parameters[name]
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
        placement = self._placement
        if placement.degrees.dp > 1 and placement.trained:
            # A parameter that no rank has used keeps no gradient, and one that some have not used
            # counts as 0 on those.
            mine = [self._used(name, gradients) for name in placement.trained]
            used = torch.ones(len(mine), device=placement.world.device)
            if not all(mine):
                used.copy_(torch.tensor(mine, dtype=torch.float32))  # waits for the device
            dense = []
            for name in placement.loose:
                gradient = gradients[name]
                if gradient is None:
                    gradient = torch.zeros_like(placement.local[name], requires_grad=False)
                dense.append(gradient.to_dense() if gradient.is_sparse else gradient)
                gradients[name] = dense[-1]
            for axis in ("dp_shard", "dp_replicate"):
                placement.sum_over(axis, [*dense, used])
            for gradient in dense:
                gradient.div_(placement.degrees.dp)
            if not all(mine):
                for name, number in zip(placement.trained, used.tolist(), strict=True):
                    if not number:
                        gradients[name] = None
            for units in placement.units:
                units.clear()
        for name, group in placement.shared.items():
            part = placement.held[name].local
            assert part is not None
            if gradients[name] is None:
                gradients[name] = torch.zeros_like(part)
            dist.all_reduce(gradients[name], group=group)

    def _used(self, name: str, gradients: dict[str, torch.Tensor | None]) -> bool:
        """Whether the samples of this rank have given a parameter a gradient in this step."""
        placement = self._placement
        if name in self._in_units:
            return any(id(placement.parameters[name]) in units.used for units in placement.units)
        return gradients[name] is not None

    def _clip(self, clip_norm: float) -> None:
        """Scale gradients so that the norm of the whole model's is at most `clip_norm`, as
        clip_grad_norm_ does."""
        placement = self._placement
        found = [
            (local.grad, placement.held[name].copies)
            for name, local in placement.local.items()
            if local.grad is not None
        ]
        clip_parts(
            [gradient for gradient, _ in found],
            [copies for _, copies in found],
            clip_norm,
            placement.world,
        )

    # ------------------------------------------------------------------ guards

    def explain(self, error: Exception) -> Exception | None:
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
                f"strategy '{self._name}' with shards. Write distributed='ddp'"
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
        at = self._placement.at
        mine = [at["tp"][1] > 1, [at["dp_replicate"][0], at["dp_shard"][0]], loss]
        seen: dict[str, list[float]] = {}
        for text in all_gather_text(json.dumps(mine), self._placement.world):
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

    def check_equal(self, where: str) -> None:
        placement = self._placement
        copies = list(placement.local)
        sliced = {
            name
            for name in copies
            if any(p.is_shard() for p in getattr(placement.parameters[name], "placements", ()))
        }
        whole = [name for name in copies if name not in sliced]
        self._check_copies("dp_replicate", copies, where)
        # Each computes its own gradients of these. On GPUs, kernels that add in no fixed order let
        # the last bits differ.
        self._check_copies("tp", whole, where, bits=placement.world.device.type == "cpu")

    def _check_copies(self, axis: str, names: list[str], where: str, bits: bool = True) -> None:
        placement = self._placement
        if placement.at[axis][1] == 1 or not names:
            return
        assert placement.mesh is not None
        group = placement.mesh.get_group(axis)
        parts = [placement.local[name].detach() for name in names]
        sums = torch.stack(
            [bit_sum(part) if bits else part.double().abs().sum() for part in parts]
        ).to(placement.world.device)
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
