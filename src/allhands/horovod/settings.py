"""Horovod's variables that mean something here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from allhands.errors import UserError


@dataclass(frozen=True)
class Settings:
    """How the engine works.

    Attributes:
        fusion_threshold: bytes up to which reductions travel together; 0: each by itself.
        cache_capacity: how many operations are known by a number when they come again; 0: none, and
            there are no rounds.
        stall_warn: seconds after which a call that some rank has not made is reported on stderr; 0:
            never.
        stall_stop: seconds after which it is an error on all ranks; 0: never.
        timeline: a file for `start_timeline`; "" for none.
        start_timeout: seconds within which all ranks must have called `init`; None: those of
            `allhands.init`.
    """

    fusion_threshold: int = 128 * 2**20
    cache_capacity: int = 1024
    stall_warn: float = 60.0
    stall_stop: float = 600.0
    timeline: str = ""
    start_timeout: float | None = None


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings that HOROVOD_FUSION_THRESHOLD, HOROVOD_CACHE_CAPACITY,
    HOROVOD_STALL_CHECK_TIME_SECONDS, HOROVOD_STALL_CHECK_DISABLE,
    HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, HOROVOD_TIMELINE and HOROVOD_START_TIMEOUT name.

    Raises:
        UserError: one of them is no number of at least 0.
    """
    plain = Settings()
    warn = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", plain.stall_warn)
    if environ.get("HOROVOD_STALL_CHECK_DISABLE", "0").strip() not in ("", "0"):
        warn = 0.0
    timeline = environ.get("HOROVOD_TIMELINE", "").strip()
    return Settings(
        fusion_threshold=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", plain.fusion_threshold)),
        cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", plain.cache_capacity)),
        stall_warn=warn,
        stall_stop=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", plain.stall_stop),
        timeline="" if timeline.upper() == "DYNAMIC" else timeline,  # until hvd.start_timeline
        start_timeout=_number(environ, "HOROVOD_START_TIMEOUT", 0.0) or None,
    )


def _number(environ: Mapping[str, str], name: str, otherwise: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return otherwise
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise UserError(f"{name}={text!r}: set {name} to a number of at least 0, or unset it")
    return number
