"""Where a model in parts gets its initial weights: from rank 0, or, on the meta device, from its
layers' initialisation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm import broadcast_tensors
from allhands.data import derive_seed
from allhands.errors import UserError
from allhands.world import World


class Values:
    """Gives the parameters of a skeleton their values, some at a time, so that no rank need hold
    all of them at once.

    A model on the meta device has none: each layer that has parameters draws them by its
    ``reset_parameters``, in the order of ``named_modules``, from generators seeded with
    ``derive_seed(seed, "model")``; then, where the model has a method ``start_parameter(name,
    parameter)``, that is called for each in the order of ``named_parameters``. It is what building
    the model plainly under that seed gives, where layers are made in the order in which the model
    holds them and nothing else initialises them.

    Args:
        plain: the user's model; rank 0's values count.
        skeleton: its structure, with parameters that hold no values of their own yet.
        world: the processes.
        seed: of the training.
        follow: the ranks get their values afterwards; none are sent here.

    Raises:
        UserError: the model is on the meta device, and a buffer's or a layer's values cannot be
            known.
    """

    def __init__(
        self, plain: nn.Module, skeleton: nn.Module, world: World, seed: int, follow: bool = False
    ) -> None:
        self.world, self._follow = world, follow
        # By id, which names a parameter only while it lives; to hold it here would hold a whole
        # layer.
        self._settled: dict[int, weakref.ref[nn.Parameter]] = {}
        self._meta = Drawn(skeleton, seed) if any(p.is_meta for p in plain.parameters()) else None
        self._model, self._plain = plain, dict(plain.named_parameters())
        for module in skeleton.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(world.device)
        if not follow:
            broadcast_tensors(list(skeleton.buffers()), world)

    def settle(self, root: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Put values, on the world's device, in the place of parameters of `root`; all of those
        that have none yet by default.

        All ranks of the world call it together, for the same ones.
        """
        wanted = [
            p for p in (root.parameters() if parameters is None else parameters) if self._open(p)
        ]
        if self._meta is not None:
            self._replace([root], self._meta.values(wanted, self.world.device))
            return
        self._replace([root], {id(p): self._of_rank_0(p) for p in wanted})

    def settle_stages(self, chunks: list[nn.Module]) -> None:
        """The same for stages, which differ between ranks."""
        first = aliases(self._model)
        own = {
            first.get(name, name): p
            for chunk in chunks
            for name, p in chunk.named_parameters(remove_duplicate=False)
        }
        if self._meta is not None:
            self._replace(chunks, self._meta.values(own.values(), self.world.device))
            return
        found = {}
        for name, parameter in self._plain.items():
            value = self._of_rank_0(parameter)
            if name in own:
                found[id(own[name])] = value
        self._replace(chunks, found)

    def _open(self, parameter: nn.Parameter) -> bool:
        known = self._settled.get(id(parameter))
        return not hasattr(parameter, "placements") and (known is None or known() is not parameter)

    def _of_rank_0(self, parameter: torch.Tensor) -> torch.Tensor:
        if self.world.world_size == 1:
            return parameter.detach().to(self.world.device)
        value = parameter.detach().to(self.world.device, copy=True)
        if self._follow:
            return value
        flat = value.reshape(-1)
        dist.broadcast(flat.view(torch.uint8), 0)
        return value.copy_(flat.view_as(value))

    def _replace(self, roots: list[nn.Module], values: dict[int, torch.Tensor]) -> None:
        made: dict[int, nn.Parameter] = {}
        for root in roots:
            for module in root.modules():
                for name, parameter in module._parameters.items():
                    if parameter is None or id(parameter) not in values:
                        continue
                    key = id(parameter)
                    if key not in made:
                        made[key] = nn.Parameter(values[key], requires_grad=parameter.requires_grad)
                        self._settled[id(made[key])] = weakref.ref(made[key])
                    module._parameters[name] = made[key]


def aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer in the model's state, and the first name of that
    tensor."""
    firsts: dict[int, str] = {}
    own = {id(value) for value in [*model.parameters(), *model.buffers()]}
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in own:
            found[name] = firsts.setdefault(id(value), name)
    return found


class Drawn:
    """Draws the weights of a model on the meta device layer by layer, each time the same ones."""

    def __init__(self, skeleton: nn.Module, seed: int) -> None:
        for name, buffer in skeleton.named_buffers():
            if buffer.is_meta:
                raise UserError(
                    f"the model is on the meta device, and the value of its buffer '{name}' cannot "
                    "be known; register it outside of `with torch.device('meta')`"
                )
        self._states: dict[int, tuple[nn.Module, torch.Tensor]] = {}
        self._owners: dict[int, int] = {}
        self._starts: dict[int, tuple[str, torch.Tensor]] = {}
        # They have no values, and their ids name them only while they live.
        self._kept = list(skeleton.parameters())
        generator = torch.get_rng_state()
        torch.default_generator.manual_seed(derive_seed(seed, "model"))
        try:
            for name, module in skeleton.named_modules():
                all_of_it = [p for p in module._parameters.values() if p is not None]
                if not all_of_it:
                    continue
                if not callable(getattr(module, "reset_parameters", None)):
                    raise UserError(
                        f"the model is on the meta device, and '{name}' ({type(module).__name__}) "
                        "has parameters but no reset_parameters() that would give them values; "
                        "write one, or build the model on the CPU"
                    )
                self._states[id(module)] = (module, torch.get_rng_state())
                for parameter in all_of_it:
                    self._owners.setdefault(id(parameter), id(module))
                self._draw(
                    module
                    # for what it leaves the generator at; tied weights too, which were made before
                    # they were tied
                )
            self._start = getattr(skeleton, "start_parameter", None)
            for name, parameter in skeleton.named_parameters() if self._start is not None else ():
                self._starts[id(parameter)] = (name, torch.get_rng_state())
                self._start(name, torch.empty_like(parameter, device="cpu"))  # type: ignore[misc]
        finally:
            torch.set_rng_state(generator)

    def _draw(self, module: nn.Module) -> dict[int, torch.Tensor]:
        """The values of the module's own parameters, on the CPU; the module is left on meta."""
        before = dict(module._parameters)
        for name, parameter in before.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter, device="cpu"), parameter.requires_grad
                )
        reset: Callable[[], object] = module.reset_parameters  # type: ignore[assignment]
        try:
            reset()
            return {
                id(p): module._parameters[name].detach()  # type: ignore[union-attr]
                for name, p in before.items()
                if p is not None
            }
        finally:
            module._parameters.update(before)

    def values(
        self, wanted: Iterable[nn.Parameter], device: torch.device
    ) -> dict[int, torch.Tensor]:
        """The values of some parameters, by the id of the parameter on meta."""
        ids = {id(p) for p in wanted if id(p) in self._owners}
        found: dict[int, torch.Tensor] = {}
        generator = torch.get_rng_state()
        try:
            for owner in dict.fromkeys(self._owners[key] for key in ids):
                module, state = self._states[owner]
                torch.set_rng_state(state)
                for key, value in self._draw(module).items():
                    if key not in ids or self._owners[key] != owner:
                        continue
                    if key in self._starts:
                        name, start = self._starts[key]
                        torch.set_rng_state(start)
                        self._start(name, value)  # type: ignore[misc]
                    found[key] = value.to(device)
        finally:
            torch.set_rng_state(generator)
        return found
