"""What a user's own loop has in a checkpoint beside its models and optimizers."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allhands.errors import UserError
from allhands.loop import checkpoint
from allhands.loop.checkpoint import tree
from allhands.loop.loop_checkpoints import LoopCheckpoints, Tensors
from allhands.report.history import History

if TYPE_CHECKING:
    from allhands.loop.own_steps import OwnSteps

_PREFIX = "registered/"


class OwnCheckpoints(LoopCheckpoints):
    """The history, models that no optimizer trains, and what the user has registered."""

    loop: OwnSteps

    def alike(self, in_memory: bool) -> dict[str, Any]:
        loop = self.loop
        return (
            super().alike(in_memory)
            | loop.history.state_dict()
            | {
                "best": None,
                "best_epoch": 0,
                "callbacks": [],
                "models": {name: model.state_dict() for name, model in loop.others.items()},
                "registered": {
                    name: value.state_dict()
                    for name, (value, each_rank) in loop.registered.items()
                    if not each_rank
                },
            }
        )

    def own(self) -> Tensors:
        """What this rank alone has."""
        own: Tensors = {}
        for name, (value, each_rank) in self.loop.registered.items():
            if each_rank:
                tensors, rest = tree.split(value.state_dict())
                own |= {f"{_PREFIX}{name}/tensor/{key}": one for key, one in tensors.items()}
                file = io.BytesIO()
                torch.save(rest, file)
                own[f"{_PREFIX}{name}/rest"] = torch.frombuffer(
                    bytearray(file.getvalue()), dtype=torch.uint8
                )
        return own

    def load(self, path: Path, state: dict[str, Any]) -> None:
        loop = self.loop
        if "registered" not in state:
            raise UserError(f"resume: {path} is not of a training with steps of your own")
        here = {name for name, (_, each_rank) in loop.registered.items() if not each_rank}
        _check_names(set(state["registered"]), here, "register(name, …)")
        _check_names(set(state["models"]), set(loop.others), "models={name: …}")
        super().load(path, state)
        self._load_of_each_rank(path, state["world_size"])

    def load_rest(self, state: dict[str, Any]) -> None:
        super().load_rest(state)
        loop = self.loop
        for name, model in loop.others.items():
            model.load_state_dict(state["models"][name])
        loop.history = History.of_state(state)
        for name, own in state["registered"].items():
            loop.registered[name][0].load_state_dict(own)

    def load_weights(self, path: Path) -> None:
        super().load_weights(path)
        written = checkpoint.load(checkpoint.resolve(path), self.reads_whole)["models"]
        for name, model in self.loop.others.items():
            model.load_state_dict(written[name])

    def _load_of_each_rank(self, path: Path, before: int) -> None:
        loop = self.loop
        wanted = [name for name, (_, each_rank) in loop.registered.items() if each_rank]
        if not wanted:
            return
        if before != loop.world.world_size:
            raise UserError(
                f"resume: '{wanted[0]}' was registered with each_rank=True and saved by {before} "
                f"worker(s), and this is a run of {loop.world.world_size}; resume with {before}"
            )
        own: Mapping[str, torch.Tensor] = checkpoint.load_own(path, loop.world.rank)
        for name in wanted:
            before_name = f"{_PREFIX}{name}/"
            if f"{before_name}rest" not in own:
                raise UserError(f"resume: the checkpoint has nothing of '{name}'")
            tensors = {
                key.removeprefix(f"{before_name}tensor/"): value
                for key, value in own.items()
                if key.startswith(f"{before_name}tensor/")
            }
            file = io.BytesIO(own[f"{before_name}rest"].numpy().tobytes())
            rest = torch.load(file, weights_only=True)
            loop.registered[name][0].load_state_dict(tree.join(rest, tensors))


def _check_names(then: set[str], now: set[str], how: str) -> None:
    if then != now:
        raise UserError(
            f"resume: the checkpoint was written with {', '.join(sorted(then)) or 'nothing'} by "
            f"{how}, and this run has {', '.join(sorted(now)) or 'nothing'}; make them the same, "
            "before the first epoch"
        )
