"""`replicate`: one net on several devices of this worker, called like one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from allhands.errors import UserError
from allhands.kvstore.data import Device, devices_of


def replicate(net: nn.Module, devices: Sequence[Device] | Device) -> Replicas:
    """Put a net on several devices.

    ``[loss(net(X), Y) for X, Y in zip(data, label)]`` then computes each slice that
    `split_and_load` made on its own device, and `Trainer` adds up the gradients of all of them and
    keeps their weights alike.

    Args:
        net: the net, which becomes the first replica; the others are copies of it.
        devices: where. A device that is named twice has one replica, which computes both slices.

    Returns:
        The replicas. They have the parameters and the `state_dict` of `net`.
    """
    if isinstance(net, Replicas):
        raise UserError("the net was replicated already; call replicate once, with all devices")
    for name, parameter in net.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UserError(
                f"'{name}' has no shape yet; call the net on one batch, then replicate it"
            )
    unique = list(dict.fromkeys(devices_of(devices)))
    first = net.to(unique[0])
    return Replicas(
        {unique[0]: first, **{device: copy.deepcopy(first).to(device) for device in unique[1:]}}
    )


class Replicas(nn.Module):
    """Copies of a net; a call goes to the copy on the device of the first tensor that is passed.

    `parameters`, `state_dict` and the like are those of the first replica. Buffers, such as the
    running statistics of BatchNorm, go their own way on each replica in training; `state_dict` has
    their mean, and `eval` gives the mean to all replicas, so that all of them answer alike. Whole
    numbers among the buffers are those of the first.
    """

    def __init__(self, replicas: Mapping[torch.device, nn.Module]) -> None:
        super().__init__()
        # Past nn.Module, which would register each of them and give the parameters other names.
        object.__setattr__(self, "_by_device", dict(replicas))
        self.training = self.replicas[0].training

    @property
    def devices(self) -> list[torch.device]:
        """Where the replicas are."""
        return list(self.__dict__["_by_device"])

    @property
    def replicas(self) -> list[nn.Module]:
        """The replicas, in the order of `devices`; the first is the net that was replicated."""
        return list(self.__dict__["_by_device"].values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = _device_of((args, kwargs))
        replica = self.__dict__["_by_device"].get(device)
        if replica is None:
            if device is None:
                found = "no tensor was passed"
            else:
                found = f"the first tensor passed is on {device}"
            raise UserError(
                f"which replica? {found}, and there are replicas on "
                f"{', '.join(map(str, self.devices))}; cut the batch with "
                "split_and_load(batch, devices)"
            )
        return replica(*args, **kwargs)

    def collect_params(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by name; for each a list with one for each replica. What `Trainer` takes."""
        named = [
            dict(replica.named_parameters(remove_duplicate=False)) for replica in self.replicas
        ]
        return {
            name: [parameters[name] for parameters in named]
            for name in dict(self.replicas[0].named_parameters())
        }

    # ------------------------------------------------------------------ as nn.Module has them

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.replicas[0].named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self.replicas[0].named_buffers(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> Replicas:
        if self.training and not mode:
            self._average_buffers()
        self.training = mode
        for replica in self.replicas:
            replica.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        for replica in self.replicas:
            replica.zero_grad(set_to_none)

    def requires_grad_(self, requires_grad: bool = True) -> Replicas:
        for replica in self.replicas:
            replica.requires_grad_(requires_grad)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = self.replicas[0].state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name, mean in self._mean_buffers().items():
            if prefix + name in state:  # not there when it is a buffer that is not saved
                state[prefix + name] = mean
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if assign:
            raise UserError(
                "load_state_dict(assign=True) would give all replicas the same tensors; leave "
                "assign out"
            )
        loaded = [replica.load_state_dict(state_dict, strict) for replica in self.replicas]
        return loaded[0]

    def apply(self, fn: Callable[[nn.Module], Any]) -> Replicas:
        raise UserError(
            "apply would change each replica by itself, to other random numbers for one; call "
            "net.apply(…) before replicate"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Replicas:
        raise UserError(
            "replicas cannot be moved or cast (to, cuda, half, …); do that to the net, then "
            "replicate it"
        )

    def _mean_buffers(self) -> dict[str, torch.Tensor]:
        """The mean over the replicas of each floating-point buffer, on the first device; none of
        one replica's."""
        replicas = self.replicas
        if len(replicas) == 1:
            return {}
        others = [dict(replica.named_buffers()) for replica in replicas[1:]]
        means = {}
        for name, buffer in replicas[0].named_buffers():
            if buffer.is_floating_point():
                total = buffer.detach().clone()
                for buffers in others:
                    total += buffers[name].to(total.device)
                means[name] = total / len(replicas)
        return means

    @torch.no_grad()
    def _average_buffers(self) -> None:
        means = self._mean_buffers()
        for replica in self.replicas:
            for name, buffer in replica.named_buffers():
                if name in means:
                    buffer.copy_(means[name])


def _device_of(value: Any) -> torch.device | None:
    """The device of the first tensor in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value.device
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            device = _device_of(one)
            if device is not None:
                return device
    return None
