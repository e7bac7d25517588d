"""What rounding explains: measured on runs that differ by nothing else, and the judgement that
follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from allhands.verify.recorder import ALL_PARAMETERS, Step
from allhands.verify.traces import Trace

#: A difference is real when it is more than so many times the noise. docs/verify.md has the figures
#: that it was chosen from.
FACTOR = 20.0


@dataclass
class Difference:
    """Where a run first differs from its reference, or comes nearest to differing.

    Attributes:
        step: counted from 1.
        what: the name of the quantity.
        difference: relative to the reference; for what must be equal, the difference itself.
        noise: what rounding explains; 0 for what must be equal.
        kind: "rounding" for what is held against the noise, "equal" for what must be equal, "ranks"
            for ranks that hold different values.
        names: the parameters or buffers that differ in this step in the same way.
    """

    step: int
    what: str
    difference: float
    noise: float
    kind: str
    names: list[str]

    @property
    def times(self) -> float:
        """The difference as a multiple of the noise."""
        return (
            self.difference / self.noise if self.noise else float("inf") if self.difference else 0.0
        )


class Noise:
    """The largest difference that rounding has made up to each step, by quantity.

    Beside a quantity's own noise, the median over all gradients (or over all parameters) counts, so
    that a quantity of a few numbers, which two runs can give alike by chance, is not held to that
    chance. It is the median and not the whole because single parameters may be all noise: Adam
    makes full steps of a gradient that is 0 but for rounding.

    Args:
        floor: never less than this.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._steps: list[dict[str, float]] = []

    def add(self, trace: Trace) -> None:
        """Take in a run that differs from the reference by rounding only."""
        largest: dict[str, float] = {}
        for number, step in enumerate(trace.steps):
            for name, value in step.get("distance", {}).items():
                largest[name] = max(largest.get(name, 0.0), value)
            if number == len(self._steps):
                self._steps.append({})
            known = self._steps[number]
            for name, value in largest.items():
                known[name] = max(known.get(name, 0.0), value)

    def at(self, number: int, name: str) -> float:
        """The noise of a quantity at the step with this index."""
        if not self._steps:
            return self.floor
        known = self._steps[min(number, len(self._steps) - 1)]
        # The loss, the gradients and the buffers of a step come from one forward pass, before its
        # update.
        if name.startswith("parameter ") or name == ALL_PARAMETERS:
            kind = "parameter "
        else:
            kind = "gradient of "
        alike = [value for other, value in known.items() if other.startswith(kind)]
        return max(self.floor, known.get(name, 0.0), statistics.median(alike) if alike else 0.0)


def judge(trace: Trace, reference: Trace, noise: Noise, exact: bool = True) -> Difference | None:
    """Where a run first differs from its reference by more than rounding; None when it never does.

    Args:
        trace: the run.
        reference: the run alone, over the same global batches.
        noise: of that reference.
        exact: False holds only what no strategy may change: samples and learning rates.
    """
    for number, (step, other) in enumerate(zip(trace.steps, reference.steps, strict=False)):
        found = next(_differences(number, step, other, noise, exact), None)
        if found is not None:
            return found
    ours, theirs = len(trace.steps), len(reference.steps)
    if ours != theirs:
        return Difference(
            min(ours, theirs) + 1, "number of optimizer steps", abs(ours - theirs), 0.0, "equal", []
        )
    return None


def nearest(trace: Trace, noise: Noise) -> Difference | None:
    """The quantity that is the largest multiple of its noise; None when nothing differs in any
    bit."""
    found = [
        Difference(number + 1, name, value, noise.at(number, name), "rounding", [])
        for number, step in enumerate(trace.steps)
        for name, value in step.get("distance", {}).items()
        if value
    ]
    return max(found, key=lambda finding: finding.times, default=None)


def _differences(
    number: int, step: Step, other: Step, noise: Noise, exact: bool
) -> Iterator[Difference]:
    """What differs in one step, causes before what follows from them."""
    if step["optimizer"] != other["optimizer"]:
        yield Difference(number + 1, "order of optimizers", float("nan"), 0.0, "equal", [])
        return
    comparable = step["content"] is not None and other["content"] is not None
    if comparable and step["samples"] != other["samples"]:
        yield Difference(
            number + 1,
            "number of samples",
            abs(step["samples"] - other["samples"]),
            0.0,
            "equal",
            [],
        )
    # Samples that are padded to the longest of a batch look otherwise in another batch.
    forms = {step.get("form"), other.get("form")}
    alike = comparable and len(forms) == 1 and forms != {-1.0}
    if alike and step["content"] != other["content"]:
        yield Difference(number + 1, "samples", float("nan"), 0.0, "equal", [])
    rates = [abs(a - b) for a, b in zip(step["rates"], other["rates"], strict=True)]
    if any(value > 1e-12 * abs(b) for value, b in zip(rates, other["rates"], strict=True)):
        yield Difference(number + 1, "learning rate", max(rates), 0.0, "equal", [])
    if not exact:
        return
    distance = step.get("distance", {})

    def beginning(word: str) -> dict[str, float]:
        return {name: value for name, value in distance.items() if name.startswith(word)}

    yield from _beyond(number, {"loss": distance["loss"]}, noise)
    yield from _beyond(number, beginning("gradient of "), noise)
    for kind in ("parameter", "buffer"):
        if names := step["apart"][f"{kind}s"]:
            what = f"{kind} {names[0]} between ranks"
            yield Difference(number + 1, what, float("nan"), 0.0, "ranks", names)
        yield from _beyond(number, beginning(f"{kind} "), noise)


def _beyond(number: int, distance: dict[str, float], noise: Noise) -> Iterator[Difference]:
    beyond = [
        name for name, value in distance.items() if not value <= FACTOR * noise.at(number, name)
    ]
    if beyond:
        first = beyond[0]
        names = [name.partition(" of ")[2] or name.partition(" ")[2] for name in beyond]
        names = [name for name in names if name]
        yield Difference(
            number + 1, first, distance[first], noise.at(number, first), "rounding", names
        )
