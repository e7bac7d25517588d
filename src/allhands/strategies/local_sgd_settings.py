"""The settings of `local_sgd`, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from allhands.checks import check_whole, is_number
from allhands.comm.compress import NO_MATRICES, NO_THRESHOLD, checked_compress, merged_old
from allhands.errors import UserError, warn_renamed

_NESTEROV = {"lr": 0.7, "momentum": 0.9}


class LocalSGDSettings:
    """What `LocalSGD` takes, see there.

    Attributes:
        sent, sent_for_means, sent_for_copies: bytes that this rank has sent in its last training,
            in exchanges, for means that are evaluated and saved, and in an elastic job for copies
            of its own state on another worker.
    """

    def __init__(
        self,
        every: int = 32,
        outer: str | Mapping[str, Any] = "average",
        fragments: int = 1,
        exchange: str | None = None,
        mix: float = 0.0,
        compress: str | Mapping[str, Any] | None = None,
        overlap: int = 0,
    ) -> None:
        check_whole("every", every, of="LocalSGD", unit="steps")
        check_whole("fragments", fragments, of="LocalSGD")
        if fragments > every:
            raise UserError(
                f"LocalSGD(every={every}, fragments={fragments}): each fragment has a step of its "
                f"own among the {every}; set fragments to {every} or less, or every to {fragments}"
            )
        if exchange == "fp32":
            warn_renamed("LocalSGD(exchange='fp32')", "LocalSGD(), which sends weights as they are")
            exchange = None
        wanted = merged_old(compress, exchange, "LocalSGD", "exchange")
        self.compress = checked_compress(
            wanted, "LocalSGD(compress=", {"powersgd": NO_MATRICES, "2bit": NO_THRESHOLD}
        )
        if not is_number(mix) or not 0 <= mix < 1:
            raise UserError(
                f"LocalSGD(mix={mix!r}); it must be at least 0 and below 1; 0 takes the exchanged "
                "weights alone"
            )
        self.every, self.fragments, self.mix = every, fragments, float(mix)
        self.overlap = self._check_overlap(overlap)
        self.outer = _check_outer(outer)
        self.sent = self.sent_for_means = self.sent_for_copies = 0

    def _check_overlap(self, overlap: Any) -> int:
        check_whole("overlap", overlap, 0, of="LocalSGD", unit="steps")
        if overlap >= self.every and overlap:
            raise UserError(
                f"LocalSGD(every={self.every}, overlap={overlap}): an exchange is over before the "
                f"next one of the same weights begins; set overlap to {self.every - 1} or less, or "
                f"every to {overlap + 1}"
            )
        if overlap and not self.mix:
            raise UserError(
                f"LocalSGD(overlap={overlap}, mix=0): each worker would give up the {overlap} "
                "steps that it takes during an exchange; set mix to the part of its own weights "
                "that it keeps, such as 0.5"
            )
        if overlap and self.compress is not None:
            raise UserError(
                f"LocalSGD(overlap={overlap}, compress={self.compress['name']!r}): what is "
                "narrowed goes in two exchanges, of which the second needs the first; leave one "
                "of the two settings out"
            )
        return int(overlap)


def _check_outer(given: Any) -> dict[str, Any]:
    """The outer optimizer with all its numbers."""
    wanted = {"name": given} if isinstance(given, str) else given
    example = "{'name': 'nesterov', 'lr': 0.7, 'momentum': 0.9}"
    if not isinstance(wanted, Mapping) or wanted.get("name") not in ("average", "nesterov"):
        raise UserError(f"LocalSGD(outer={given!r}); it must be 'average' or {example}")
    options = {key: value for key, value in wanted.items() if key != "name"}
    if wanted["name"] == "average":
        if options:
            raise UserError(
                f"LocalSGD(outer={given!r}): 'average' has no options; write outer='average', or "
                f"outer={example}"
            )
        return {"name": "average"}
    unknown = [key for key in options if key not in _NESTEROV]
    if unknown:
        raise UserError(
            f"LocalSGD(outer={given!r}): 'nesterov' has no option {unknown[0]!r}; it has lr and "
            "momentum"
        )
    options = _NESTEROV | options
    bounds: dict[str, Callable[[float], bool]] = {
        "lr": lambda x: 0 < x < math.inf,
        "momentum": lambda x: 0 <= x < 1,
    }
    said = {
        "lr": "a positive number, such as 0.7",
        "momentum": "at least 0 and below 1, such as 0.9",
    }
    for key, value in options.items():
        if not is_number(value) or not bounds[key](value):
            raise UserError(f"LocalSGD(outer={given!r}): {key} must be {said[key]}")
    return {"name": "nesterov", **options}
