"""The plain model and optimizer out of parts on a mesh, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from allhands.errors import WorldError
from allhands.strategies.alike import statistics_and_others
from allhands.strategies.degrees import COPIES
from allhands.strategies.meshed_placement import MeshedPlacement
from allhands.strategies.model_state import MemberState, ModelState, read_nothing
from allhands.strategies.repoint import Read, Repointed
from allhands.strategies.sharded_state import ShardedMemberState
from allhands.strategies.shards import WEIGHT, Shards, copied, put

# What `detach` says of each parameter.
_TRAINED = "trained"


class MeshedState(ModelState):
    """The state of a model of which each rank holds a part.

    Args:
        placement: of the model.
        repointed: the optimizer, over this rank's parts.
    """

    def __init__(self, placement: MeshedPlacement, repointed: Repointed) -> None:
        super().__init__(placement.module, repointed.optimizer, placement.world)
        self._placement, self._repointed = placement, repointed

    @property
    def members(self) -> MemberState:
        return MeshedMemberState(self, self._placement, self._repointed)

    def sync_buffers(self) -> None:
        placement = self._placement
        if placement.degrees.dp == 1:
            return
        averaged, others = statistics_and_others(placement.module)
        for axis in ("dp_shard", "dp_replicate"):
            placement.sum_over(axis, averaged)
        for value in averaged:
            value.div_(placement.degrees.dp)
        first = placement.at["dp_shard"][0] == placement.at["dp_replicate"][0] == 0
        for value in others:
            whole = value.detach().clone(memory_format=torch.contiguous_format)
            if not first:
                whole.zero_()
            # The bytes of all but the first are 0, so that they add up to the first's, whatever the
            # dtype.
            for axis in ("dp_shard", "dp_replicate"):
                placement.sum_over(axis, [whole.reshape(-1).view(torch.uint8)])
            value.copy_(whole)

    def model_state(self) -> dict[str, Any]:
        held, firsts = self._placement.held, self._placement.aliases
        return {name: held[first] for name, first in firsts.items()} | self._extra_state()

    def optimizer_state(self) -> dict[str, Any]:
        return self._repointed.state_dict()

    def load_model_state(self, state: Mapping[str, Any], read: Read) -> None:
        names = set(self._placement.aliases)
        missing = sorted(names - set(state))
        unknown = sorted(set(state) - names - set(self._extra_state()))
        if missing or unknown:
            raise ValueError(
                f"it has no {missing[0]}"
                if missing
                else f"it has {unknown[0]}, which this model has not"
            )
        for name, kept in self._placement.held.items():
            if kept.local is not None and name in names:  # other buffers are in no state
                read(state[name], kept.with_local(kept.local.detach()))

    def load_optimizer_state(self, state: Mapping[str, Any], read: Read) -> None:
        self._repointed.load_state_dict(state, read)

    def copy_weights(self) -> dict[str, torch.Tensor]:
        return {
            name: kept.local.detach().cpu().clone()
            for name, kept in self._placement.held.items()
            if kept.local is not None
        }

    def restore_weights(self, copy: dict[str, torch.Tensor]) -> None:
        for name, value in copy.items():
            self._placement.held[name].local.detach().copy_(value)  # type: ignore[union-attr]

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        return self._whole([name for name, _ in self._placement.plain.named_parameters()])

    def whole_buffers(self) -> dict[str, torch.Tensor]:
        return self._whole([name for name, _ in self._placement.plain.named_buffers()])

    def _whole(self, names: list[str]) -> dict[str, torch.Tensor]:
        return {name: self._placement.held[name].whole(self.world.device) for name in names}

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, _ in self._placement.plain.named_parameters():
            kept = self._placement.held[name]
            if name in self._placement.local:
                assert kept.local is not None
                gradient = self._placement.local[name].grad
                kept = kept.with_local(
                    gradient if gradient is not None else torch.zeros_like(kept.local)
                )
            found[name] = kept.whole(self.world.device)
        return found

    def give_back(self, keep: bool) -> None:
        plain, several = self._placement.plain, self._placement.mesh is not None
        meta = any(parameter.is_meta for parameter in plain.parameters())
        targets: dict[str, torch.Tensor] = dict(plain.named_parameters())
        targets |= dict(plain.named_buffers())
        with torch.no_grad():
            for name, kept in self._placement.held.items() if not meta else ():
                whole = kept.whole(self.world.device) if several else kept.local
                if keep:
                    assert whole is not None
                    targets[name].copy_(whole)
        self._repointed.give_back(keep and not meta, self.world.device)

    def _extra_state(self) -> dict[str, Any]:
        """What modules add to their state beside parameters and buffers."""
        state = self._placement.plain.state_dict()
        return {name: value for name, value in state.items() if name.endswith("_extra_state")}


class MeshedMemberState(ShardedMemberState):
    """The same of a model of which each rank holds a part."""

    def __init__(
        self, state: MeshedState, placement: MeshedPlacement, repointed: Repointed
    ) -> None:
        super().__init__(state, repointed)
        self._placement = placement

    def model_alike(self) -> dict[str, Any]:
        return {}

    def load_alike(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        self._repointed.load_state_dict(optimizer, read_nothing)

    def detach(self) -> Shards:
        placement = self._placement
        for name, parameter in placement.plain.named_parameters():
            if name in placement.parameters:  # frozen or unfrozen since
                parameter.requires_grad_(placement.parameters[name].requires_grad)
        found = super().detach()
        for name, entries in found.items():
            entries[_TRAINED] = placement.parameters[name].requires_grad
        for name, _ in placement.plain.named_buffers():
            if (local := placement.held[name].local) is not None:
                found[name] = {WEIGHT: local}
        return found

    def bring(self, shards: Shards, joined: Collection[int]) -> None:
        placement, world = self._placement, self.state.world
        if joined:
            columns = [placement.column(rank) for rank in range(world.world_size)]
            sources = [next((r for r in one if r not in joined), None) for one in columns]
            if None in sources:
                raise WorldError(
                    f"no worker is left that holds the parts of rank {sources.index(None)}"
                )
            source = sources[world.rank]
            assert source is not None
            assert placement.mesh is not None
            shards = copied(shards, source, world, placement.mesh.get_group(COPIES))
        trained = {name for name, entries in shards.items() if entries.pop(_TRAINED, False)}
        if differ := sorted(trained ^ set(placement.trained)):
            raise WorldError(
                f"this worker cannot take part: '{differ[0]}' was frozen or unfrozen since the "
                "training began, which it does not know of"
            )
        put(shards, self._targets(), self.state.optimizer)

    def _targets(self) -> dict[str, torch.Tensor]:
        """What this rank has of each parameter and buffer of the plain model."""
        placement = self._placement
        buffers = {
            name: local
            for name, _ in placement.plain.named_buffers()
            if (local := placement.held[name].local) is not None
        }
        return buffers | placement.local
