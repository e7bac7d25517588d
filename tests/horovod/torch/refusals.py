"""What operations of Horovod that fail are told."""

from __future__ import annotations

import functools

import allhands.horovod.torch as hvd
from tests.refusals import refused

failed = functools.partial(refused, kind=hvd.HorovodInternalError)
