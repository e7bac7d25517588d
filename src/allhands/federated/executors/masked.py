"""The mean loss over the first samples of a batch, as the criterion gives it for those samples
alone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Criteria whose value is a mean (or sum) over samples, and that can give their terms one by one.
_CLASSES = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
)
_FUNCTIONS = (
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
)


class MaskedLoss:
    """A criterion for batches that are padded at their end.

    Args:
        criterion: ``(output, target)`` to one number.

    Attributes:
        masks: whether the criterion is one whose terms are known; else batches cannot be padded.
    """

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion
        partial = isinstance(criterion, functools.partial)
        function, options = (criterion.func, criterion.keywords) if partial else (criterion, {})
        self.masks = type(function) in _CLASSES or (
            function in _FUNCTIONS and not (partial and criterion.args)
        )
        if not self.masks:
            return
        self._reduction = options.get("reduction", getattr(function, "reduction", "mean"))
        self._ignore_index = options.get("ignore_index", getattr(function, "ignore_index", -100))
        self._class_weights = options.get("weight", getattr(function, "weight", None))
        self._classes = type(function) in (nn.CrossEntropyLoss, nn.NLLLoss) or function in (
            F.cross_entropy,
            F.nll_loss,
        )
        if isinstance(function, nn.Module):
            terms: Any = copy.copy(function)
            terms.reduction = "none"
            self._terms = terms
        else:
            self._terms = functools.partial(function, **{**options, "reduction": "none"})

    def __call__(self, output: Any, target: Any, mask: torch.Tensor | None) -> torch.Tensor:
        """The loss of the samples whose `mask` is 1, one number.

        Args:
            output, target: as for the criterion, ``[batch, …]``.
            mask: 1 for the samples that count and 0 for the others, shape ``[batch]``; None: all
                count.
        """
        if mask is None:
            return self.criterion(output, target)
        terms = self._terms(output, target)
        if self._classes and not target.is_floating_point():
            counts = (target != self._ignore_index).to(terms.dtype)
            if self._class_weights is not None:
                counts = counts * self._class_weights[target.clamp(0, len(self._class_weights) - 1)]
            where = mask.view(-1, *(1 for _ in terms.shape[1:]))
            total, count = (terms * where).sum(), (counts * where).sum()
        elif self._reduction == "batchmean":
            total, count = (terms.reshape(len(mask), -1).sum(1) * mask).sum(), mask.sum()
        else:
            # Not a product, which autocast would narrow.
            total = (terms.reshape(len(mask), -1).sum(1) * mask).sum()
            count = mask.sum() * (terms.numel() // terms.shape[0])
        return total if self._reduction == "sum" else total / count
