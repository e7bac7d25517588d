"""Horovod's names on torch.distributed: ``import allhands.horovod.torch as hvd``, or
``.tensorflow``.

Operations are matched over the ranks by their names, not by the order of their calls (see
`coordinator`).
"""

from __future__ import annotations
