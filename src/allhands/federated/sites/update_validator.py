"""What may enter the average: every update of a site is looked at before it does, and refused in
plain words.

A site that is wrong, or wants the others ill, can still send a plausible update: the validator
keeps out what no honest training would give. Against sites that lie plausibly, choose an algorithm
whose mean bears them (``median``, ``trimmed_mean``, ``krum``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from allhands.errors import UserError
from allhands.federated.row_layout import RowLayout
from allhands.federated.sites.settings import Sites

#: Without `Sites.max_norm`, an update may be so many times as long as the median of those that were
#: accepted, and longer in proportion where its site took more steps than their median.
FACTOR = 10.0
#: From so many accepted ones on the median is asked; before, an update may be `FIRST` times as long
#: as the model itself (or 1, where the model is shorter).
ENOUGH = 3
FIRST = 1000.0
UPDATE, INTEGERS = "update", "integers"
# Integer buffers count things; more than this a site cannot have counted, and the sum of many of
# them is still exact.
_LARGEST_COUNT = 2**40
_BLOCK = 1 << 16


class UpdateValidator:
    """Judges what sites send, and remembers the norms of the updates that it let pass.

    Args:
        layout: of the model; an update has its length and dtype.
        settings: `Sites.max_norm`.
        integers: numbers in the model's integer buffers.
        own: places in a row of the numbers that each site keeps as its own, int64, in which no
            update has anything; None: none.
        clip: the bound of the norm to which sites clip their updates (`Privacy.clip`), on which a
            guarantee rests; then it is the only one. None: they do not.
    """

    def __init__(
        self,
        layout: RowLayout,
        settings: Sites,
        integers: int = 0,
        own: torch.Tensor | None = None,
        clip: float | None = None,
    ) -> None:
        self.layout, self.settings, self.clip = layout, settings, clip
        self._integers = integers
        empty = torch.ones(layout.length, dtype=torch.bool)
        for place in layout.places:
            empty[place.start : place.stop] = False
        self._gaps = empty.nonzero().flatten()
        self._own = torch.zeros(0, dtype=torch.int64) if own is None else own.cpu()
        self._size = 1.0
        # Norm and steps of each.
        self._norms: dict[str, list[list[float]]] = {"before": [], "now": []}

    def begin(self, weights: torch.Tensor) -> None:
        """A round begins, with this global model: shape ``[length]``."""
        self._size = max(1.0, norm_of(weights))
        if self._norms["now"]:
            self._norms = {"before": self._norms["now"], "now": []}

    def check(
        self,
        site: str,
        update: Mapping[str, torch.Tensor],
        figures: Mapping[str, Any],
        expected_samples: float,
        expected_steps: float,
    ) -> str | None:
        """Whether what a site sent may enter the average; where it may, its norm counts for those
        that come later.

        Args:
            site: its name, for nothing but the message.
            update: ``"update"``, shape ``[length]`` in the model's dtype, and ``"integers"``, int64
                of as many numbers as the model has in integer buffers, where it has some.
            figures: ``samples``, ``steps``, ``loss``, and where there is one ``start_loss`` and
                ``seconds``.
            expected_samples: those of which the site said that it has them.
            expected_steps: those that follow from its samples and the run's local training.

        Returns:
            The reason for refusal; None where there is none.
        """
        reason = self._wrong_arrays(update) or _wrong_figures(
            figures, expected_samples, expected_steps
        )
        if reason is not None:
            return reason
        norm = norm_of(update[UPDATE])
        return self._wrong_numbers(update, norm) or self._accept(norm, float(figures["steps"]))

    def _wrong_arrays(self, update: Mapping[str, torch.Tensor]) -> str | None:
        expected = {UPDATE: (self.layout.dtype, self.layout.length)}
        if self._integers:
            expected[INTEGERS] = (torch.int64, self._integers)
        for name in update:
            if name not in expected:
                return (
                    f"it sent an array {str(name)[:40]!r}, and the server asked for "
                    f"{' and '.join(map(repr, expected))}"
                )
        for name, (dtype, length) in expected.items():
            given = update.get(name)
            if given is None:
                return f"it sent no array {name!r}"
            if not isinstance(given, torch.Tensor) or given.dtype != dtype:
                what = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
                return f"its array {name!r} is {what}, and the model's is {dtype}"
            if tuple(given.shape) != (length,):
                return (
                    f"its array {name!r} has the shape {list(given.shape)}, and the model's is "
                    f"[{length}]"
                )
        return None

    def _wrong_numbers(self, update: Mapping[str, torch.Tensor], norm: float) -> str | None:
        row = update[UPDATE]
        # The norm is NaN or Inf where one number is; that it overflows without is found out by
        # looking at each.
        if not math.isfinite(norm) and not bool(torch.isfinite(row).all()):
            what = "NaN" if bool(torch.isnan(row).any()) else "Inf"
            return (
                f"its update has {what} in {self._name(row)}; lower the learning rate or set "
                "clip_norm, if it is honest"
            )
        for places, what in (
            (self._own, "the layers that every site keeps as its own"),
            (self._gaps, "the gaps between weights"),
        ):
            if bool(row[places].any()):
                return f"its update changes {what}, where an update has zeros"
        counts = update.get(INTEGERS)
        if counts is not None and bool(
            ((counts < -_LARGEST_COUNT) | (counts > _LARGEST_COUNT)).any()
        ):
            return (
                f"its integer buffers hold {_worst(counts.tolist())}, which nothing can have "
                "counted"
            )
        return None

    def _name(self, row: torch.Tensor) -> str:
        """The first parameter or buffer with a number that is none."""
        for place in self.layout.places:
            if not bool(torch.isfinite(row[place.start : place.stop]).all()):
                return repr(place.name)
        return "the gaps between its weights"

    def _accept(self, norm: float, steps: float) -> str | None:
        if self.clip is not None:
            # Clipped in the model's own dtype, so to rounding.
            if not norm <= self.clip * 1.00001:
                return (
                    f"its update has the norm {norm:.6g}, and privacy's clip is {self.clip:g}: "
                    "it has not clipped it"
                )
        else:
            limit, why = self._limit(steps)
            if not norm <= limit or math.isinf(norm):
                return (
                    f"its update has the norm {norm:.3g}, and {why}; set sites.max_norm to a "
                    "number above that, if such an update is right"
                )
        self._norms["now"].append([norm, steps])
        return None

    def _limit(self, steps: float) -> tuple[float, str]:
        """The largest norm, and where it comes from."""
        if self.settings.max_norm is not None:
            return self.settings.max_norm, f"sites.max_norm is {self.settings.max_norm:g}"
        known = self._norms["before"] + self._norms["now"]
        median = statistics.median(norm for norm, _ in known) if len(known) >= ENOUGH else 0.0
        if median > 0:
            usual = statistics.median(steps for _, steps in known)
            limit = FACTOR * median * max(1.0, steps / max(usual, 1.0))
            return (
                limit,
                f"more than {limit:.3g} is absurd beside {median:.3g}, the median of the last "
                f"{len(known)}",
            )
        return (
            FIRST * self._size,
            f"more than {FIRST:g} times that of the model, {self._size:.3g}, is absurd",
        )

    def state_dict(self) -> dict[str, Any]:
        """The norms and steps of the updates that were accepted in this round and in the last
        one."""
        return {name: [list(entry) for entry in entries] for name, entries in self._norms.items()}

    def load_state_dict(self, state: Mapping[str, Iterable[Iterable[float]]]) -> None:
        """Go on from what `state_dict` gave. Raises `UserError` where it is something else."""
        try:
            self._norms = {
                name: [[float(n), float(s)] for n, s in state[name]] for name in ("before", "now")
            }
        except (KeyError, TypeError, ValueError):
            raise UserError(
                "the checkpoint's norms of sites' updates are damaged; resume from the checkpoint "
                "before"
            ) from None


def check_measured(figures: Mapping[str, Any], expected: float) -> str | None:
    """Whether what a site measured may enter the mean.

    Args:
        figures: ``count`` (samples), ``loss`` (its sum over them), ``classed`` (those with a class)
            and ``right``.
        expected: test samples of which the site said that it has them.

    Returns:
        The reason for refusal; None where there is none.
    """
    for name in ("count", "loss", "classed", "right"):
        if not _is_number(figures.get(name)):
            return f"what it measured has {_shown(figures, name)}, which is no finite number"
    count, classed, right = figures["count"], figures["classed"], figures["right"]
    if count != expected:
        return f"it measured {count:g} test samples and said before that it has {expected:g}"
    if classed not in (0, count) or not 0 <= right <= classed or right != int(right):
        return f"it counted {right:g} right of {classed:g} with a class, of {count:g} test samples"
    return None


def _wrong_figures(
    figures: Mapping[str, Any], expected_samples: float, expected_steps: float
) -> str | None:
    for name in ("samples", "steps", "loss"):
        if name not in figures:
            return f"it sent no figure {name!r}"
    for name in ("samples", "steps", "loss", "start_loss", "seconds"):
        if name in figures and not _is_number(figures[name]):
            return f"its figures have {_shown(figures, name)}, which is no finite number"
    samples, steps = figures["samples"], figures["steps"]
    if samples <= 0:
        return f"it trained on {samples:g} samples; a site needs at least one"
    if samples != expected_samples:
        return f"it trained on {samples:g} samples and said before that it has {expected_samples:g}"
    if steps != expected_steps:
        return (
            f"it took {steps:g} steps, and {expected_steps:g} follow from its {samples:g} "
            "samples and the run file"
        )
    if figures.get("seconds", 0.0) < 0:
        return f"its figures have {_shown(figures, 'seconds')}, which is less than none"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(figures: Mapping[str, Any], name: str) -> str:
    return f"{name}={str(figures.get(name))[:40]}"


def norm_of(row: torch.Tensor) -> float:
    """The L2 norm of a row of any length; in float64, so that the squares of large numbers do not
    overflow."""
    # A part at a time stays in the cache, which is six times as fast as torch's own norm in another
    # dtype.
    parts = (part.double() for part in row.split(_BLOCK))
    return math.sqrt(sum(float(part.dot(part)) for part in parts))


def _worst(counts: list[int]) -> int:
    return max(counts, key=abs)
