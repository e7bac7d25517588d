"""A data set whose samples are mixed in pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from allhands.checks import check_whole, is_number
from allhands.errors import UserError, kind_of


class Mixup(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each sample is mixed with another one of the data set, as are their classes.

    What is drawn depends on the seed, the epoch and the sample's place in it, as all that a data
    set draws: the training is the same on any number of workers. The other sample is read as well,
    so that reading takes twice as long. Source: H. Zhang et al., "mixup: Beyond Empirical Risk
    Minimization", 2018.

    A sample is ``(x, probabilities)``: `x` as in the data set, and float32 of shape
    ``[num_classes]``, which ``nn.CrossEntropyLoss`` takes. Use it for the loader that is trained
    on; the classes of others stay numbers.

    Args:
        dataset: has a length; its samples are ``(x, class)``, a floating point tensor and a number
            from 0 to `num_classes` - 1.
        num_classes: how many classes there are.
        alpha: of the Beta(alpha, alpha) distribution from which the share of the sample is drawn;
            above 0. Small values mix little.

    Raises:
        UserError: an argument is none of these; when a sample is read: it is no such pair.
    """

    def __init__(self, dataset: Any, num_classes: int, alpha: float = 0.2) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"Mixup(dataset={kind_of(dataset)}): the other sample is one of any place, which "
                "needs a data set with a length and places; a stream has none"
            )
        check_whole("num_classes", num_classes, at_least=2, of="Mixup")
        if not is_number(alpha) or not alpha > 0:
            raise UserError(f"Mixup(alpha={alpha!r}): alpha must be a number above 0, such as 0.2")
        self.dataset, self.num_classes, self.alpha = dataset, num_classes, alpha

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = self._sample(index)
        share = float(np.random.beta(self.alpha, self.alpha))
        other_x, other_target = self._sample(int(np.random.randint(len(self.dataset))))
        return share * x + (1 - share) * other_x, share * target + (1 - share) * other_target

    def _sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self.dataset[index]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise UserError(
                f"Mixup: sample {index} is {kind_of(sample)}, and must be a pair (x, class)"
            )
        x, target = sample
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            raise UserError(
                f"Mixup: x of sample {index} is {kind_of(x)}; let the data set give a floating "
                "point tensor (for a PIL image: torchvision.transforms.ToTensor())"
            )
        number = int(target)
        if not 0 <= number < self.num_classes:
            raise UserError(
                f"Mixup(num_classes={self.num_classes}): sample {index} is of class {number}"
            )
        return x, F.one_hot(torch.tensor(number), self.num_classes).float()
