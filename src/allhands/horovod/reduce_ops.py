"""What a reduction does."""

from __future__ import annotations

import enum
from typing import Any

from allhands.errors import UserError

__all__ = ["ActiveAverage", "Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"]


class ReduceOp(enum.StrEnum):
    """How the values of the ranks become one.

    `Average` divides the sum by the number of ranks, those that have joined included (see `join`);
    `ActiveAverage`, which Horovod does not have, by the number of those that have not. `Adasum` is
    that of Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020).
    """

    Average = "Average"
    Sum = "Sum"
    Adasum = "Adasum"
    Min = "Min"
    Max = "Max"
    Product = "Product"
    ActiveAverage = "ActiveAverage"


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
ActiveAverage = ReduceOp.ActiveAverage

# With these, a rank that has joined adds nothing by giving zeros.
ADDITIVE = (Average, Sum, ActiveAverage)


def checked(op: Any = None, average: bool | None = None) -> ReduceOp:
    """The operation that `op`, or Horovod's old argument `average`, means; `Average` when neither
    is given.

    Raises:
        UserError: both are given, or `op` is none.
    """
    if average is not None:
        if op is not None:
            raise UserError(
                "both average= and op= are given; leave average= out, op=hvd.Average or hvd.Sum "
                "says the same"
            )
        return Average if average else Sum
    if op is None:
        return Average
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(f"hvd.{name}" for name in ReduceOp.__members__)
        raise UserError(f"op={op!r} is no reduction; set op to one of {names}") from None
