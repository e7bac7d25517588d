"""Samples by index, as batches on the device that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, TensorDataset, default_collate

from allhands.data import derive_seed, preserved_generators, seed_everything, to_device
from allhands.errors import UserError

_AT_ONCE = 2**26  # bytes of samples that are read for several steps at most


class Samples:
    """A data set whose batches are asked for by index.

    A `TensorDataset`, or a tuple of tensors or arrays of one length, is kept on `device` and read
    by one index operation; any other data set is read sample by sample, with the global generators
    seeded by the sample's place in the training, so that augmentation does not depend on who trains
    where.

    Args:
        dataset: ``dataset[i]`` gives one sample; it has a length.
        device: where batches are wanted.
        collate_fn: makes a batch of samples; with one of your own a `TensorDataset` too is read
            sample by sample.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.device = device
        self.collate_fn = collate_fn or default_collate
        self.tensors: tuple[torch.Tensor, ...] | None = None
        self.dataset: Dataset[Any] | Sequence[Any] = dataset
        if isinstance(dataset, TensorDataset):
            dataset = dataset.tensors
        if (
            isinstance(dataset, (tuple, list))
            and dataset
            and all(hasattr(part, "shape") for part in dataset)
        ):
            tensors = [torch.as_tensor(part) for part in dataset]
            lengths = {len(part) for part in tensors}
            if len(lengths) != 1:
                raise UserError(
                    f"the data set's tensors have {', '.join(str(len(t)) for t in tensors)} "
                    "samples; give all the same"
                )
            if self.collate_fn is default_collate:
                self.tensors = tuple(t.to(device) for t in tensors)
            else:
                self.dataset = TensorDataset(*tensors)
        elif not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UserError(
                f"the data set is a {type(dataset).__name__} without indices or length; clients "
                "need one that has both, such as a TensorDataset"
            )

    def __len__(self) -> int:
        return len(self.tensors[0]) if self.tensors is not None else len(self.dataset)  # type: ignore[arg-type]

    def take(self, indices: torch.Tensor, seed: int = 0, *place: int | str) -> Any:
        """The batch of these samples (int64, shape ``[batch]``, on any device). `seed` and `place`
        say where in the training."""
        if self.tensors is not None:
            wanted = indices.to(self.device)
            return tuple(t[wanted] for t in self.tensors)
        with preserved_generators():
            seed_everything(derive_seed(seed, "samples", *place))
            batch = self.collate_fn([self.dataset[i] for i in indices.tolist()])
        return to_device(batch, self.device)

    def take_all(self, indices: torch.Tensor, sizes: Sequence[int]) -> list[Any] | None:
        """Batches of these sizes as `take` gives them one by one, read by one operation; None where
        samples do not lie in memory, or these are more than 64 MiB.

        Args:
            indices: of the samples of all batches, one after another (int64), on any device.
            sizes: samples in each batch.
        """
        if self.tensors is None:
            return None
        nbytes = sum(t[:1].nbytes for t in self.tensors) * len(indices)
        if nbytes > _AT_ONCE:
            return None
        parts = [part.split(list(sizes)) for part in self.take(indices)]
        return list(zip(*parts, strict=True))

    def targets(self) -> torch.Tensor | None:
        """The target of every sample, shape ``[samples, …]``, on the processor: the last member of
        a data set in memory, or the attribute `targets` or `labels` of another; None where there is
        neither."""
        tensors = self.dataset.tensors if isinstance(self.dataset, TensorDataset) else self.tensors
        if tensors is not None:
            return tensors[-1].cpu()
        for name in ("targets", "labels"):
            given = getattr(self.dataset, name, None)
            if given is not None and len(given) == len(self):
                return torch.as_tensor(given).cpu()
        return None


def joined(parts: Sequence[Any]) -> Dataset[Any]:
    """Data sets one after another as one; of data sets of tensors, one of tensors."""
    if not all(isinstance(part, TensorDataset) for part in parts):
        return ConcatDataset(parts)
    columns = zip(*(part.tensors for part in parts), strict=True)
    return TensorDataset(*(torch.cat(column) for column in columns))
