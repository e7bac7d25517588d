"""The values that a sweep tries: a grid, or what Optuna proposes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allhands.config import parse_override
from allhands.errors import UserError

Values = dict[str, Any]
_BETWEEN = re.compile(r"(?P<low>[^:]+)\.\.(?P<high>[^:]+?)(?P<log>:log)?")


@dataclass(frozen=True)
class Between:
    """The numbers from `low` to `high`; `log`: by orders of magnitude."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether they are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Space:
    """What is tried.

    Attributes:
        over: by key, the values.
        between: by key, a range; with one, Optuna proposes.
    """

    over: dict[str, list[Any]] = field(default_factory=dict)
    between: dict[str, Between] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The keys, in order."""
        return [*self.over, *self.between]

    def grid(self) -> Iterator[Values]:
        """Every combination of the values."""
        for values in itertools.product(*self.over.values()):
            yield dict(zip(self.over, values, strict=True))

    def trial_values(self) -> Iterator[Values]:
        """Values that stand for all that may be tried: of ranges, both ends."""
        ends = {key: [one.low, one.high] for key, one in self.between.items()}
        yield from Space(self.over | ends).grid()

    def described(self) -> dict[str, Any]:
        """As JSON."""
        ranges = {key: [one.low, one.high, one.log] for key, one in self.between.items()}
        return {"over": self.over, "between": ranges}


def space_of(over: Sequence[str], between: Sequence[str]) -> Space:
    """From ``optimizer.lr=1e-3,1e-2`` and ``optimizer.lr=1e-5..1e-1:log``."""
    found = Space()
    for text in over:
        key, _, values = text.partition("=")
        path, parsed = parse_override(f"{key}=[{values}]")
        if not isinstance(parsed, list) or not parsed:
            raise UserError(f"--over {text}: write key=value,value, such as optimizer.lr=1e-3,1e-2")
        _put(found, found.over, ".".join(path), parsed)
    for text in between:
        key, _, values = text.partition("=")
        match = _BETWEEN.fullmatch(values)
        numbers = [parse_override(f"x={match[one]}")[1] for one in ("low", "high")] if match else []
        if match is None or not all(isinstance(n, (int, float)) for n in numbers):
            raise UserError(
                f"--between {text}: write key=low..high, or key=low..high:log, such as "
                "optimizer.lr=1e-5..1e-1:log"
            )
        low, high = numbers
        if not low < high or (match["log"] and low <= 0):
            raise UserError(
                f"--between {text}: {low} must be less than {high}"
                + (", and more than 0 with :log" if match["log"] else "")
            )
        _put(found, found.between, key, Between(low, high, bool(match["log"])))
    if not found.keys:
        raise UserError(
            "nothing to try; write --over optimizer.lr=1e-3,1e-2, or --between "
            "optimizer.lr=1e-5..1e-1:log --trials 20"
        )
    return found


def _put(space: Space, part: dict[str, Any], key: str, value: Any) -> None:
    if key in space.keys:
        raise UserError(f"the key '{key}' is given twice; write its values in one option")
    part[key] = value


class Study:
    """Optuna's proposals, one after another; what was measured before is known to it.

    Args:
        space: what is tried.
        seed: decides the proposals.
        smaller: whether smaller values are better.

    Raises:
        UserError: Optuna is not installed.
    """

    def __init__(self, space: Space, seed: int, smaller: bool) -> None:
        try:
            import optuna
        except ImportError:
            raise UserError(
                "--between asks Optuna for values, which is not installed; write pip install "
                "'allhands[sweep]', or --over with values of your own"
            ) from None
        self._optuna = optuna
        self._trials: dict[int, Any] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed),
            direction="minimize" if smaller else "maximize",
        )
        kinds = optuna.distributions
        self._space: dict[str, Any] = {
            key: kinds.CategoricalDistribution([str(value) for value in values])
            for key, values in space.over.items()
        }
        self._values = {key: {str(v): v for v in values} for key, values in space.over.items()}
        for key, one in space.between.items():
            kind: Any = kinds.IntDistribution if one.whole else kinds.FloatDistribution
            self._space[key] = kind(one.low, one.high, log=one.log)

    def ask(self, number: int) -> Values:
        trial = self._study.ask(self._space)
        self._trials[number] = trial
        return {key: self._values.get(key, {}).get(v, v) for key, v in trial.params.items()}

    def tell(self, number: int, values: Mapping[str, Any], value: float | None) -> None:
        """What a trial has measured; None: it failed."""
        states = self._optuna.trial.TrialState
        state = states.FAIL if value is None else states.COMPLETE
        if number in self._trials:
            self._study.tell(self._trials.pop(number), value, state=state)
            return
        params = {key: str(v) if key in self._values else v for key, v in values.items()}
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=state, value=value, params=params, distributions=self._space
            )
        )
