"""Batches for several devices, and samples for several workers, under the names that Gluon gave
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from allhands.data.order import global_order, share_of
from allhands.errors import UserError

Device = str | int | torch.device


def split_data(
    data: Any, num_slice: int, batch_axis: int = 0, even_split: bool = True
) -> list[torch.Tensor]:
    """Cut a batch into slices.

    Args:
        data: a tensor, or what `torch.as_tensor` takes.
        num_slice: how many slices.
        batch_axis: the dimension that counts the samples.
        even_split: refuse a batch that cannot be cut into slices of one size. False gives the first
            slices one sample more; with fewer samples than slices, the last slices are empty.

    Returns:
        `num_slice` tensors, views of `data`.

    Raises:
        UserError: `even_split`, and the number of samples is no multiple of `num_slice`; or there
            is no such dimension.
    """
    tensor = torch.as_tensor(data)
    if num_slice < 1:
        raise UserError(f"split_data(num_slice={num_slice}); it must be 1 or more")
    if not -tensor.dim() <= batch_axis < tensor.dim():
        raise UserError(
            f"split_data(batch_axis={batch_axis}), but the data has shape {list(tensor.shape)}"
        )
    size = tensor.shape[batch_axis]
    if even_split and size % num_slice:
        raise UserError(
            f"{size} samples cannot be cut into {num_slice} slices of one size; write "
            "even_split=False, or make the batch_size a "
            f"multiple of {num_slice} and use drop_last=True"
        )
    bounds = [share_of(size, part, num_slice) for part in range(num_slice)]
    return [tensor.narrow(batch_axis, start, stop - start) for start, stop in bounds]


def split_and_load(
    data: Any, ctx_list: Sequence[Device], batch_axis: int = 0, even_split: bool = True
) -> list[torch.Tensor]:
    """Cut a batch into one slice a device, and move each slice there.

    Args:
        data: a tensor, or what `torch.as_tensor` takes.
        ctx_list: devices, such as ``["cuda:0", "cuda:1"]``.
        batch_axis: the dimension that counts the samples.
        even_split: as in `split_data`.

    Returns:
        One tensor for each device, in their order.
    """
    devices = devices_of(ctx_list)
    slices = split_data(data, len(devices), batch_axis, even_split)
    return [
        part.to(device, non_blocking=True) for part, device in zip(slices, devices, strict=True)
    ]


def devices_of(devices: Sequence[Device] | Device) -> list[torch.device]:
    """The devices that a user wrote, one or a list."""
    given = [devices] if isinstance(devices, (str, int, torch.device)) else list(devices)
    if not given:
        raise UserError("the list of devices is empty; write at least one, such as ['cpu']")
    found = []
    for one in given:
        try:
            device = torch.device(one)
        except (RuntimeError, TypeError) as error:
            raise UserError(
                f"{one!r} is no device; write 'cpu', 'cuda:0', or a GPU's number"
            ) from error
        if device.type == "cuda" and device.index is None:  # tensors know their GPU's number
            device = torch.device("cuda", torch.cuda.current_device())
        found.append(device)
    return found


class SplitSampler(Sampler[int]):
    """One worker's part of a data set, in an order that is new in each epoch.

    Each epoch's order of all samples is a function of (seed, epoch); the parts take from it in
    turn, as cards are dealt. So the parts are disjoint, together they are the whole data set, their
    lengths differ by at most one, and the n-th batches of all workers together hold the same
    samples as the n-th batch of one worker whose batches are as large as all of them.

    Iterating begins the next epoch, so each worker must iterate as often as the others, or call
    `set_epoch`.

    Args:
        length: samples in the whole data set.
        num_parts: into how many parts it is cut: ``store.num_workers``.
        part_index: which part this is: ``store.rank``.
        seed: of the order; the same on all workers.
    """

    def __init__(self, length: int, num_parts: int = 1, part_index: int = 0, seed: int = 0) -> None:
        if length < 0:
            raise UserError(
                f"SplitSampler(length={length}); it is the number of samples, 0 or more"
            )
        if num_parts < 1 or not 0 <= part_index < num_parts:
            raise UserError(
                f"SplitSampler(num_parts={num_parts}, part_index={part_index}); part_index must be "
                "0 to num_parts - 1: SplitSampler(length, store.num_workers, store.rank)"
            )
        self.length, self.num_parts, self.part_index = length, num_parts, part_index
        self.seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; the one after it is `epoch` + 1."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = global_order(self.length, self.seed, self._epoch)
        # Now, not when the first index is taken: a DataLoader's worker processes fetch ahead.
        self._epoch += 1
        return iter(order[self.part_index :: self.num_parts].tolist())

    def __len__(self) -> int:
        return len(range(self.part_index, self.length, self.num_parts))
