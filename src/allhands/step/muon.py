"""Muon for the matrices inside a model and AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from allhands.errors import UserError, kind_of

_KINDS: dict[bool, Callable[..., torch.optim.Optimizer]] = {
    False: torch.optim.AdamW,
    True: torch.optim.Muon,
}


class MuonAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` for the weights of linear layers, ``torch.optim.AdamW`` for all other
    parameters.

    Muon (Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024) steps along
    the orthogonalised momentum of
    a whole matrix. It is meant for matrices inside a model: embeddings, the last linear layer,
    which gives the output, biases and
    norms are AdamW's, and so are convolutions. As the inner optimizer of `local_sgd` it comes
    nearer to `ddp` than AdamW (Thérien et al., MuLoCo: Muon is a practical inner optimizer for
    DiLoCo, 2025).

    It needs whole matrices, so that `fsdp`, `tensor` and `pipeline` refuse it.

    Args:
        params: a model, whose parameters are dealt out as above; or groups of parameters as of any
            optimizer, each with a key ``"muon"`` that says which of the two it is for, and options
            of its own.
        lr: learning rate of AdamW.
        muon_lr: learning rate of Muon, whose steps have about the spectral norm `muon_lr`, of a
            matrix n x m times max(1, n / m) to the power of 1/2.
        betas, eps: of AdamW.
        momentum: of Muon, by Nesterov.
        weight_decay: of both, times the learning rate of each.

    Raises:
        UserError: the model has no linear layer before its last one, or a group does not say which
            it is for.
        ValueError: an option is out of bounds, or a group for Muon holds what is no matrix.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        muon_lr: float = 0.02,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        options: dict[bool, dict[str, Any]] = {
            False: {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            True: {"lr": muon_lr, "momentum": momentum, "weight_decay": weight_decay},
        }
        for flag, kind in _KINDS.items():
            kind([torch.zeros(1, 1)], **options[flag])  # torch checks only what all groups share
        groups = []
        for group in _dealt_out(params) if isinstance(params, nn.Module) else params:
            if not isinstance(group, Mapping) or not isinstance(group.get("muon"), bool):
                given = kind_of(group) if not isinstance(group, Mapping) else "a group without it"
                raise UserError(
                    f"MuonAdamW: {given}; pass the model itself, or groups {{'params': […], "
                    "'muon': True} and {'params': […], 'muon': False}"
                )
            groups.append({**options[group["muon"]], **group})
        super().__init__(groups, {})
        self._parts: list[torch.optim.Optimizer] | None = None
        self._bound()  # refuses what the two do not take

    def _bound(self) -> list[torch.optim.Optimizer]:
        """The two optimizers over this one's groups and state, whoever has put others in their
        place."""
        if self._parts is None:
            dealt = {
                flag: [group for group in self.param_groups if group["muon"] is flag]
                for flag in _KINDS
            }
            self._parts = [_KINDS[flag](groups) for flag, groups in dealt.items() if groups]
        for part in self._parts:
            part.state = self.state
        return self._parts

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._parts = None  # a copy, or a loaded state: the groups are others

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._parts = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both. A `closure` is called once, before it; returns what it gave."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._bound():
            part.step()
        return loss


def _dealt_out(model: nn.Module) -> list[dict[str, Any]]:
    """A model's parameters in a group for AdamW and one for Muon."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    matrices = {id(module.weight) for module in linear[:-1]} - embeddings
    if linear:
        matrices.discard(id(linear[-1].weight))
    if not matrices:
        raise UserError(
            f"MuonAdamW: {type(model).__name__} has no linear layer before the last one, which "
            "gives the output; write AdamW"
        )
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if (id(p) in matrices) is flag], "muon": flag}
        for flag in (False, True)
    ]
